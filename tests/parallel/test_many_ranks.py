"""Sixty-four ranks on the cores of this machine, however few: nothing runs out, nothing hangs."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from hvdtrain.system.machine.limits import GIB, available_memory
from tests.conftest import ROOT, Outcome, Ranks, on_demand, ranks, run
from tests.parallel.conftest import FRAMEWORKS, assert_close, train

RANKS = 64
NEEDED = {"pytorch": 12 * GIB, "tensorflow": 22 * GIB}
OPTIONS = (
    *("--model=small", "--dropout=0", "--global-batch-size=150", "--num-steps=10"),
    *("--precision=fp64", "--lr-scaling=none", "--warmup-epochs=0", "--checkpoint-every=5"),
)


def launch(number: int, *words: str, timeout: float) -> Outcome:
    python = (sys.executable, *words)
    return run(["hvdtrain", "launch", "-n", str(number), "--", *python], timeout=timeout)


@on_demand
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("start", (ranks, launch))
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_they_train_save_evaluate_and_end_as_one_rank_does(
    framework: str, start: Ranks, tmp_path: Path
) -> None:
    if available_memory() < NEEDED[framework]:
        pytest.skip(f"{RANKS} ranks need {NEEDED[framework] // GIB} GiB of memory")
    options = (f"--framework={framework}", *OPTIONS)
    one = train(1, tmp_path / "1", "mnist", *options)
    many = train(RANKS, tmp_path / "64", "mnist", *options, start=start, timeout=1000)
    assert_close(one, many, 1e-9)
    assert many.summary["world_size"] == RANKS
    assert many.summary["saves"]["count"] == 3  # steps 5 and 10, and the end of the epoch there
    assert many.summary["samples_trained"] == 1500 and many.summary["eval_samples"] == 297
    assert many.summary["eval_accuracy"] == one.summary["eval_accuracy"]
    seconds = many.summary["seconds_to_first_step"]
    print(
        f"\n{framework}, {RANKS} ranks, {os.cpu_count()} cores: {seconds:.0f} s to the first step"
    )


def test_the_simulated_peers_take_each_step_of_a_training() -> None:
    outcome = run([sys.executable, "-m", "benchmarks.many_ranks", "--one=64"], cwd=ROOT, code=0)
    assert re.match(r"[\d.]+ s for 64 ranks: initialize .+, save_checkpoint .+", outcome.out)
