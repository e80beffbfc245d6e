"""hvdtrain launch without an MPI: marks, the last output, wrong use, warnings, the machine."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain import cli
from hvdtrain.commands.launch.argv import Placement
from hvdtrain.commands.launch.hosts import Allocation, Host
from hvdtrain.commands.launch.layout import lay_out
from hvdtrain.commands.launch.prepare import Request, choose_threads, notes, prepare
from hvdtrain.commands.launch.rank_output import (
    MARKS,
    REASON,
    LastOutput,
    RankOutput,
    cut_block,
    holds_output,
    split_endings,
)
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.gpus import count_gpus
from hvdtrain.system.machine.limits import packages, physical_cores

# The rank of a line

MARK = {
    "openmpi4": b"[1,%d]<stdout>:",
    "openmpi5": b"[1,%d]<stdout>: ",
    "mpich": b"<rank %d> ",
    "intel": b"[%d] ",
    "pals": b"x3005c0s13b0n0.hsn.example.org %d: ",
    "srun": b" %d: ",
}
BROKEN = ("openmpi4", "openmpi5", "mpich")  # dialects that mark pieces of lines


def untangle(dialect: str, *chunks: bytes) -> list[tuple[int | None, bytes]]:
    output = RankOutput(dialect)
    lines = [line for chunk in chunks for line in output.feed(chunk)]
    return lines + output.end()


@pytest.mark.parametrize("dialect", MARKS)
def test_a_mark_is_read_and_removed(dialect: str) -> None:
    mark = MARK[dialect]
    text = mark % 0 + b"step 1: [3] and <b>\n" + mark % 12 + b"\n" + mark % 1 + b"no end"
    assert untangle(dialect, text) == [(0, b"step 1: [3] and <b>"), (12, b""), (1, b"no end")]


@pytest.mark.parametrize("dialect", MARKS)
def test_a_line_without_a_mark_is_the_launchers(dialect: str) -> None:
    text = b"-----\nOne process has failed\n"
    assert untangle(dialect, text) == [(None, b"-----"), (None, b"One process has failed")]


@pytest.mark.parametrize("dialect", BROKEN)
def test_pieces_of_lines_are_joined(dialect: str) -> None:
    mark = MARK[dialect]
    # As MPICH 5.0.2 and Open MPI 4.1.4 write it, when two ranks flush in the middle of a line.
    text = mark % 1 + b"part" + mark % 0 + b"part" + mark % 1 + b"ial\n" + mark % 0 + b"ial\n"
    assert untangle(dialect, text) == [(1, b"partial"), (0, b"partial")]


@pytest.mark.parametrize("dialect", sorted(set(MARKS) - set(BROKEN)))
def test_in_other_dialects_a_mark_counts_only_at_the_beginning(dialect: str) -> None:
    mark = MARK[dialect]
    text = mark % 1 + b"quotes " + mark % 0 + b"of another\n"
    assert untangle(dialect, text) == [(1, b"quotes " + mark % 0 + b"of another")]


LINES = st.lists(
    st.tuples(st.integers(0, 3), st.binary(max_size=12).map(lambda b: b.replace(b"\n", b" "))),
    max_size=12,
)


@given(st.sampled_from(sorted(MARKS)), LINES, st.integers(0, 2**32))
def test_no_byte_is_lost_wherever_the_stream_is_cut(
    dialect: str, lines: list[tuple[int, bytes]], seed: int
) -> None:
    chance = random.Random(seed)
    stream = b""
    for rank, line in lines:
        cuts = sorted(chance.sample(range(len(line) + 1), min(2, len(line))))
        pieces = [line] if dialect not in BROKEN else _split(line, cuts)
        stream += b"".join(MARK[dialect] % rank + piece for piece in pieces) + b"\n"
    chunks = _split(stream, sorted(chance.sample(range(len(stream) + 1), min(5, len(stream)))))
    output = untangle(dialect, *chunks)
    if not any(MARKS[dialect].search(line) for _, line in lines if dialect in BROKEN):
        assert output == lines


def test_a_bracket_before_a_mark_is_output() -> None:
    mark = MARK["openmpi5"]
    text = mark % 1 + b"list: [" + mark % 2 + b"a\n" + mark % 1 + b"1]\n"
    assert untangle("openmpi5", text) == [(2, b"a"), (1, b"list: [1]")]


def _split(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = [0, *cuts, len(data)]
    return [data[low:high] for low, high in itertools.pairwise(ends)]


# mpirun's messages about ranks with an exit code other than 0

DASHES = b"-" * 74 + b"\n"
FIVE = (
    DASHES + b"prterun detected that one or more processes exited with non-zero status,\n"
    b"thus causing the job to be terminated. The first process to do so was:\n\n"
    b"   Process name: [prterun-node1-13470@1,2]\n   Exit code:    75\n" + DASHES
)
FOUR = (
    DASHES + b"Primary job  terminated normally, but 1 process returned\na non-zero exit code. "
    b"Per user-direction, the job has been aborted.\n"
    + DASHES
    + DASHES
    + b"mpirun detected that one or more processes exited with non-zero status, thus causing\n"
    b"the job to be terminated. The first process to do so was:\n\n"
    b"  Process name: [[12345,1],0]\n  Exit code:    75\n" + DASHES
)
SIGNAL = (
    DASHES + b"prterun noticed that process rank 1 with PID 4784 on node node1 exited on\n"
    b"signal 10 (User defined signal 1).\n" + DASHES
)
OTHER = DASHES + b"There are not enough slots available in the system\n" + DASHES


@pytest.mark.parametrize("block", [FIVE, FOUR, SIGNAL])
def test_mpiruns_messages_about_exit_codes_are_removed(block: bytes) -> None:
    text = b"hvdtrain: saved\n" + OTHER + block + b"the end\n"
    assert split_endings(text) == (b"hvdtrain: saved\n" + OTHER + b"the end\n", block)
    assert split_endings(OTHER) == (OTHER, b"")


@given(st.integers(0, len(FOUR) + 10), st.integers(0, len(FOUR) + 10))
def test_a_block_that_arrives_in_pieces(cut1: int, cut2: int) -> None:
    stream = b"a rank\n" + FOUR + b"end"
    first, second = sorted((cut1, cut2))
    shown, removed, block = b"", b"", b""
    for piece in (stream[:first], stream[first:second], stream[second:]):
        complete, block = cut_block(block + piece)
        text, endings = split_endings(complete)
        shown, removed = shown + text, removed + endings
    assert (shown + block, removed) == (b"a rank\nend", FOUR)


def test_a_table_that_begins_with_a_rule_is_no_block() -> None:
    text = DASHES + b"a table of a rank\n" * 400
    assert cut_block(text) == (text, b"")
    assert cut_block(b"step 1\rstep 2") == (b"step 1\rstep 2", b"")


@pytest.mark.parametrize(
    "line",
    [
        "hvdtrain: error: --data /nowhere: no such directory",
        "hvdtrain: rank 1 on node2, step 7: failed: ValueError('my mistake')",
        "hvdtrain: SIGTERM: stopped after step 8",
        "Traceback (most recent call last):",
        "/usr/bin/python3.11: No module named hvdtrain.mnsit",
        "train.py: error: unrecognized arguments: --epoch 3",
    ],
)
def test_the_reason_of_a_rank_is_recognized(line: str) -> None:
    assert REASON.search(b"[prterun-n-1@1,1]<stderr>: " + line.encode())


@pytest.mark.parametrize(
    "line",
    [
        "hvdtrain: 30 s in the sum of the gradients: rank 0 on n waiting for rank 1 on n, which",
        "hvdtrain: --workers 9: this machine has 2 cores",
        "epoch 1  step 3/100  loss 0.5",
    ],
)
def test_a_line_without_a_reason(line: str) -> None:
    assert not REASON.search(line.encode())


def test_a_rank_that_waits_for_another_one_makes_no_progress() -> None:
    waiting = b"hvdtrain: 30 s in the sum of the gradients: rank 0 on n waiting for rank 1 on n\n"
    assert not holds_output(waiting)
    assert holds_output(waiting + b"step 4\n")
    assert holds_output(b".")
    last = LastOutput()
    last.note(1, b"epoch 1  step 3/100  loss 0.5")
    last.note(0, waiting)
    assert last.rank == 1


# The last output

TWO_HOSTS = lay_out(4, Allocation("PBS", (Host("node1", 2), Host("node2", 2))))


def test_the_last_output() -> None:
    last = LastOutput()
    assert last.describe(TWO_HOSTS) == "no rank has produced output"
    last.note(0, b"epoch 1  step 40/100  loss 0.3")
    last.note(None, b"mpirun: step 99")
    assert last.describe(TWO_HOSTS) == (
        "last output from rank 0 on node1, at step 40: 'epoch 1  step 40/100  loss 0.3'"
    )
    last.note(3, b"waiting \xff")
    waits = "last output from rank 3 on node2, after step 40: 'waiting \ufffd'"
    assert last.describe(TWO_HOSTS) == waits
    last.note(3, b"step 38, then step 39: footstep 7")
    assert "last output from rank 3 on node2, at step 39: " in last.describe(TWO_HOSTS)


def test_a_long_line_is_truncated() -> None:
    last = LastOutput()
    last.note(1, b"x" * 500)
    assert last.describe(TWO_HOSTS) == f"last output from rank 1 on node1: '{'x' * 97}...'"


# Wrong use: one line, before anything is started


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 2", "missing command: put it after `--`"),
        ("-n 2 --", "missing command: put it after `--`"),
        ("-n 2 -- no-such-program-here", "no-such-program-here: no such program on the PATH"),
        ("-n 2 -- ./nowhere/train.py", "./nowhere/train.py: no such program on the PATH"),
        ("-n 0 -- true", "-n 0: must be at least 1"),
        ("-n 2 --threads 0 -- true", "--threads 0: must be at least 1"),
        ("-n 2 --timeout 0 -- true", "--timeout 0: must be more than 0"),
        ("-n 2 --timeout nan -- true", "--timeout nan: must be more than 0"),
        ("-n 3 --hosts a:2 -- true", "-n 3 is more than the 2 slots of --hosts (a:2)"),
        ("-n 3 --ppn 2 --hosts a:2,b:2 -- true", "-n 3 is not --ppn 2 times the 2 hosts"),
        ("-n 2 --hosts a: -- true", "--hosts a:: "),
        ("-n 2 --hostfile /nowhere/at/all -- true", "--hostfile: /nowhere/at/all: No such file"),
    ],
)
def test_wrong_use(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["launch", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"hvdtrain: error: {message}")
    assert err.count("\n") == 1


def test_an_empty_nodefile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nodes").touch()
    monkeypatch.setenv("PBS_NODEFILE", str(tmp_path / "nodes"))
    assert cli.main(["launch", "-n", "2", "--", "true"]) == 2
    assert f"PBS_NODEFILE: {tmp_path}/nodes contains no host" in capsys.readouterr().err


def test_a_script_that_cannot_be_executed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(UsageError, match=f"`python {script}`"):
        prepare(Request(2, [str(script)]), {"PATH": "/bin"})


# Warnings


def job(**options: object) -> Placement:
    layout = lay_out(4, Allocation("none"))
    return Placement(**{"layout": layout, "cores": 8, **options})  # type: ignore[arg-type]


def test_no_warning() -> None:
    assert notes(job()) == []
    assert notes(job(environ={"OMP_NUM_THREADS": "2", "NCPUS": "8"})) == []
    assert notes(job(environ={"OMP_NUM_THREADS": "8"}, threads=2)) == []
    assert notes(job(layout=lay_out(16, Allocation("none")))) == []


def test_too_many_threads_of_the_users() -> None:
    (note,) = notes(job(environ={"OMP_NUM_THREADS": "8"}))
    assert "4 ranks of 8 threads" in note
    assert "--threads 2" in note


def test_more_ranks_per_host_than_allocated_cores() -> None:
    (note,) = notes(job(cores=64, threads=1, environ={"NCPUS": "2"}))
    assert "only 2 cores" in note
    assert "--ppn 2" in note


def in_pbs(ncpus: int, threads: int | None) -> dict[str, str]:
    variables = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {"PBS_JOBID": "7.pbs1", "NCPUS": str(ncpus), **variables}


@pytest.mark.parametrize(
    ("environ", "request_", "threads"),
    [
        (in_pbs(8, 8), Request(4, ()), 2),  # set by PBS: all cores for every rank
        (in_pbs(8, None), Request(4, ()), 2),  # a part of the host, which has 64
        (in_pbs(8, None), Request(4, (), ranks_per_host=8), 1),
        (in_pbs(2, 2), Request(4, ()), 1),
        (in_pbs(8, 3), Request(4, ()), None),  # set by the user: kept
        (in_pbs(8, None), Request(4, (), hosts="a:4"), None),
        (in_pbs(64, 64), Request(4, ()), 16),
        (in_pbs(64, None), Request(4, ()), None),  # bound, a rank sees only its cores
        ({"SLURM_CPUS_ON_NODE": "8"}, Request(4, ()), 2),
        ({"OMP_NUM_THREADS": "8", "NCPUS": "8"}, Request(4, ()), None),  # no PBS job
        ({}, Request(4, ()), None),
        ({}, Request(4, (), ranks_per_host=8), 8),
    ],
)
def test_threads_of_a_rank_are_its_share_of_the_allocated_cores(
    environ: dict[str, str], request_: Request, threads: int | None
) -> None:
    layout = lay_out(4, Allocation("none"))
    assert choose_threads(request_, layout, 64, 0, environ) == threads
    if threads and environ.get("NCPUS") != "2":
        assert notes(job(cores=64, environ=environ, threads=threads)) == []


def test_idle_hosts() -> None:
    hosts = Allocation("PBS", (Host("a", 4), Host("b", 4), Host("c", 4)))
    assert notes(job(layout=lay_out(4, hosts))) == ["no rank for host b, c"]


# The machine


def test_hardware_threads_of_a_core_count_once(tmp_path: Path) -> None:
    for cpu, siblings in enumerate(["0,2", "1,3", "0,2", "1,3"]):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(siblings + "\n")
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({0, 1, 7}, tmp_path) == 3  # the last one is unknown


def test_packages(tmp_path: Path) -> None:
    for cpu, package in enumerate("0011"):
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(package + "\n")
    assert packages({0, 1, 2, 3}, tmp_path) == 2
    assert packages({0, 1}, tmp_path) == 1
    assert packages({0, 1, 2}, tmp_path) == 0
    assert packages({0, 8, 9}, tmp_path / "unknown") == 1


def test_gpus(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert count_gpus({}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "3"}, tmp_path) == 1
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "GPU-1a,GPU-2b,"}, tmp_path) == 2
    assert count_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == 0
    assert count_gpus({"CUDA_VISIBLE_DEVICES": "-1"}, tmp_path) == 0
    assert count_gpus({"ROCR_VISIBLE_DEVICES": "0,1,2"}, tmp_path) == 3
    assert count_gpus({"ZE_AFFINITY_MASK": "0.0,0.1"}, tmp_path) == 2
