"""torchrun starts its ranks anew: a killed one costs what was done since the last checkpoint."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import BIN, LONG, begin, end_session, run
from tests.parallel.test_launch import until

TORCHRUN = (str(BIN / "torchrun"), "--standalone", "--nproc-per-node=2", "--max-restarts=3", "-m")
TRAIN = ("hvdtrain.mnist", "--strategy=ddp", "--model=small", "--quiet", "--epochs=400")
STEPS = 60  # five epochs of 1,500 samples


@pytest.mark.parametrize("number", range(10 if LONG else 1))
def test_a_rank_that_is_killed(number: int, tmp_path: Path) -> None:
    saved, summary = tmp_path / "checkpoints", tmp_path / "summary.json"
    files = (f"--checkpoint-dir={saved}", "--checkpoint-every=5", f"--summary={summary}")
    line = [*TORCHRUN, *TRAIN, f"--num-steps={STEPS}", *files]
    process = begin(line, start_new_session=True)
    try:
        until(lambda: list(saved.glob("step-*")), process)
        chance = random.Random(number)
        time.sleep(chance.random() / 2)
        ranks = {rank.environ()["RANK"]: rank for rank in psutil.Process(process.pid).children()}
        # Rank 0 is the one that all others meet.
        ranks[str(chance.randrange(2) if LONG else 0)].kill()
        said, _ = process.communicate(timeout=120)
    finally:
        for rank in psutil.Process(process.pid).children() if process.poll() is None else ():
            rank.kill()
        end_session(process.pid)
    assert process.returncode == 0, said
    result = json.loads(summary.read_text())
    assert (result["stopped"], result["steps_completed"]) == ("steps", STEPS)
    assert result["samples_trained"] == 5 * 1500  # each sample of each epoch once


def test_without_a_checkpoint_it_would_begin_anew() -> None:
    variables = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "1"}
    outcome = run([str(BIN / "python"), "-m", *TRAIN], **variables, TORCHELASTIC_MAX_RESTARTS="3")
    assert outcome.code == 2
    assert len(outcome.said) == 1
    assert "--max-restarts" in outcome.said[0]
    assert "--checkpoint-dir" in outcome.said[0]
