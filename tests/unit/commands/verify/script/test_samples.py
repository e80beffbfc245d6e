"""The samples of the first epoch, whose end is estimated from samples that repeat."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.commands.verify.script.samples import (
    QUIET,
    SampleLog,
    Samples,
    first_epoch,
    repeated,
)
from hvdtrain.steps.sharding import Shards


def show(*batches: np.ndarray) -> Samples:
    """Return the samples of batches, with one update for each."""
    log = SampleLog(Samples())
    for batch in batches:
        log.add(batch)
        log.update()
    return log.samples


def rank_of(data: np.ndarray, rank: int, size: int, seed: int, batch: int) -> Samples:
    """Return the record of a rank that trains for two epochs on its parts of the batches."""
    shards = Shards(len(data), batch * size, seed, rank, size)
    return show(*(data[part.indices] for epoch in (0, 1) for part in shards.parts(epoch)))


@pytest.mark.parametrize("batch", [1, 8, 64])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_no_sample_of_the_second_epoch_counts(size: int, batch: int) -> None:
    """The first batches of the second epoch may contain no earlier sample of the rank."""
    data = np.arange(1501.0)[:, None]
    for seed in range(5):
        ranks = [rank_of(data, rank, size, seed, batch) for rank in range(size)]
        seen = first_epoch(ranks)
        assert sum(map(len, seen)) == len(set().union(*seen)) == 1501, seed


def test_duplicates_in_the_data_are_known_from_a_run_on_one_rank() -> None:
    data = np.arange(300.0)[:, None]
    data[[60, 250, 130]] = data[[10, 20, 290]]  # never in one batch
    for seed in range(5):
        ranks = [rank_of(data, rank, 2, seed, 4) for rank in range(2)]
        single_rank = first_epoch([rank_of(data, 0, 1, seed, 4)])[0]
        seen = first_epoch(ranks)
        assert (len(single_rank), len(seen[0]), len(seen[1])) == (300, 150, 150), seed
        assert len(repeated(single_rank)) == 3
        assert set(seen[0]) & set(seen[1]) <= repeated(single_rank)


def test_ranks_that_draw_all_of_the_data_share_all_samples() -> None:
    data = np.arange(200.0)[:, None]
    ranks = [rank_of(data, 0, 1, seed, 10) for seed in (1, 2)]
    assert set.intersection(*map(set, first_epoch(ranks))) == set(ranks[0].marks)


def test_a_batch_repeated_before_an_update_counts_once() -> None:
    log = SampleLog(Samples())
    for _ in range(2):
        log.add(np.arange(5.0)[:, None])
    log.update()
    assert (len(log.samples.marks), log.samples.ends, log.samples.epoch) == (5, [5], None)


def test_scattered_duplicates_are_no_second_epoch() -> None:
    # Every 25th update repeats the sample of the update before.
    firsts = [number - (number % 25 == 24) for number in range(200)]
    samples = show(*(np.array([[first], [1000.0 + n]]) for n, first in enumerate(firsts)))
    assert (samples.epoch, len(repeated(samples.marks))) == (None, 8)
    assert len(first_epoch([samples])[0]) == 400


def test_a_long_training_is_not_recorded_to_its_end() -> None:
    samples = show(*(batch for _ in range(50) for batch in np.arange(40.0).reshape(10, 4, 1)))
    assert samples.epoch == 10
    assert len(samples.marks) == 40 + (QUIET + 1) * 4


def test_a_large_dataset_is_recorded_to_its_end() -> None:
    samples = show(*np.split(np.arange(60_000.0)[:, None], 60))
    assert len(samples.marks) == 60_000
