"""Resident ranks: what runs there runs as in fresh processes, and nothing of them stays."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from hvdtrain.system.runtime.exit import process_status
from tests.conftest import ranks
from tests.parallel import resident
from tests.parallel.conftest import WAYS, Training, assert_bit_equal, train

# What differs from run to run also where both are fresh: timings, and where the files are.
TIMINGS = ("images_per_second_mean", "images_per_second_std", "step_seconds_median", "step_split")
OWN = {*TIMINGS, "seconds_total", "seconds_to_first_step", "checkpoint", "options", "environment"}


def compared(training: Training) -> list[dict[str, Any]]:
    summary = training.summary
    summary["options"].update(summary="", checkpoint_dir="")
    summary["environment"].update(ended="")
    parts = [{key: value for key, value in summary.items() if key not in OWN}]
    return [*parts, summary["options"], summary["environment"]]


@pytest.mark.parametrize("way", WAYS)
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


def spoil(value: int) -> dict[str, Any]:
    """Leave marks in all that a process has one of, and return what was there before."""
    found = {
        "environment": os.environ.get("SPOILT"),
        "extra": os.environ.get("EXTRA"),
        "handler": signal.getsignal(signal.SIGTERM) == signal.SIG_DFL,
        "threads": threading.active_count(),
        "hook": sys.excepthook is sys.__excepthook__,
        "stage": process_status.stage,
        "arguments": sys.argv[1:2],
        "value": value,
    }
    os.environ["SPOILT"] = "yes"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    sys.excepthook = lambda *_: None
    process_status.stage = sys.argv[1] = "spoilt"
    return found


def fail_on_the_last(size: int) -> None:
    if int(os.environ["OMPI_COMM_WORLD_RANK"]) == size - 1:
        raise ValueError("on purpose")
    time.sleep(100)


def test_a_run_finds_a_fresh_process() -> None:
    for value in (1, 2):
        code, answers = resident.run("pytorch", 2, f"{__name__}:spoil", value, EXTRA=str(value))
        assert code == 0
        for answer in answers:
            expected = {"environment": None, "extra": str(value), "handler": True, "threads": 1}
            own = {"hook": True, "stage": "", "arguments": ["pytorch"], "value": value}
            assert answer.result == {**expected, **own}


def test_a_failure_gives_its_traceback_and_ends_the_others() -> None:
    code, answers = resident.run("pytorch", 2, f"{__name__}:fail_on_the_last", 2, timeout=60)
    assert code == 1
    assert [answer.code for answer in answers] == [-signal.SIGKILL, 1]
    assert answers[1].err.endswith("ValueError: on purpose\n")
    assert f"{Path(__file__).name}" in answers[1].err


def test_a_hang_and_a_dead_job_are_replaced() -> None:
    def job() -> tuple[int, list[psutil.Process]]:
        leader = psutil.Process(resident._jobs["pytorch", 1].process.pid)
        return leader.pid, [leader, *leader.children(recursive=True)]

    seen = []
    assert resident.run("pytorch", 1, f"{__name__}:spoil", 0)[0] == 0
    seen.append(job())
    with pytest.raises(TimeoutError, match="hung for 1 s"):
        resident.run("pytorch", 1, "time:sleep", 30, timeout=1)
    assert psutil.wait_procs(seen[-1][1], timeout=10)[1] == []
    assert resident.run("pytorch", 1, f"{__name__}:spoil", 0)[0] == 0
    seen.append(job())
    seen[-1][1][0].kill()
    seen[-1][1][0].wait()
    assert resident.run("pytorch", 1, f"{__name__}:spoil", 0)[0] == 0
    assert len({leader for leader, _ in [*seen, job()]}) == 3
    assert psutil.wait_procs(seen[-1][1], timeout=10)[1] == []
    _, processes = job()
    last = resident._jobs.pop(("pytorch", 1))
    last.end()
    assert psutil.wait_procs(processes, timeout=10)[1] == []
    assert not last.folder.exists()
