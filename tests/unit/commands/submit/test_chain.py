"""Chains: the decision of the next job, and that a chain without progress ends."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.submit import chain
from hvdtrain.commands.submit.chain import (
    GO,
    OVER,
    STUCK,
    begin,
    decide,
    end,
    progress_of,
    read,
    write,
)
from hvdtrain.steps.checkpoint_files import STATE_FILE
from tests.conftest import executable


@pytest.fixture(autouse=True)
def bin_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only directory of programs, so that no job of a real batch system is deleted."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    return tmp_path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A chain of three submitted jobs."""
    path = tmp_path / "x.chain"
    for job in ("1.server", "2.server", "3.server"):
        write(path, event="link", job=job)
    return path


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of checkpoints, which does not exist yet."""
    return tmp_path / "checkpoints"


def save(directory: Path, name: str) -> None:
    directory.mkdir(exist_ok=True)
    (directory / name).mkdir()
    newest = max((entry.stat().st_mtime_ns for entry in directory.iterdir()), default=0)
    os.utime(directory / name, ns=(newest + 1, newest + 1))


@pytest.mark.parametrize(
    ("saves", "code", "words"),
    [
        # Also after a failure, and after a killed job, which records no code: None.
        *((True, code, [GO]) for code in (75, 1, 143, None)),
        (False, 75, [STUCK, OVER]),
        # A failed or killed job, e.g. by the loss of a host, does not show that all would.
        *((False, code, [GO, STUCK, OVER]) for code in (1, 143, None)),
        (True, 0, [OVER]),  # the training is finished
        (True, 2, [OVER]),  # wrong use
    ],
)
def test_the_jobs_after_the_first(
    saves: bool, code: int | None, words: list[str], file: Path, saved: Path
) -> None:
    assert begin(file, saved, "1.server") == GO
    first = {"event": "begin", "job": "1.server", "progress": "nothing"}
    assert chain.last(read(file), "begin") == first
    if saves:
        save(saved, "step-1")
    if code is not None:
        end(file, saved, "1.server", code)
    assert [begin(file, saved, f"{2 + number}.server") for number in range(len(words))] == words


def test_a_job_that_is_rerun_begins_again(file: Path, saved: Path) -> None:
    """The batch system reruns it after the loss of a node, with --requeue."""
    assert [begin(file, saved, job) for job in ("1.server", "1.server.domain")] == [GO, GO]
    save(saved, "step-1")
    jobs = ("2.server", "2.server", "3.server", "3.server")
    assert [begin(file, saved, job) for job in jobs] == [GO, GO, STUCK, OVER]


def test_the_waiting_jobs_are_deleted(file: Path, bin_directory: Path) -> None:
    executable(bin_directory / "qdel", f'#!/bin/sh\necho "$@" > {bin_directory}/deleted\n')
    end(file, bin_directory, "1.server.domain.org", 0)  # the form of a job's id varies in PBS
    assert (bin_directory / "deleted").read_text() == "3.server 2.server\n"


@pytest.mark.parametrize("stopped", ["finished", "steps", None])
def test_exit_code_0_of_an_unfinished_training_continues_the_chain(
    stopped: str | None, file: Path, saved: Path
) -> None:
    """The command may end with 0 after the loss of a host."""
    begin(file, saved, "1.server")
    save(saved, "step-000000004")
    (saved / "step-000000004" / STATE_FILE).write_text(json.dumps({"stopped": stopped}))
    end(file, saved, "1.server", 0)
    assert begin(file, saved, "2.server") == (GO if stopped is None else OVER)


def test_incomplete_lines_are_skipped(file: Path, tmp_path: Path) -> None:
    with file.open("a") as lines:
        lines.write('{"event": "be')
    assert len(read(file)) == 3
    assert read(tmp_path / "none") == []


def test_progress_is_the_newest_complete_checkpoint(saved: Path) -> None:
    assert progress_of(saved) == "nothing"
    save(saved, "step-2")
    first = progress_of(saved)
    assert first.startswith("step-2 ")
    save(saved, ".partial-step-3")
    assert progress_of(saved) == first
    save(saved, "step-1")  # newer, whatever its name
    (saved / "latest").symlink_to("gone")
    assert progress_of(saved).startswith("step-1 ")


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([75, 1, 143, None])), max_size=8))
def test_a_chain_ends_at_most_two_jobs_after_the_last_progress(
    jobs: list[tuple[bool, int | None]],
) -> None:
    """Each job saves or not, and ends with a code or is killed."""
    events: list[chain.Event] = []
    progress, idle = 0, 0
    for job, (saves, code) in enumerate(jobs):
        word, _ = decide(events, f"step {progress}")
        if idle > 1:
            assert word in (STUCK, OVER)
            events.append({"event": "over", "why": "stuck"})
            continue
        assert word == GO
        events.append({"event": "begin", "job": str(job), "progress": f"step {progress}"})
        progress += saves
        idle = 0 if saves else 2 if code == 75 else idle + 1
        if code is not None:
            events.append({"event": "end", "job": str(job), "code": code})
