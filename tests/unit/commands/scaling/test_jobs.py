"""A sweep as jobs: one job per size, one after the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hvdtrain import cli
from hvdtrain.commands.runs.records import OUT, append_line
from hvdtrain.commands.scaling.jobs import submit_sizes
from hvdtrain.commands.scaling.sweep import Sweep, resolve
from hvdtrain.errors import UsageError
from tests.studies import WORDS, run


@pytest.fixture
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function for the job scripts of a sweep."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # no site file of the user

    def show(
        options: str,
        words: tuple[str, ...] = WORDS,
        scaling: str = "weak",
        sizes: tuple[int, ...] = (1, 4, 8),
    ) -> list[dict[str, Any]]:
        sweep = resolve(Sweep(words, sizes, 3, scaling, OUT), local=False)
        jobs: list[dict[str, Any]] = submit_sizes(sweep, options, dry_run=True).data["jobs"]
        return jobs

    return show


def test_each_size_is_a_job(scripts: Any) -> None:
    jobs = scripts("--walltime 0:20:00 --ppn 4 --scheduler pbs --env none")
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


def test_a_job_has_the_global_batch(scripts: Any) -> None:
    words = ("python", "t.py", "--batch-size", "8")
    jobs = scripts("--walltime 1:00:00 --scheduler slurm", words, "strong", (2, 4))
    for job in jobs:
        assert " --strong " in job["script"]
        assert "--global-batch-size 16" in job["script"]


def test_no_job_is_submitted_for_a_complete_size(
    scripts: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    for repeat in (1, 2, 3):
        (tmp_path / "scaling/ranks-4").mkdir(parents=True, exist_ok=True)
        append_line(tmp_path / "scaling/ranks-4/results.jsonl", run(4, repeat))
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
        ("--walltime 1:00:00 --speed 9", "--speed"),
        ("--ppn x", "'x'"),
        ("'", "No closing quotation"),
        ("--scheduler pbs", "--walltime"),
    ],
)
def test_invalid_options_of_a_job_are_reported(scripts: Any, options: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        scripts(options)
