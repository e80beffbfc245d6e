"""hvdtrain launch without an MPI: marks, the last output, wrong use, warnings, the machine."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.launch.argv import Launch
from hvdtrain.commands.launch.hosts import Allocation, Host, RankLayout, lay_out, parse_hosts
from hvdtrain.commands.launch.launcher_choice import MpiLauncher
from hvdtrain.commands.launch.outcome import REASON, cut_block, split_endings
from hvdtrain.commands.launch.prepare import (
    Request,
    choose_threads,
    notes,
    prepare,
    with_host_cores,
)
from hvdtrain.commands.launch.watch import MARKS, LastOutput, RankOutput, holds_output
from hvdtrain.errors import UsageError
from tests.conftest import executable
from tests.unit.system.machine.test_threads import in_pbs

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
    launchers = b"-----\nOne process has failed\n"
    assert untangle(dialect, launchers) == [(None, b"-----"), (None, b"One process has failed")]


@pytest.mark.parametrize("dialect", MARKS)
def test_pieces_of_lines_are_joined_by_the_dialects_that_cut_them(dialect: str) -> None:
    mark = MARK[dialect]
    if dialect not in BROKEN:  # a mark counts only at the beginning
        text = mark % 1 + b"quotes " + mark % 0 + b"of another\n"
        assert untangle(dialect, text) == [(1, b"quotes " + mark % 0 + b"of another")]
        return
    # As MPICH 5.0.2 and Open MPI 4.1.4 write it, when two ranks flush in the middle of a line.
    text = mark % 1 + b"part" + mark % 0 + b"part" + mark % 1 + b"ial\n" + mark % 0 + b"ial\n"
    assert untangle(dialect, text) == [(1, b"partial"), (0, b"partial")]


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
    ("line", "is_reason"),
    [
        ("hvdtrain: error: --data /nowhere: no such directory", True),
        ("hvdtrain: rank 1 on node2, step 7: failed: ValueError('my mistake')", True),
        ("hvdtrain: SIGTERM: stopped after step 8", True),
        ("Traceback (most recent call last):", True),
        ("/usr/bin/python3.11: No module named hvdtrain.mnsit", True),
        ("train.py: error: unrecognized arguments: --epoch 3", True),
        ("hvdtrain: 30 s in the sum of the gradients: rank 0 on n waiting for rank 1 on n", False),
        ("hvdtrain: --workers 9: this machine has 2 cores", False),
        ("epoch 1  step 3/100  loss 0.5", False),
    ],
)
def test_the_reason_of_a_rank_is_recognized(line: str, is_reason: bool) -> None:
    assert bool(REASON.search(b"[prterun-n-1@1,1]<stderr>: " + line.encode())) == is_reason


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
    last.note(1, b"x" * 500)
    assert last.describe(TWO_HOSTS).endswith(f"on node1, after step 40: '{'x' * 97}...'")


# Wrong use: one line, before anything is started

A_LIST = "must be a list such as node1:4,node2:4"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-n 2", "missing command: put it after `--`"),
        ("-n 2 --", "missing command: put it after `--`"),
        ("-n 2 -- no-such-program-here", "no-such-program-here: no such program on the PATH"),
        ("-n 2 -- ./nowhere/train.py", "./nowhere/train.py: no such program on the PATH"),
        ("-n 0 -- true", "-n: 0 is not a whole number of 1 or more"),
        ("-n 2 --threads 0 -- true", "--threads: 0 is not a whole number"),
        ("-n 2 --timeout nan -- true", "--timeout: nan is not a number above 0"),
        ("-n 2 --stage-env try -- true", "--stage-env try: it takes no value"),
        (
            "-n 2 --stage-env --dry-run -- true",
            "--stage-env and --dry-run cannot be combined: the command depends on",
        ),
        ("-n 2 --launcher torchrun --tag -- true", "--launcher torchrun does not support --tag"),
        ("-n 2 --launcher torchrun --timeout 5 -- true", "--launcher torchrun does not support"),
        ("-n 3 --hosts a:2 -- true", "-n 3 is more than the 2 slots of --hosts (a:2)"),
        ("-n 3 --ppn 2 --hosts a:2,b:2 -- true", "-n 3 is not --ppn 2 times the 2 hosts"),
        ("-n 2 --hosts a: -- true", f"--hosts a:: {A_LIST}\n"),
        ("-n 2 --hosts [::1]:2 -- true", f"--hosts [::1]:2: {A_LIST}; IPv6 addresses are not"),
        ("-n 2 --hosts fe80:1:2:3:4:5:6:7 -- true", f"--hosts fe80:1:2:3:4:5:6:7: {A_LIST}; IPv6"),
        ("-n 2 --hostfile /nowhere/at/all -- true", "--hostfile: /nowhere/at/all: No such file"),
    ],
)
def test_wrong_use(words: str, message: str, refused: Callable[..., str]) -> None:
    assert refused("launch", *words.split()).startswith(f"hvdtrain: error: {message}")


def test_a_script_that_cannot_be_executed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    with pytest.raises(UsageError, match=f"`python {script}`"):
        prepare(Request(2, [str(script)]), {"PATH": "/bin"})


# Warnings


def job(**settings: object) -> Launch:
    mpi, layout = MpiLauncher("openmpi5", "mpirun", ""), lay_out(4, Allocation("none"))
    return Launch(mpi, (), **{"layout": layout, "cores": 8, **settings})  # type: ignore[arg-type]


THREE = Allocation("PBS", (Host("a", 4), Host("b", 4), Host("c", 4)))


@pytest.mark.parametrize(
    ("settings", "warning"),
    [
        ({}, ""),
        ({"environ": {"OMP_NUM_THREADS": "2", "NCPUS": "8"}}, ""),
        ({"environ": {"OMP_NUM_THREADS": "8"}, "threads": 2}, ""),
        ({"layout": lay_out(16, Allocation("none"))}, ""),
        ({"environ": {"OMP_NUM_THREADS": "8"}}, "4 ranks of 8 threads .* --threads 2"),
        ({"cores": 64, "threads": 1, "environ": {"NCPUS": "2"}}, "only 2 cores.*--ppn 2"),
        ({"layout": lay_out(4, THREE)}, "no rank for host b, c"),
    ],
)
def test_warnings(settings: dict[str, object], warning: str) -> None:
    warnings = notes(job(**settings))
    assert len(warnings) == bool(warning)
    assert all(re.search(warning, line) for line in warnings)


@pytest.mark.parametrize(
    ("environ", "request_", "threads"),
    [
        (in_pbs(8, 8), Request(4, ()), 2),  # set by PBS: all cores for every rank
        (in_pbs(8), Request(4, ()), 2),  # a part of the host, which has 64
        (in_pbs(8), Request(4, (), ranks_per_host=8), 1),
        (in_pbs(2, 2), Request(4, ()), 1),
        (in_pbs(8, 3), Request(4, ()), None),  # set by the user: kept
        (in_pbs(8), Request(4, (), hosts="a:4"), None),
        (in_pbs(64, 64), Request(4, ()), 16),
        (in_pbs(64), Request(4, ()), None),  # bound, a rank sees only its cores
        ({"SLURM_CPUS_ON_NODE": "8"}, Request(4, ()), 2),
        ({"OMP_NUM_THREADS": "8", "NCPUS": "8"}, Request(4, ()), None),  # no PBS job
        ({}, Request(4, ()), None),
        ({}, Request(4, (), ranks_per_host=8), 8),
        ({}, Request(4, (), ranks_per_host=3), 16),
        ({}, Request(4, (), ranks_per_host=65), 1),
        ({"OMP_NUM_THREADS": "3"}, Request(4, (), ranks_per_host=8), None),
        (in_pbs(64, 64), Request(4, (), hosts="a:4", ranks_per_host=8), 8),
    ],
)
def test_threads_of_a_rank_are_its_share_of_the_allocated_cores(
    environ: dict[str, str], request_: Request, threads: int | None
) -> None:
    layout, no_gpus = lay_out(4, Allocation("none")), {"CUDA_VISIBLE_DEVICES": ""}
    assert choose_threads(request_, layout, 64, environ | no_gpus) == threads
    if threads and environ.get("NCPUS") != "2":
        assert notes(job(cores=64, environ=environ, threads=threads)) == []


# Output of qstat -f of OpenPBS for -l select=2:ncpus=2:mpiprocs=2+1:ncpus=4:mpiprocs=1.
EXEC_HOST = """#!/bin/sh
cat <<'END'
Job Id: 7.pbs1
    exec_host = node1/0*2+node1/1*2+node
\t2.cluster/0*4+node3/0
END
"""


@pytest.mark.parametrize(
    ("hosts", "ncpus", "threads", "warns"),
    [
        ("node1:2", 2, 2, False),  # two chunks on a host
        ("node1:4", 2, 1, False),
        ("node1:4", 4, 1, False),
        ("node2:2", 2, 2, False),  # a chunk larger than the first
        ("node2:8", 2, 1, True),
        ("node3:1,node2:4", 1, 1, False),
        ("node1:4,node2.cluster:1", 2, 1, False),
        ("elsewhere:2", 2, 1, False),  # unknown: NCPUS
    ],
)
def test_the_cores_of_a_host_are_those_of_its_chunks(
    hosts: str,
    ncpus: int,
    threads: int,
    warns: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    executable(tmp_path / "qstat", EXEC_HOST)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    layout = RankLayout(0, parse_hosts(hosts))
    job_environ = in_pbs(ncpus, ncpus) | {"PBS_NODEFILE": "x", "CUDA_VISIBLE_DEVICES": ""}
    environ = with_host_cores(job_environ, layout.hosts)
    assert choose_threads(Request(0, ()), layout, 64, environ) == threads
    warnings = notes(job(cores=64, layout=layout, environ=environ, threads=threads))
    assert bool(warnings) == warns
