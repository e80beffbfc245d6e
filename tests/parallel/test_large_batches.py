"""What makes large batches learn is the same after a resume.

That it is the same on any number of ranks: test_pairs.py, and scripts/optimizers.py.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.parallel.conftest import WAYS, assert_bit_equal, train

EVERYTHING = (
    *("--mixup=0.4", "--random-erase=0.5", "--label-smoothing=0.1", "--ema=0.9"),
    *("--lr-schedule=polynomial", "--model=small", "--seed=1"),
)


@pytest.mark.parametrize("way", WAYS if LONG else WAYS[1::2])
def test_a_resumed_run_is_bit_equal(way: tuple[str, ...], tmp_path: Path) -> None:
    options = (*way, "--optimizer=lamb", *EVERYTHING, "--batch-size=64", "--epochs=4")
    uncut = train(2, tmp_path / "uncut", "mnist", *options, "--num-steps=40")
    train(2, tmp_path / "cut", "mnist", *options, "--num-steps=17")
    resumed = train(2, tmp_path / "cut", "mnist", *options, "--num-steps=40", "--resume=must")
    assert_bit_equal(uncut, resumed)
    assert resumed.summary["eval_loss"] == uncut.summary["eval_loss"]
