"""One rank fails, ends, or makes another call: all ranks end within seconds, and one says why."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.parallel import resident
from tests.parallel.conftest import SCRIPTS, STRATEGIES, run_script

HERE = socket.gethostname()
LAST = f"rank 1 on {HERE}"
UNEQUAL = "deadlock, the ranks wait in different calls: "
THE_SUM = "in the (sum of the gradients|gathering of the parameters)"
FAILED = rf"{LAST}: failed: ValueError\('a bad sample'\) \(unequal.py line \d+\)"
ENDED = f"{UNEQUAL}rank 0 on {HERE} {THE_SUM}, {LAST} at the end of the program"
# What the last of two ranks does: exit code, and the line of hvdtrain.
ENDS = {
    "raise": (1, FAILED),
    "blocked": (1, FAILED),
    "interrupt": (130, rf"{LAST}: interrupted \(unequal.py line \d+\)"),
    "loader": (2, rf"{LAST}: error: the loader ended after 3 batches.*\(unequal.py line \d+\)"),
    "exit": (1, ENDED),
    "hook": (1, ENDED),
    "save": (1, f"{UNEQUAL}rank 0 on {HERE} in save_checkpoint, {LAST} at the end of the program"),
    "weight": (
        1,
        f"{UNEQUAL}rank 0 on {HERE} {THE_SUM}, {LAST} in the sum of the weights of the losses",
    ),
    "buffers": (1, f"{UNEQUAL}rank 0 on {HERE} in average_metrics, {LAST} {THE_SUM}"),
}
SOME = [
    (strategy, how)
    for strategy in STRATEGIES
    for how in ENDS
    if LONG or strategy == "mpi" or how in ("raise", "save")
]


@pytest.mark.parametrize(("strategy", "how"), SOME)
def test_a_rank_that_leaves_the_others_ends_the_job(
    strategy: str, how: str, tmp_path: Path
) -> None:
    code, line = ENDS[how]
    words = (str(SCRIPTS / "unequal.py"), strategy, how, str(tmp_path))
    outcome = resident.ranks(2, *words, timeout=60, code=code)
    (said,) = outcome.said
    assert re.match(f"hvdtrain: {line}", said), outcome.err[-3000:]
    assert ("Traceback" in outcome.err) == (UNEQUAL not in line)


def test_an_exception_of_all_ranks_is_shown_once(tmp_path: Path) -> None:
    words = (str(SCRIPTS / "unequal.py"), "mpi", "all", str(tmp_path))
    outcome = resident.ranks(3, *words, timeout=60)
    assert (outcome.code, outcome.err.count("Traceback")) == (1, 1)
    assert f"hvdtrain: rank 0 on {HERE}: failed: ValueError" in outcome.err


@pytest.mark.parametrize("strategy", STRATEGIES if LONG else ["mpi", "fsdp"])
def test_ranks_that_pause_at_random_are_not_ended(strategy: str, tmp_path: Path) -> None:
    outcome = run_script(3, "unequal.py", strategy, "pauses", str(tmp_path), folder=tmp_path)
    assert "deadlock" not in outcome.err
    assert "waiting for" in outcome.err  # the pauses are long enough to be seen


def test_an_exception_in_a_thread_ends_nothing(tmp_path: Path) -> None:
    outcome = run_script(2, "unequal.py", "mpi", "thread", str(tmp_path), folder=tmp_path)
    assert "ZeroDivisionError" in outcome.err
    assert not outcome.said
