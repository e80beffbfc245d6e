"""Running statistics: the mean weighted by samples, and each rank's own row in a checkpoint."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.adapters.rank_buffers import (
    buffers_of_rank,
    different_buffers,
    gather_buffers,
    mean_buffers,
    separate_buffers,
)
from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.steps.checkpoint_files import Arrays, Checkpoint

SEEN = [3, 0, 1]  # samples of the ranks; one has seen none


def local_of(rank: int) -> Arrays:
    return {
        "mean": np.array([[1.0, 2.0], [4.0, 8.0]], np.float32) * (rank + 1),
        "scalar": np.array(10.0 * rank),
        "half": np.array([rank, -rank], np.float16),
    }


def mean_of(communicator: Communicator, local: Arrays, seen: int) -> Arrays:
    return mean_buffers(gather_buffers(communicator, local, seen))


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(0, 500), st.integers(-99, 99)), min_size=1, max_size=4).filter(
        lambda ranks: any(seen for seen, _ in ranks)
    )
)
def test_the_mean_in_whole_numbers(on_ranks: Any, ranks: list[tuple[int, int]]) -> None:
    def act(communicator: Communicator) -> float:
        seen, value = ranks[communicator.rank]
        return float(mean_of(communicator, {"x": np.array([float(value)])}, seen)["x"][0])

    total = sum(seen for seen, _ in ranks)
    expected = Fraction(sum(seen * value for seen, value in ranks), total)
    assert on_ranks(len(ranks), act) == pytest.approx([float(expected)] * len(ranks))


@pytest.mark.parametrize("seen", [(3, 0, 1), (0, 0, 0)])
def test_the_mean_is_weighted_by_samples_if_there_are_any(
    on_ranks: Any, seen: tuple[int, ...]
) -> None:
    def act(communicator: Communicator) -> tuple[Arrays, Arrays]:
        rank = communicator.rank
        local = local_of(rank if any(seen) else 0)  # nothing trained yet: all have the same
        return mean_of(communicator, local, seen[rank]), local

    for rank, (mean, local) in enumerate(on_ranks(3, act)):
        # (3 x rank 0 + 0 x rank 1 + 1 x rank 2) / 4
        assert mean["mean"].tolist() == (
            [[1.5, 3.0], [6.0, 12.0]] if any(seen) else [[1, 2], [4, 8]]
        )
        assert mean["scalar"] == (5.0 if any(seen) else 0.0)
        assert mean["half"].tolist() == ([0.5, -0.5] if any(seen) else [0, 0])
        for name, value in local_of(rank if any(seen) else 0).items():
            assert np.array_equal(local[name], value)  # unchanged
            assert (mean[name].dtype, mean[name].shape) == (value.dtype, value.shape)


def test_only_buffers_that_differ_are_averaged(on_ranks: Any) -> None:
    def act(communicator: Communicator) -> list[str]:
        local = {"mask": np.array([-np.inf, 0.0]), "mean": np.array(1.0 * communicator.rank)}
        return list(different_buffers(communicator, local))

    assert on_ranks(3, act) == [["mean"]] * 3
    assert on_ranks(1, act) == [[]]


def test_without_samples_all_ranks_weigh_the_same(on_ranks: Any) -> None:
    """As in a loop with a sampler of its own, which nothing counts."""

    def act(communicator: Communicator) -> Arrays:
        return mean_of(communicator, local_of(communicator.rank), 0)

    for mean in on_ranks(3, act):
        assert mean["mean"].tolist() == [[2, 4], [8, 16]]
        assert mean["scalar"] == 10.0
        assert mean["half"].tolist() == [1, -1]


@pytest.mark.parametrize("seen", [(3, 0, 1), (0, 0, 0)])
def test_what_is_equal_on_all_ranks_stays_so(on_ranks: Any, seen: tuple[int, ...]) -> None:
    """A mean of equal values is rounded, that of infinities and none is nan."""
    equal = {
        "mask": np.triu(np.full((3, 3), -np.inf, np.float32), 1),
        "odd": np.array([0.1, -0.0, np.nan, 1e308]),
        "tables": np.arange(3, dtype=np.int16),
    }

    def act(communicator: Communicator) -> Arrays:
        rank = communicator.rank
        own = np.array([-np.inf, float(rank), 1.0])
        return mean_of(communicator, {**equal, "own": own}, seen[rank])

    for mean in on_ranks(3, act):
        for name, value in equal.items():
            assert mean[name].dtype == value.dtype
            assert mean[name].tobytes() == value.tobytes(), name
        assert mean["own"].tolist() == [-np.inf, 0.5 if any(seen) else 1.0, 1.0]


@pytest.mark.parametrize("size", [1, 3])
def test_each_rank_finds_its_own_row_again(on_ranks: Any, size: int) -> None:
    def act(communicator: Communicator) -> tuple[Arrays, Any]:
        rank = communicator.rank
        gathered = gather_buffers(communicator, local_of(rank), SEEN[rank])
        optimizer, ranks = separate_buffers(Checkpoint({}, {"momentum": np.ones(2), **gathered}))
        assert set(optimizer) == {"momentum"}
        return gathered, buffers_of_rank(ranks, rank, size)

    for rank, (gathered, row) in enumerate(on_ranks(size, act)):
        assert gathered["rank_samples"].tolist() == SEEN[:size]
        assert gathered["rank_buffers/mean"].shape == (size, 2, 2)
        assert row is not None
        local, seen = row
        assert seen == SEEN[rank]
        assert local.keys() == local_of(rank).keys()
        for name, value in local_of(rank).items():
            assert (local[name].dtype, local[name].shape) == (value.dtype, value.shape)
            assert local[name].tobytes() == value.tobytes()


def test_on_another_world_size_no_row_is_anybodys() -> None:
    gathered = gather_buffers(SingleRank(), local_of(0), 3)
    assert buffers_of_rank(gathered, 0, 2) is None
    assert buffers_of_rank({}, 0, 1) is None
    assert separate_buffers(Checkpoint({}, {"momentum": np.ones(1)}))[1] == {}


def test_buffers_without_sample_counts_are_refused() -> None:
    saved = {"rank_buffers/mean": np.ones((2, 3))}
    with pytest.raises(KeyError, match="rank_samples"):
        separate_buffers(Checkpoint({"mean": np.ones(3)}, saved))
