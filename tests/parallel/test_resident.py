"""Resident processes: ranks forked there are as fresh ones, and nothing of them stays."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.conftest import LONG, ranks
from tests.parallel import resident
from tests.parallel.conftest import WAYS, Training, assert_bit_equal, train

# What differs from run to run also where both are fresh: timings, and where the files are.
TIMINGS = ("images_per_second_mean", "images_per_second_std", "step_seconds_median", "step_split")
USAGE = ("peak_memory_bytes", "utilisation_mean", "utilisation_lowest")
OTHERS = ("seconds_total", "seconds_to_first_step", "checkpoint")


def compared(training: Training) -> dict[str, Any]:
    summary = training.summary
    summary["options"].update(summary="", checkpoint_dir="")
    summary["environment"].update(ended="")
    summary["saves"] = summary["saves"]["count"]  # without their seconds
    return {key: value for key, value in summary.items() if key not in {*TIMINGS, *USAGE, *OTHERS}}


@pytest.mark.parametrize("way", WAYS[: 2 if LONG else 1])  # of each framework
def test_a_trainer_writes_what_it_writes_in_fresh_processes(
    way: tuple[str, ...], tmp_path: Path
) -> None:
    """Also the second run of a rank: the first has left nothing there."""
    options = (*way, "--model=small", "--num-steps=12")
    fresh = train(2, tmp_path / "fresh", "mnist", *options, start=ranks)
    for name in ("first", "second"):
        other = train(2, tmp_path / name, "mnist", *options)
        assert_bit_equal(fresh, other)
        assert compared(fresh) == compared(other)
        files = [{path.name for path in training.newest.iterdir()} for training in (fresh, other)]
        assert files[0] == files[1]


def server() -> psutil.Process:
    resident.address("pytorch")
    return psutil.Process(resident._servers["pytorch"].process.pid)


FAILING = """
import os, signal, time
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {}
time.sleep(100)
"""
ENDS = {"raise ValueError('on purpose')": 1, "os.kill(os.getpid(), signal.SIGSEGV)": 139}


@pytest.mark.parametrize("end", ENDS)
def test_a_rank_that_fails_ends_its_job_and_not_the_server(end: str, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(FAILING.format(end))
    before = server()
    outcome = resident.ranks(2, str(script), timeout=60)
    assert outcome.code == ENDS[end], outcome.err
    assert ("ValueError: on purpose\n" in outcome.err) == (ENDS[end] == 1)
    assert psutil.wait_procs(before.children(recursive=True), timeout=10)[1] == []
    assert server() == before


STOPPED = """
import os, signal, sys, time
rank = os.environ["OMPI_COMM_WORLD_RANK"]
signal.signal(signal.SIGTERM, lambda *_: sys.exit(open(f"ended-{rank}", "w").close()))
open(f"here-{rank}", "w").close()
time.sleep(100)
"""


def test_mpirun_hands_term_on_and_waits(tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(STOPPED)
    with ThreadPoolExecutor() as threads:
        running = threads.submit(resident.ranks, 2, str(script), cwd=tmp_path)
        while len(list(tmp_path.glob("here-*"))) < 2:
            assert not running.done(), running.result().err
            time.sleep(0.05)
        (job,) = (p for p in psutil.Process().children(recursive=True) if p.name() == "prterun")
        job.terminate()
        assert running.result().code
    assert len(list(tmp_path.glob("ended-*"))) == 2
    assert psutil.wait_procs(server().children(recursive=True), timeout=10)[1] == []
