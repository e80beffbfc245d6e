"""End time of a job, from the environment or from squeue and qstat."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.system.runtime.command import Command
from hvdtrain.system.runtime.walltime import (
    FIRST_SAVE,
    RESERVE,
    Walltime,
    ends_at,
    parse_clock,
    read_answer,
    seconds_left,
    show_clock,
    walltime_query,
)
from tests.conftest import executable, run


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("1:00:00", 3600),
        ("00:30:00", 1800),
        ("2:00", 120),
        ("1-02:03:04", 93784),
        ("100:00:00", 360000),
        (" 0:59\n", 59),
        ("60", None),
        ("1h", None),
        ("UNLIMITED", None),
        ("-1:00:00", None),
        ("1:2", None),
        ("", None),
    ],
)
def test_clocks(text: str, seconds: int | None) -> None:
    assert parse_clock(text) == seconds


@given(st.integers(0, 10**7))
def test_clocks_are_read_as_shown(seconds: int) -> None:
    assert parse_clock(show_clock(seconds)) == seconds


def test_the_environment_takes_precedence() -> None:
    assert ends_at({"HVDTRAIN_WALLTIME_ENDS": "1700000000"}) == 1.7e9
    both = {"HVDTRAIN_WALLTIME_ENDS": "1700000000", "SLURM_JOB_END_TIME": "1"}
    assert ends_at(both) == 1.7e9
    assert ends_at({"SLURM_JOB_END_TIME": "1700000000", "SLURM_JOB_ID": "1"}) == 1.7e9
    left = seconds_left({"HVDTRAIN_WALLTIME_ENDS": str(time.time() + 100)})
    assert left is not None and 50 < left <= 100
    assert seconds_left({}) is None
    assert ends_at({}) is None
    # Empty: the batch system has been queried already.
    assert ends_at({"HVDTRAIN_WALLTIME_ENDS": "", "SLURM_JOB_ID": "1"}) is None


def test_the_query_of_each_batch_system() -> None:
    squeue = Command(("squeue", "-h", "-j", "7", "-o", "%A %L"))
    assert walltime_query({"SLURM_JOB_ID": "7", "PBS_JOBID": "7"}) == squeue
    assert walltime_query({"PBS_JOBID": "7[1].server"}) == Command(("qstat", "-f", "7[1].server"))
    assert walltime_query({}) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("7 1-00:00:10\n", 86410),
        ("5 1:00:00\n7 59:30\n6 10:00\n", 3570),  # tasks of an array
        ("6 59:30\n", None),
        ("7 UNLIMITED\n", None),
        ("7 INVALID\n", None),
        ("7 \n", None),
        ("", None),
        ("Job Id: 7.s\n    Resource_List.walltime = 01:00:00\n    job_state = R\n", 3600),
        (
            "Job Id: 7.s\n    resources_used.walltime = 00:10:00\n"
            "    Resource_List.walltime = 01:00:00\n",
            3000,
        ),
        ("Job Id: 7.s\n    Resource_List.ncpus = 1\n", None),
    ],
)
def test_answers(text: str, seconds: int | None) -> None:
    assert read_answer(text, "7") == seconds


def print_end(tmp_path: Path, answer: str, code: int, *words: str) -> str:
    """Return the output of ``python -m hvdtrain.system.runtime.walltime`` for squeue's answer."""
    executable(tmp_path / "squeue", f"#!/bin/sh\necho '{answer}'\nexit {code}\n")
    line = [sys.executable, "-m", "hvdtrain.system.runtime.walltime", *words]
    outcome = run(line, PATH=str(tmp_path), SLURM_JOB_ID="7", HVDTRAIN_WALLTIME_ENDS="1")
    assert outcome.code == 0, outcome.err
    return outcome.out


def test_the_end_time_for_a_job_script(tmp_path: Path) -> None:
    """Without an answer the walltime counts from now; the end of another job does not count."""
    for answer, code, seconds in (("7 1:00:00", 0, 3600), ("slurm_load_jobs error", 1, 7200)):
        before = time.time()
        end = float(print_end(tmp_path, answer, code, "2:00:00"))
        assert before + seconds - 1 < end < time.time() + seconds + 1
    assert print_end(tmp_path, "7 UNLIMITED", 0) == "\n"


@pytest.mark.parametrize("step", [0.0, 3.0, 500.0])
@pytest.mark.parametrize("save", [0.5, FIRST_SAVE, 90.0])
def test_a_training_stops_two_steps_and_two_saves_before_the_end(step: float, save: float) -> None:
    assert not Walltime(ends=None).is_near(longest_step=1e9)
    needed = RESERVE + 2 * step + 2 * max(save, FIRST_SAVE)
    for spare, near in ((5.0, False), (-5.0, True)):
        walltime = Walltime(ends=time.monotonic() + needed + spare)
        walltime.saved(save)
        assert walltime.is_near(step) is near
