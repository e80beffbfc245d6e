"""What makes large batches learn is the same on any number of ranks, and after a resume."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import LONG
from tests.parallel.conftest import WAYS, Training, assert_bit_equal, assert_close, train

OPTIMIZERS = ("lars", "lamb")
EVERYTHING = (
    *("--mixup=0.4", "--random-erase=0.5", "--label-smoothing=0.1", "--ema=0.9"),
    *("--lr-schedule=polynomial", "--model=small", "--seed=1"),
)
# Of 1,500 images such batches leave 2: at three ranks a part is empty.
EXACT = ("--precision=fp64", "--lr-scaling=none", "--global-batch-size=107", "--epochs=2")

# In CI every second combination.
CASES = list(itertools.product(WAYS, OPTIMIZERS))
CASES = CASES if LONG else CASES[::4] + CASES[3::4]

OneRank = Callable[..., Training]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> OneRank:
    """Train on one rank, once for each framework."""
    trained: dict[tuple[str, ...], Training] = {}

    def train_once(framework: str, *options: str) -> Training:
        words = (framework, *options)
        if words not in trained:
            trained[words] = train(1, tmp_path_factory.mktemp("one-rank"), "mnist", *words)
        return trained[words]

    return train_once


@pytest.mark.parametrize(
    ("way", "optimizer"),
    [pytest.param(*way.values, name, id=f"{way.id}-{name}") for way, name in CASES],
)
def test_ranks_compute_what_one_rank_computes(
    way: tuple[str, ...], optimizer: str, one_rank: OneRank, tmp_path: Path
) -> None:
    options = (f"--optimizer={optimizer}", "--dropout=0", *EVERYTHING, *EXACT)
    one = one_rank(way[0], *options)
    for number in (2, 3) if LONG else (3,):
        passes = "--accumulate-steps=3" if number == 2 else "--accumulate-steps=1"
        other = train(number, tmp_path / str(number), "mnist", *way, *options, passes)
        assert_close(one, other, 1e-9)
        # Evaluated with the moving average.
        assert other.summary["eval_loss"] == pytest.approx(one.summary["eval_loss"], rel=1e-9)


@pytest.mark.parametrize("way", WAYS if LONG else WAYS[1::2])
def test_a_resumed_run_is_bit_equal(way: tuple[str, ...], tmp_path: Path) -> None:
    options = (*way, "--optimizer=lamb", *EVERYTHING, "--batch-size=64", "--epochs=4")
    uncut = train(2, tmp_path / "uncut", "mnist", *options, "--num-steps=40")
    train(2, tmp_path / "cut", "mnist", *options, "--num-steps=17")
    resumed = train(2, tmp_path / "cut", "mnist", *options, "--num-steps=40", "--resume=must")
    assert_bit_equal(uncut, resumed)
    assert resumed.summary["eval_loss"] == uncut.summary["eval_loss"]
