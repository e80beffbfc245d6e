"""The runs and the jobs of a sweep; no MPI is started."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.commands.scaling.sweep import ScalingOptions, Sweep, sizes, submit_sizes, sweep_words
from hvdtrain.commands.study.engine import HostShare
from hvdtrain.commands.study.run import RunOutcome, append_record
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.machine.limits import physical_cores
from tests.studies import WORDS, run

PROGRAM = ("python", "-m", "hvdtrain.mnist")
TRAIN = ("--", "python", "-m", "hvdtrain.resnet", "--num-steps", "50")
OPTIONS = ScalingOptions(ranks=(1, 2, 4), repeat=2, out=Path("out"))
STRONG = replace(OPTIONS, strong=True)


def test_the_variants_are_numbers_of_ranks() -> None:
    plan = Sweep(OPTIONS, WORDS, HostShare("a machine", 4, 1, 4))
    runs = [(variant.name, repeat) for variant, repeat in plan.runs()]
    assert runs == [("1", 1), ("2", 1), ("4", 1), ("4", 2), ("2", 2), ("1", 2)]
    assert [variant.request.ranks for variant in plan.variants] == [1, 2, 4]
    assert plan.variants[2].request.words == WORDS


def test_invalid_ranks_are_rejected() -> None:
    assert sizes("4,1, 2,2") == (1, 2, 4)
    for words in ("1,x", "", "0,1", "1,,2"):
        with pytest.raises(ValueError, match="is not a"):
            sizes(words)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--batch-size", "32"], ["--global-batch-size", "32"]),
        (["--batch_size=32", "--lr", "1"], ["--lr", "1", "--global-batch-size", "32"]),
        (
            ["--accumulate-steps=4", "--batch-size", "8"],
            ["--accumulate-steps=4", "--global-batch-size", "32"],
        ),
        (["--global-batch-size", "96"], ["--global-batch-size", "96"]),
    ],
)
def test_strong_scaling_keeps_the_global_batch(options: list[str], expected: list[str]) -> None:
    command = ("python", "t.py", *options)
    assert sweep_words(command, STRONG, {}) == ("python", "t.py", *expected)
    if "--global-batch-size" not in options:
        assert sweep_words(command, OPTIONS, {}) == command
    # The batch per rank is that at the smallest size.
    doubled = sweep_words(command, replace(STRONG, ranks=(2, 4)), {})
    assert doubled[-1] == (expected[-1] if "96" in options else "64")


@pytest.mark.parametrize(
    ("words", "options", "message"),
    [
        (["p"], STRONG, "--global-batch-size 256"),
        (["p", "--global-batch-size", "8"], OPTIONS, "needs --strong"),
        (["p", "--batch-size", "x"], STRONG, "batch size .* x: must be a whole number"),
        (["p"], ScalingOptions(), "--ranks is required"),
        ([], OPTIONS, "missing command"),
    ],
)
def test_commands_without_a_valid_batch(
    words: list[str], options: ScalingOptions, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        sweep_words(words, options, {})


def test_the_batch_may_be_set_in_the_file(tmp_path: Path) -> None:
    file = tmp_path / "options.yaml"
    words = (*PROGRAM, f"--config={file}")
    file.write_text("global-batch-size: 256\n")
    assert sweep_words(words, STRONG, {}) == words
    with pytest.raises(UsageError, match=r"--global-batch-size .* --config file needs --strong"):
        sweep_words(words, OPTIONS, {})
    # The command line overrides the file, as in the trainers.
    sweep_words([*words, "--batch-size", "8"], OPTIONS, {})
    file.write_text("batch_size: 8\n")
    two = replace(STRONG, ranks=(2, 4))
    assert sweep_words(words, two, {}) == (*words, "--global-batch-size", "16")


@pytest.fixture
def shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Return a function for the commands of a sweep on these ranks, of one repeat."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    def show(ranks: str, *words: str) -> list[str]:
        options = ("--ranks", ranks, "--repeat", "1", "--out", str(tmp_path), *words)
        assert cli.main(["scaling", *options, "--dry-run", "--json", *TRAIN]) == 0
        commands: list[str] = json.loads(capsys.readouterr().out)["commands"]
        return commands

    return show


def test_a_rank_has_the_same_cores_and_threads_at_every_size(
    shown: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cores = physical_cores()
    single, full = shown(f"1,{cores}")
    assert single.startswith("env OMP_NUM_THREADS=1 ")
    files = f"--summary={tmp_path}/runs/1-1.json --metrics={tmp_path}/runs/1-1.jsonl"
    assert single.endswith(files)
    full = full.replace(f" -n {cores} ", " -n 1 ")
    assert single == full.replace(f"/runs/{cores}-1.json", "/runs/1-1.json")
    # More ranks can be added with the same --ppn.
    assert shown("1,2", "--ppn", "4") == shown("1,2,4")[:2] == shown("1,2,4", "--ppn", "4")[:2]
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert all(line.startswith("env OMP_NUM_THREADS=3 ") for line in shown("1,2"))


def test_launch_leaves_room_for_absent_ranks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    cores = str(physical_cores())

    def launch(*words: str) -> str:
        assert cli.main(["launch", *words, "--dry-run", "--", "true"]) == 0
        return capsys.readouterr().out

    full = launch("-n", cores, "--threads", "1")
    assert launch("-n", "1", "--room-for", cores).replace("-n 1 ", f"-n {cores} ") == full
    assert "OMP_NUM_THREADS=3" in launch("-n", "1", "--room-for", cores, "--threads", "3")
    assert launch("-n", cores, "--room-for", "1") == full  # not more than the cores of the host
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert "OMP_NUM_THREADS" not in launch("-n", "1", "--room-for", cores)
    assert cli.main(["launch", "-n", "1", "--room-for", "0", "--", "true"]) == 2
    assert "--room-for: 0" in capsys.readouterr().err


def test_a_sweep_resumes_with_the_same_settings_only(tmp_path: Path) -> None:
    options = replace(OPTIONS, out=tmp_path)
    share = HostShare("a machine", 4, threads=1, ranks_per_host=4)
    sweep = Sweep(options, WORDS, share)
    summary = run(1).summary
    first = sweep.variants[0]
    sweep.record(first, 1, RunOutcome(summary))
    missing = [(variant.name, repeat) for variant, repeat in sweep.missing()]
    assert missing == [("2", 1), ("4", 1), ("4", 2), ("2", 2), ("1", 2)]
    with pytest.raises(UsageError, match="runs of another threads per rank: 1 in run 1-1, now 2"):
        replace(sweep, share=replace(share, threads=2)).missing()
    with pytest.raises(HvdtrainError, match="the run on 1 rank failed: exit code 1"):
        sweep.record(first, 2, RunOutcome(reason="exit code 1", failed=True))
    # By argparse, of another program than hvdtrain's.
    with pytest.raises(HvdtrainError, match=r"exit code 2; see its output in .*/runs/1-2\.log"):
        sweep.record(first, 2, RunOutcome(reason="exit code 2", invalid=True))
    with pytest.raises(UsageError, match="the model is not the same in all runs"):
        sweep.record(first, 2, RunOutcome(replace(summary, model="small")))
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1


# Jobs


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function for the job scripts of a sweep."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # no site file of the user

    def show(submit: str, words: tuple[str, ...] = WORDS, **changed: Any) -> list[dict[str, Any]]:
        options = ScalingOptions(
            **{"ranks": (1, 4, 8), "submit": submit, "dry_run": True, **changed}
        )
        jobs: list[dict[str, Any]] = submit_sizes(options, words).data["jobs"]
        return jobs

    return show


def test_each_size_is_a_job(scripts: Any) -> None:
    jobs = scripts("--walltime 0:20:00 --ppn 4 --scheduler pbs --env none")
    assert [job["ranks"] for job in jobs] == [1, 4, 8]
    for job, select in zip(
        jobs, ("1:ncpus=1:mpiprocs=1", "1:ncpus=4:mpiprocs=4", "2:ncpus=4:mpiprocs=4"), strict=True
    ):
        assert f"#PBS -l select={select}\n" in job["script"]
        assert f"#PBS -N scaling-{job['ranks']}\n" in job["script"]
        assert "#PBS -l walltime=00:20:00\n" in job["script"]
        assert "hvdtrain launch" not in job["script"]
    assert jobs[2]["script"].endswith(
        "hvdtrain scaling --ranks 8 --repeat 3 --ppn 4 --out scaling/ranks-8 -- python -m \\\n"
        "    hvdtrain.mnist --num-steps 20\n"
    )
    words = ("python", "t.py", "--batch-size", "8")
    for job in scripts("--walltime 1:00:00 --scheduler slurm", words, strong=True, ranks=(2, 4)):
        assert " --strong " in job["script"]
        assert "--global-batch-size 16" in job["script"]


def test_a_node_has_as_many_ranks_as_gpus(scripts: Any, tmp_path: Path) -> None:
    site = tmp_path / "site.yaml"
    site.write_text("gpus_per_node: 4\ngpu_resource: ngpus\n")
    submit = f"--walltime 1:00:00 --scheduler pbs --site {site}"
    assert ":mpiprocs=4:ngpus=4\n" in scripts(submit, ranks=(8,))[0]["script"]
    for words, count in (("--gpus-per-node 2", 2), ("--ppn 1", 1)):  # before those of the site
        text = scripts(f"{submit} {words}", ranks=(8,))[0]["script"]
        assert f"#PBS -l select={8 // count}:ncpus={count}:mpiprocs={count}:" in text
        assert f" --ppn {count} " in text


def test_a_size_that_does_not_fill_its_nodes_is_reported(scripts: Any) -> None:
    with pytest.raises(UsageError, match="--ranks 6: must be at most 4, the ranks per node, or a"):
        scripts("--walltime 1:00:00 --ppn 4 --scheduler pbs", ranks=(4, 6))


def test_each_job_waits_for_the_previous_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the same time, on a shared node, they would slow one another down."""
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


def test_no_job_is_submitted_for_a_complete_size(
    scripts: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for repeat in (1, 2, 3):
        (tmp_path / "scaling/ranks-4").mkdir(parents=True, exist_ok=True)
        append_record(tmp_path / "scaling/ranks-4/results.jsonl", run(4, repeat))
    jobs = scripts("--walltime 1:00:00 --scheduler pbs")
    assert [job["ranks"] for job in jobs] == [1, 8]
    words = ("--ranks", "4", "--submit", "--walltime 1:00:00 --scheduler pbs")
    assert cli.main(["scaling", *words, "--", *WORDS]) == 0
    assert "4 ranks: no job" in caplog.text
    shown = capsys.readouterr().out
    assert shown.startswith("Nothing to submit. ")
    assert shown.endswith(": hvdtrain scaling --out scaling\n")
    assert cli.main(["scaling", *words, "--dry-run", "--", *WORDS]) == 0
    assert capsys.readouterr().out.strip() == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--walltime 1:00:00 --nodes 2", "--nodes is set by the sweep"),
        ("--walltime 1:00:00 --chain", "--chain is set by the sweep"),
        ("--walltime 1:00:00 --follow", "--follow is set by the sweep"),
        ("--walltime 1:00:00 --stage-env", "--stage-env is set by the sweep"),
        ("--walltime 1:00:00 --speed 9", "--speed"),
        ("--ppn x", "'x'"),
        ("'", "No closing quotation"),
        ("--scheduler pbs", "--walltime"),
    ],
)
def test_invalid_options_of_a_job_are_reported(scripts: Any, options: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scripts(options)
