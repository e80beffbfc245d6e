"""A ladder's order, commands, files and refusals; no MPI."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain import cli
from hvdtrain.errors import UsageError
from hvdtrain.launch import launch
from hvdtrain.measure import ladder, scaling
from hvdtrain.measure.alike import check_alike, check_going_on
from hvdtrain.measure.ladder import Plan, order, run_words
from hvdtrain.measure.records import Run, append_line, read_lines, read_table, table_text
from hvdtrain.measure.study import make_study
from hvdtrain.measure.tables import number
from hvdtrain.measure.text import study_text
from hvdtrain.measure.words import check_words, value_of, with_batch, without

TUTORIAL = "ranks,images_per_second\n1,281.22\n2,382.01\n4,689.22\n8,1341.25\n"
WORDS = ("python", "-m", "hvdtrain.mnist", "--num-steps", "20")
SIZES = st.lists(st.integers(1, 64), min_size=1, max_size=5, unique=True)
OPTIONS = st.lists(st.sampled_from(["--lr", "0.1", "--batch_size", "--batch-size=8", "x"]))


def summary(ranks: int, rate: float = 100.0, **other: Any) -> dict[str, Any]:
    """What a trainer would have written."""
    return {
        "workload": "mnist",
        "framework": "pytorch",
        "strategy": "horovod",
        "model": "tutorial",
        "precision": "bf16",
        "world_size": ranks,
        "hosts": 1,
        "global_batch_size": 64 * ranks,
        "images_per_second_mean": rate,
        "timeline": None,
        "stopped": "steps",
        "step_split": {"data": 0.1, "compute": 0.3, "communication": 0.0, "waiting": 0.0},
        **other,
    }


OWN = ("scaling", "command", "machine", "cores", "threads", "room")


def run(ranks: int, repeat: int = 1, rate: float = 100.0, **other: Any) -> Run:
    """One run; keys that are no field of it belong to its summary."""
    own = {k: other.pop(k) for k in OWN if k in other}
    return Run(ranks, repeat, summary(ranks, rate, **other), **{"command": WORDS, **own})


def plan(folder: Path = Path("out"), **other: Any) -> Plan:
    some = {"words": WORDS, "sizes": (1, 2, 4), "repeats": 2, "scaling": "weak", "folder": folder}
    return Plan(**{**some, **other})


# The order


def test_up_the_ladder_then_down() -> None:
    assert list(order((1, 2, 4), 3)) == [
        *((1, 1), (2, 1), (4, 1)),
        *((4, 2), (2, 2), (1, 2)),
        *((1, 3), (2, 3), (4, 3)),
    ]


@given(SIZES, st.integers(1, 6))
def test_every_size_is_run_as_often_and_none_is_favoured(sizes: list[int], repeats: int) -> None:
    runs = list(order(sorted(sizes), repeats))
    assert sorted(runs) == sorted((size, 1 + k) for size in sizes for k in range(repeats))
    if repeats % 2 == 0:  # a steady drift hits the mean place of each size alike
        places = {size: [i for i, (ranks, _) in enumerate(runs) if ranks == size] for size in sizes}
        assert len({sum(some) for some in places.values()}) == 1


# The commands


def test_the_words_of_a_weak_run() -> None:
    assert run_words(plan(), 4, 2) == [
        *WORDS,
        "--summary=out/runs/4-2.json",
        "--metrics=out/runs/4-2.jsonl",
    ]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["--batch-size", "32"], ["--global-batch-size", "32"]),
        (["--batch_size=32", "--lr", "1"], ["--lr", "1", "--global-batch-size", "32"]),
        (["--global-batch-size", "96"], ["--global-batch-size", "96"]),
    ],
)
def test_strong_scaling_keeps_the_batch_of_all_ranks(given: list[str], expected: list[str]) -> None:
    assert with_batch(["python", "t.py", *given], "strong", 1) == ["python", "t.py", *expected]
    assert with_batch(["python", "t.py", *given], "weak", 1) == ["python", "t.py", *given]


def test_the_batch_of_a_rank_is_that_at_the_smallest_size() -> None:
    words = with_batch(["python", "t.py", "--batch-size", "32"], "strong", 2)
    assert value_of(words, "--global-batch-size") == "64"
    with pytest.raises(UsageError, match="--batch-size x: give a whole number"):
        with_batch(["python", "--batch-size", "x"], "strong", 2)


def test_what_is_run_is_what_launch_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def command(ranks: int, words: list[str], **how: Any) -> str:
        seen.update(how, ranks=ranks, words=words)
        return "the command"

    monkeypatch.setattr(launch, "command", command)
    some = plan(ppn=4, threads=3, room=4, hosts="a:4,b:4")
    assert ladder.command(some, 2, 1, {}) == "the command"  # type: ignore[comparison-overlap]
    assert seen == {
        "ranks": 2,
        "words": run_words(some, 2, 1),
        "ppn": 2,  # two ranks fill no host
        "threads": 3,
        "room": 4,
        "hosts": "a:4,b:4",
        "hostfile": None,
        "environ": {},
    }


@given(OPTIONS)
def test_an_option_that_is_taken_out_is_gone(words: list[str]) -> None:
    left = without(words, "--batch-size")
    assert value_of(left, "--batch-size") is None
    rest = iter(words)
    assert all(word in rest for word in left)  # in the same order
    if value_of(words, "--batch-size") is None:
        assert left == words


@pytest.mark.parametrize(
    ("words", "mode", "message"),
    [
        ([], "weak", "what should be measured"),
        (["p", "--summary=x"], "weak", "--summary in the command: the ladder gives"),
        (["p", "--metrics", "x"], "weak", "--metrics in the command"),
        (["p", "--checkpoint_dir", "x"], "weak", "--checkpoint-dir .* go on from"),
        (["p", "--timeline", "x"], "weak", "--timeline .* slows"),
        (["p"], "strong", "--global-batch-size 256"),
        (["p", "--global-batch-size", "8"], "weak", "say --strong"),
    ],
)
def test_commands_that_cannot_be_measured(words: list[str], mode: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        check_words(words, mode, {})


def test_a_timeline_from_outside() -> None:
    check_words(WORDS, "weak", {"HOROVOD_TIMELINE": "DYNAMIC"})  # off until asked for
    with pytest.raises(UsageError, match="HOROVOD_TIMELINE is set"):
        check_words(WORDS, "weak", {"HOROVOD_TIMELINE": "t.json"})


# The files


def test_lines_are_read_back(tmp_path: Path) -> None:
    file, runs = tmp_path / "results.jsonl", [run(1), run(2), run(2, 2)]
    assert read_lines(file) == []
    for one in runs:
        append_line(file, one)
    assert read_lines(file) == runs


@given(cut=st.integers(1, 400))
def test_a_line_that_a_crash_cut_is_repeated(cut: int, tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("cut") / "results.jsonl"
    append_line(file, run(1))
    whole = file.read_bytes()
    append_line(file, run(2))
    second = len(file.read_bytes()) - len(whole)
    file.write_bytes(file.read_bytes()[: len(whole) + min(cut, second - 1)])
    assert read_lines(file) == [run(1)]
    append_line(file, run(4))
    assert read_lines(file) == [run(1), run(4)]


def test_a_run_that_lacks_but_the_end_of_its_line_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    for ranks in (1, 2):
        append_line(file, run(ranks))
    file.write_text(file.read_text().removesuffix("\n"))  # as an editor or a full disk leaves it
    assert read_lines(file) == [run(1), run(2)]
    append_line(file, run(4))
    assert read_lines(file) == [run(1), run(2), run(4)]


def test_a_broken_line_in_the_middle_is_named(tmp_path: Path) -> None:
    file = tmp_path / "results.jsonl"
    append_line(file, run(1))
    file.write_text("{}\n" + file.read_text())
    with pytest.raises(UsageError, match=r"results.jsonl, line 1: not a run"):
        read_lines(file)


def test_the_table_is_read_back(tmp_path: Path) -> None:
    file, runs = tmp_path / "results.csv", [run(2, rate=190.5, machine="m, 2 cores"), run(1)]
    file.write_text(table_text(runs))
    lines = file.read_text().splitlines()
    assert lines[0].startswith("ranks,repeat,images_per_second,images_per_second_std,step_seconds")
    first, second = read_table(file)
    assert (first.ranks, first.rate, second.ranks, second.rate) == (1, 100.0, 2, 190.5)
    assert (second.machine, second.batch, second.scaling) == ("m, 2 cores", 128, "weak")
    assert second.split["compute"] == 0.3
    with pytest.raises(UsageError, match="the precision"):
        file.write_text("\n".join([lines[0], lines[1], lines[2].replace("bf16", "fp32")]))
        check_alike(read_table(file), "weak", "f")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no column ranks and images_per_second"),
        ("ranks,images_per_second\n", "no rows"),
        (f"ranks,images_per_second\n{10**400},2\n", r"ranks '10+\.\.\.' is not a whole number"),
        ("ranks,images_per_second\n1,1e308\n", "'1e308' is not a number above 0 that could"),
        ("ranks,images_per_second\n1,5e-324\n", "'5e-324' is not a number above 0"),
        ("ranks,rate\n1,2\n", "no column images_per_second"),
        ("ranks,images_per_second\n1.5,2\n", "line 2: ranks '1.5' is not a whole number"),
        ("ranks,images_per_second\n0,2\n", "line 2: ranks '0' is not"),
        ("ranks,images_per_second\n1,2\n2,-3\n", "line 3: images_per_second '-3' is not"),
        ("ranks,images_per_second\n1,nan\n", "images_per_second 'nan' is not"),
        ("ranks,images_per_second\n1,\n", "line 2: ranks or images_per_second is empty"),
        ("ranks,images_per_second,hosts\n1,2,x\n", "hosts 'x' is not a whole number"),
    ],
)
def test_tables_that_are_none(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_table(file)


# What belongs in one table


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": "small"}, r"the model is not .*: tutorial in 1-1, 2-1; small in 2-2"),
        ({"workload": "resnet"}, "the workload"),
        ({"framework": "tensorflow"}, "the framework"),
        ({"strategy": "ddp"}, "the strategy"),
        ({"precision": "fp32"}, "the precision is not .*: bf16 in 1-1, 2-1; fp32 in 2-2"),
        ({"global_batch_size": 64}, "the batch of a rank is not .*: 64 in 1-1, 2-1; 32 in 2-2"),
        ({"hosts": 2}, "the number of hosts of 2 ranks is not .*: 1 in 2-1; 2 in 2-2"),
        ({"timeline": "t.json"}, r"run 2-2 recorded a timeline \(t.json\)"),
        ({"machine": "another"}, "the machine"),
        ({"room": 4}, "the number of ranks that share a host is not .*: 2 in 1-1, 2-1; 4 in 2-2"),
        ({"command": ("python", "x.py")}, "the command"),
        ({"scaling": "strong"}, "the scaling"),
        ({"world_size": 1}, "run 2-2 says that its world was of 1 ranks"),
        ({"stopped": "preempted"}, "run 2-2 was ended before its time"),
        ({"gradient_messages": {"bytes": 8}}, "gradient_messages in the summary of run 2-2 is"),
        ({"gradient_messages": {"count": 1, "bytes": 0}}, "it takes count and bytes"),
        ({"gradient_messages": 3}, "it takes count and bytes"),
    ],
)
def test_runs_that_do_not_belong_together(changed: dict[str, Any], message: str) -> None:
    own = {"machine": "one", "room": 2}
    runs = [run(1, **own), run(2, **own), run(2, 2, **own | changed)]
    with pytest.raises(UsageError, match=message):
        check_alike(runs, "weak", "results")


def test_runs_that_belong_together() -> None:
    check_alike([run(1), run(2), run(4, hosts=2)], "weak", "results")
    strong = {"scaling": "strong", "global_batch_size": 64}
    check_alike([run(1, **strong), run(2, **strong)], "strong", "results")
    with pytest.raises(UsageError, match="these are runs of --weak, not --strong"):
        check_alike([run(1)], "strong", "results")
    with pytest.raises(UsageError, match="the batch of all ranks"):
        check_alike([run(1, scaling="strong"), run(2, scaling="strong")], "strong", "results")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"command": (*WORDS[:-1], "30")}, "another command: 20 in run 1-1, now 30. Give another"),
        ({"command": WORDS[:-2]}, "another command: --num-steps 20 in run 1-1, now ...."),
        ({"scaling": "strong"}, "another scaling: weak in run 1-1, now strong"),
        ({"machine": "b"}, "another machine: a in run 1-1, now b"),
        ({"threads": 2}, "another threads a rank: 4 in run 1-1, now 2. .*, or --threads 4"),
        ({"room": 1}, "another share of a host: 1 of 2 ranks in .*, now 1 of 1 .* or --ppn 2"),
        (
            {"room": 4, "threads": 2},  # to keep the 4 would let the ranks share cores
            "1 of 2 ranks in run 1-1, now 1 of 4 ranks. Give another --out; with --ppn 4 from",
        ),
        ({"room": None}, "1 of 2 ranks in run 1-1, now all that there is for a rank. Give another"),
    ],
)
def test_another_kind_of_run_does_not_go_on_with_a_ladder(
    changed: dict[str, Any], message: str
) -> None:
    same = {"command": WORDS, "machine": "a", "threads": 4, "room": 2}
    done = [run(1, **same)]
    check_going_on(done, Run(2, 1, {}, **same), "out")
    with pytest.raises(UsageError, match=message):
        check_going_on(done, Run(2, 1, {}, **{**same, **changed}), "out")


# Jobs


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The job scripts of a ladder as ``--dry-run`` shows them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # no site of the user's

    def show(options: str, *words: str, ranks: str = "1,4,8") -> list[dict[str, Any]]:
        given = ["scaling", "--ranks", ranks, "--submit", options, "--dry-run", *words]
        parser = argparse.ArgumentParser()
        scaling.add_arguments(parser)
        jobs: list[dict[str, Any]] = scaling.run_verb(parser.parse_args(given[1:])).data["jobs"]
        return jobs

    return show


def test_each_size_is_a_job(scripts: Any) -> None:
    jobs = scripts("--walltime 0:20:00 --ppn 4 --scheduler pbs --env none", "--", *WORDS)
    assert [job["ranks"] for job in jobs] == [1, 4, 8]
    for job, select in zip(
        jobs,
        ("1:ncpus=1:mpiprocs=1", "1:ncpus=4:mpiprocs=4", "2:ncpus=4:mpiprocs=4"),
        strict=True,
    ):
        assert f"#PBS -l select={select}\n" in job["script"]
        assert f"#PBS -N scaling-{job['ranks']}\n" in job["script"]
        assert "#PBS -l walltime=00:20:00\n" in job["script"]
        assert "hvdtrain launch" not in job["script"]
    assert jobs[2]["script"].endswith(
        "hvdtrain scaling --ranks 8 --repeat 3 --ppn 4 --out scaling/ranks-8 -- python -m \\\n"
        "    hvdtrain.mnist --num-steps 20\n"
    )


def test_the_sizes_come_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the same time, on a node that they share, they would slow one another down."""
    qsub = tmp_path / "qsub"
    qsub.write_text('#!/bin/sh\necho "$@" >> calls\nset -- $(wc -l < calls)\necho "$1.pbs1"\n')
    qsub.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("HOME", str(tmp_path))
    options = ("--ranks", "1,2,4", "--submit", "--walltime 1:00:00 --scheduler pbs")
    assert cli.main(["scaling", *options, "--", *WORDS]) == 0
    calls = Path("calls").read_text().splitlines()
    waits = [line.partition("depend=")[2].split()[:1] for line in calls]
    assert waits == [[], ["afterany:1.pbs1"], ["afterany:2.pbs1"]]


def test_a_job_keeps_the_batch_of_all_ranks(scripts: Any) -> None:
    words = ("--strong", "--", "python", "t.py", "--batch-size", "8")
    jobs = scripts("--walltime 1:00:00 --scheduler slurm", *words, ranks="2,4")
    for job in jobs:
        assert " --strong " in job["script"]
        assert "--global-batch-size 16" in job["script"]


def test_a_size_that_is_complete_is_no_job(
    scripts: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for repeat in (1, 2, 3):
        (tmp_path / "scaling/ranks-4").mkdir(parents=True, exist_ok=True)
        append_line(tmp_path / "scaling/ranks-4/results.jsonl", run(4, repeat))
    jobs = scripts("--walltime 1:00:00 --scheduler pbs", "--", *WORDS)
    assert [job["ranks"] for job in jobs] == [1, 8]
    words = ("--ranks", "4", "--submit", "--walltime 1:00:00 --scheduler pbs")
    assert cli.main(["scaling", *words, "--", *WORDS]) == 0
    assert "4 ranks: no job, its runs are there" in caplog.text
    assert (
        capsys.readouterr().out
        == "Nothing to submit. To see what the runs say: hvdtrain scaling --out scaling\n"
    )
    assert cli.main(["scaling", *words, "--dry-run", "--", *WORDS]) == 0
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--walltime 1:00:00 --nodes 2", "--nodes is for the ladder to decide"),
        ("--walltime 1:00:00 --chain", "--chain is for the ladder to decide"),
        ("--walltime 1:00:00 --follow", "--follow is for the ladder to decide"),
        ("--walltime 1:00:00 --speed 9", "hvdtrain submit has no --speed"),
        ("--ppn x", "invalid int value: 'x'"),
        ("'", "No closing quotation"),
        ("--scheduler pbs", "--walltime: how long may the job run?"),
    ],
)
def test_options_that_no_job_takes(scripts: Any, options: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scripts(options, "--", *WORDS)


# What is told


def table(tmp_path: Path, text: str = TUTORIAL) -> str:
    file = tmp_path / "measured.csv"
    file.write_text(text)
    return str(file)


def test_the_tutorials_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scaling", "--from", table(tmp_path), "--leave-out", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:7] == [
        "  ranks   images/s   speed-up   efficiency",
        "  1         281.22       1.00      100.0 %",
        "  2         382.01       1.36       67.9 %",
        "  4         689.22       2.45       61.3 %",
        "  8        1,341.2       4.77       59.6 %",
    ]
    left = next(line for line in lines if line.startswith("Left out of the fit: 8 ranks"))
    assert abs(float(left.rpartition(": ")[2].rstrip(" %"))) < 15
    assert any(line.startswith("  16 ") for line in lines)
    assert list(tmp_path.iterdir()) == [tmp_path / "measured.csv"]  # nothing is written


def test_the_same_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["scaling", "--from", table(tmp_path), "--json", "--predict", "16,4096"]
    assert cli.main(words) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["ok"] is True
    efficiencies = [round(100 * size["efficiency"], 1) for size in data["sizes"]]
    assert efficiencies == [100.0, 67.9, 61.3, 59.6]
    assert [one["ranks"] for one in data["predictions"]] == [16, 4096]
    for one in data["predictions"]:
        assert one["efficiency"]["low"] < one["efficiency"]["middle"] < one["efficiency"]["high"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "none.csv"], "--from none.csv cannot be read"),
        (["--from", "x", "--ranks", "1,2"], "leave --ranks and the command out"),
        (["--from", "x", "--", "python"], "leave --ranks and the command out"),
        (["--ranks", "1,2"], "what should be run?"),
        (["--dry-run"], "what should be run?"),
        (["--", "python"], "--ranks: on how many ranks?"),
        (["--ranks", "1", "--timeout", "0", "--", "python"], "--timeout 0: give seconds"),
        (["--out", "nowhere"], "no results in nowhere"),
    ],
)
def test_wrong_use(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["scaling", *words]) == 2
    streams = capsys.readouterr()
    assert message in streams.err
    assert (len(streams.err.splitlines()), streams.out) == (1, "")


def test_a_size_that_was_not_measured_cannot_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["scaling", "--from", table(tmp_path), "--leave-out", "3"]) == 2
    assert "--leave-out 3: not among the sizes measured, 1, 2, 4, 8" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["1,x", "", "0,1", "1,,2"])
def test_ranks_that_are_none(words: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="not a whole number of 1 or more"):
        scaling._sizes(words)
    assert scaling._sizes("4,1, 2,2") == (1, 2, 4)


def test_a_whole_study_as_text() -> None:
    rates = {1: (100.0, 102.0), 2: (190.0, 194.0), 4: (200.0, 210.0)}
    runs = [
        run(ranks, 1 + k, rate, machine="a machine, 2 cores", cores=2)
        for ranks, some in rates.items()
        for k, rate in enumerate(some)
    ]
    text = study_text(make_study(runs, "weak"))
    assert text.split("\n\n")[:3] == [
        "mnist tutorial; pytorch over horovod; bf16; weak scaling, batch 64 per rank; 2 runs per "
        "size; a\nmachine, 2 cores",
        """\
  ranks   hosts   images/s      ±      95 % interval   speed-up   efficiency            95 %
  1           1     101.00   1.41    88.29 to 113.71       1.00      100.0 %               -
  2           1     192.00   2.83   166.59 to 217.41       1.90       95.0 %   89.2 to 100.9
  4*          1     205.00   7.07   141.47 to 268.53       2.03       50.7 %    41.0 to 60.5""",
        """\
  ranks   a step     data   compute   communication   waiting
  1       400 ms   100 ms    300 ms            0 µs      0 µs
  2       400 ms   100 ms    300 ms            0 µs      0 µs
  4*      400 ms   100 ms    300 ms            0 µs      0 µs""",
    ]
    assert "* oversubscribed (more threads than cores)" in text
    assert "no network between hosts is in it" in text


def test_one_size_foretells_nothing() -> None:
    assert "No prediction: it takes two numbers of ranks" in study_text(
        make_study([run(1)], "weak")
    )
    shared = [run(1, cores=1), run(2, cores=1)]
    assert "that do not share cores" in study_text(make_study(shared, "weak"))


def test_strong_scaling_foretells_no_more_ranks_than_samples() -> None:
    strong = {"scaling": "strong", "global_batch_size": 100}
    found = make_study([run(1, rate=100, **strong), run(2, rate=180, **strong)], "strong")
    assert [one.ranks for one in found.predictions] == [16, 32, 64]


@settings(max_examples=15)  # each fits twice and draws 200 times
@given(st.dictionaries(st.sampled_from((1, 2, 4, 8)), st.floats(0.1, 1e6), min_size=1))
def test_any_measurement_makes_a_report(rates: dict[int, float]) -> None:
    runs = [run(ranks, rate=rate, step_split=None) for ranks, rate in rates.items()]
    text = study_text(make_study(runs, "weak", ranks=(16,)))
    for rate in rates.values():
        assert number(rate) in text
