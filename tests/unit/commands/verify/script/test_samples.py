"""Which samples are of the first epoch: where the next one begins is guessed, and counted over."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdtrain.commands.verify.script.samples import QUIET, Samples, first_epoch, repeated
from hvdtrain.steps.sharding import Shards


def noted(samples: Samples) -> dict[str, Any]:
    return {"rows": samples.marks, "ends": samples.ends, "epoch": samples.epoch}


def show(samples: Samples, *batches: np.ndarray) -> None:
    """Show batches, an update each."""
    for batch in batches:
        samples.add(batch)
        samples.update()


def rank_of(data: np.ndarray, rank: int, size: int, seed: int, batch: int) -> dict[str, Any]:
    """What a rank notes that trains for two epochs on its parts of the global batches."""
    samples, shards = Samples(), Shards(len(data), batch * size, seed, rank, size)
    for epoch in (0, 1):
        show(samples, *(data[part.indices] for part in shards.parts(epoch)))
    return noted(samples)


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_no_sample_of_the_second_epoch_counts(size: int, batch: int) -> None:
    """The first batches of the second epoch may hold no sample that the rank has had."""
    data = np.arange(1501.0)[:, None]
    for seed in range(5):
        ranks = [rank_of(data, rank, size, seed, batch) for rank in range(size)]
        seen = first_epoch(ranks)
        assert sum(map(len, seen)) == len(set().union(*seen)) == 1501, seed


def test_what_the_data_has_twice_is_known_from_one_rank_alone() -> None:
    data = np.arange(300.0)[:, None]
    data[[60, 250, 130]] = data[[10, 20, 290]]  # never in one batch
    for seed in range(5):
        ranks = [rank_of(data, rank, 2, seed, 4) for rank in range(2)]
        alone = first_epoch([rank_of(data, 0, 1, seed, 4)])[0]
        seen = first_epoch(ranks)
        assert (len(alone), len(seen[0]), len(seen[1])) == (300, 150, 150), seed
        assert len(repeated(alone)) == 3
        assert set(seen[0]) & set(seen[1]) <= repeated(alone)


def test_ranks_that_draw_all_of_the_data_have_all_of_it_in_common() -> None:
    data = np.arange(200.0)[:, None]
    ranks = [rank_of(data, 0, 1, seed, 10) for seed in (1, 2)]
    assert set.intersection(*map(set, first_epoch(ranks))) == set(ranks[0]["rows"])


def test_a_batch_that_is_shown_twice_before_an_update_counts_once() -> None:
    samples = Samples()
    samples.add(np.arange(5.0)[:, None])
    samples.add(np.arange(5.0)[:, None])
    samples.update()
    assert (len(samples.marks), samples.ends, samples.epoch) == (5, [5], None)


def test_duplicates_here_and_there_are_no_second_epoch() -> None:
    samples = Samples()
    for number in range(200):
        twin = number % 25 == 24  # a sample that was there before
        show(samples, np.array([[number - twin], [1000.0 + number]]))
    assert (samples.epoch, len(repeated(samples.marks))) == (None, 8)
    assert len(first_epoch([noted(samples)])[0]) == 400


def test_a_long_training_is_not_noted_to_its_end() -> None:
    samples = Samples()
    for _ in range(50):
        show(samples, *np.arange(40.0).reshape(10, 4, 1))
    assert samples.epoch == 10
    assert len(samples.marks) == 40 + (QUIET + 1) * 4


def test_a_large_data_set_is_told_apart_to_its_end() -> None:
    samples = Samples()
    for part in np.split(np.arange(60_000.0)[:, None], 60):
        samples.add(part)
    assert len(samples.marks) == 60_000
