"""Every sample exactly once per epoch, for any sizes, ranks and interruptions."""

from __future__ import annotations

import itertools
import subprocess
import sys
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import (
    Part,
    Position,
    Shards,
    bounds,
    evaluation_parts,
    permutation,
    seed_of,
)

SAMPLES = st.integers(1, 200)
BATCH = st.integers(1, 230)
SIZE = st.integers(1, 12)
SEED = st.integers(0, 2**64 - 1)
EPOCH = st.integers(0, 10_000)


def steps_of(
    samples: int, batch: int, seed: int, epoch: int, size: int, consumed: int = 0
) -> list[tuple[Part, ...]]:
    """Return the parts of all ranks by step; fail if ranks perform different numbers of steps."""
    all_ranks = [Shards(samples, batch, seed, rank, size) for rank in range(size)]
    return list(zip(*(shards.epoch(epoch, consumed) for shards in all_ranks), strict=True))


def order_of(steps: list[tuple[Part, ...]]) -> list[int]:
    return [int(i) for parts in steps for part in parts if part.count for i in part.indices]


@given(SAMPLES, BATCH, SEED, EPOCH, SIZE)
@example(samples=1, batch=1, seed=0, epoch=0, size=12)
@example(samples=200, batch=97, seed=1, epoch=0, size=3)
def test_an_epoch_is_every_sample_exactly_once(
    samples: int, batch: int, seed: int, epoch: int, size: int
) -> None:
    steps = steps_of(samples, batch, seed, epoch, size)
    assert sorted(order_of(steps)) == list(range(samples))
    assert len(steps) == -(-samples // batch)
    assert all(Shards(samples, batch, seed, r, size).steps_per_epoch == len(steps) for r in (0, 1))


@given(SAMPLES, BATCH, SEED, SIZE)
def test_parts_differ_by_at_most_one_sample_and_have_their_positions(
    samples: int, batch: int, seed: int, size: int
) -> None:
    for number, parts in enumerate(steps_of(samples, batch, seed, 0, size)):
        counts = [part.count for part in parts]
        assert max(counts) - min(counts) <= 1
        begin, end = number * batch, min((number + 1) * batch, samples)
        assert sum(counts) == end - begin
        batch_indices = {int(i) for part in parts if part.count for i in part.indices}
        for part in parts:
            assert part.indices.dtype == np.int64
            assert len(part.indices) == max(1, part.count)
            assert part.stand_in == (part.weight == 0)
            assert batch_indices.issuperset(part.indices.tolist())
            assert part.global_count == end - begin
            assert part.start == Position(0, begin)
            assert part.end == (Position(1, 0) if end == samples else Position(0, end))


@given(SAMPLES, SEED, EPOCH, BATCH, SIZE, BATCH, SIZE)
def test_the_order_depends_on_seed_and_epoch_only(
    samples: int, seed: int, epoch: int, batch: int, size: int, other_batch: int, other_size: int
) -> None:
    first = order_of(steps_of(samples, batch, seed, epoch, size))
    assert first == order_of(steps_of(samples, other_batch, seed, epoch, other_size))
    assert first == permutation(samples, seed, epoch).tolist()


# Seeds around 2**53 and 2**63 detect a conversion to float or to a signed integer.
SEEDS = [0, 1, 2, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1]


def test_seeds_and_epochs_have_different_orders() -> None:
    orders = {tuple(permutation(50, seed, epoch)) for seed in SEEDS for epoch in range(10)}
    assert len(orders) == len(SEEDS) * 10  # two equal by chance: 1 in 50!


def test_the_order_is_shuffled_evenly() -> None:
    # Sample 0 is in the first half in half of the epochs: 1000 +- 4.5 standard deviations.
    first_half = sum(int(np.flatnonzero(permutation(10, 3, e) == 0)[0] < 5) for e in range(2000))
    assert abs(first_half - 1000) < 4.5 * (2000 * 0.25) ** 0.5


LEG = st.tuples(SIZE, BATCH, st.integers(1, 7))  # world size, global batch, updates


@given(st.integers(1, 60), SEED, st.lists(LEG, min_size=1, max_size=12))
def test_each_sample_once_after_resuming_on_other_numbers_of_ranks(
    samples: int, seed: int, legs: list[tuple[int, int, int]]
) -> None:
    position = Position()
    seen: dict[int, list[int]] = {0: []}
    for size, batch, updates in legs:
        for _ in range(updates):
            # A new process each time, with the position only.
            parts = steps_of(samples, batch, seed, position.epoch, size, position.consumed)[0]
            seen.setdefault(position.epoch, []).extend(order_of([parts]))
            (position,) = {part.end for part in parts}
    for epoch, order in seen.items():
        whole = permutation(samples, seed, epoch).tolist()
        assert order == (whole if epoch < position.epoch else whole[: position.consumed])
    assert 0 <= position.consumed < samples


@given(SAMPLES, BATCH, SEED, SIZE, st.data())
def test_the_steps_after_a_resume_equal_those_without_interruption(
    samples: int, batch: int, seed: int, size: int, data: st.DataObject
) -> None:
    whole = steps_of(samples, batch, seed, 5, size)
    cut = data.draw(st.integers(0, len(whole) - 1))
    rest = steps_of(samples, batch, seed, 5, size, whole[cut][0].start.consumed)
    assert len(rest) == len(whole) - cut
    for uncut, resumed in zip(whole[cut:], rest, strict=True):
        for expected, part in zip(uncut, resumed, strict=True):
            assert expected.indices.tolist() == part.indices.tolist()
            assert (expected.start, expected.end) == (part.start, part.end)
            assert expected.global_count == part.global_count


@given(SAMPLES, BATCH, SIZE, st.data())
def test_weighted_means_of_the_parts_are_the_mean_of_the_global_batch(
    samples: int, batch: int, size: int, data: st.DataObject
) -> None:
    values = data.draw(st.lists(st.integers(-99, 99), min_size=samples, max_size=samples))
    order = permutation(samples, 4, 2).tolist()
    for number, parts in enumerate(steps_of(samples, batch, 4, 2, size)):
        weighted = Fraction(0)
        assert sum(Fraction(part.count, part.global_count) for part in parts) == 1
        for part in parts:
            assert part.weight == part.count / part.global_count
            if part.count:  # an empty part has weight 0
                mean = Fraction(sum(values[i] for i in part.indices), part.count)
                weighted += Fraction(part.count, part.global_count) * mean
        whole = order[number * batch : (number + 1) * batch]
        assert weighted == Fraction(sum(values[i] for i in whole), len(whole))


def test_on_end_is_called_after_a_step_or_epoch_also_of_a_failure() -> None:
    ended: list[str] = []
    shards = Shards(7, 3, on_end=lambda: ended.append("end"))
    for part in shards.epoch(0):
        assert not ended, part
    assert len(ended) == 1
    assert len(list(shards.batches(1, shards.batch_sampler(1)))) == len(ended) - 1 == 3
    with pytest.raises(ZeroDivisionError), shards.step(part):
        raise ZeroDivisionError
    assert len(ended) == 5


@given(st.integers(0, 1000), SIZE)
def test_bounds_split_a_range_evenly(total: int, size: int) -> None:
    cuts = [bounds(total, rank, size) for rank in range(size)]
    assert [low for low, _ in cuts] == [0, *(high for _, high in cuts[:-1])]
    assert cuts[-1][1] == total
    lengths = [high - low for low, high in cuts]
    assert set(lengths) <= {total // size, -(-total // size)}
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize(("samples", "batch", "word"), [(0, 1, "--data"), (5, 0, "global batch")])
def test_an_empty_training_set_is_a_usage_error(samples: int, batch: int, word: str) -> None:
    with pytest.raises(UsageError, match=word):
        Shards(samples, batch)


@given(st.integers(0, 300), st.integers(1, 70), SIZE)
def test_evaluation_counts_every_sample_exactly_once(samples: int, batch: int, size: int) -> None:
    all_ranks = [list(evaluation_parts(samples, batch, rank, size)) for rank in range(size)]
    flat = [int(i) for batches in all_ranks for indices in batches for i in indices]
    assert flat == list(range(samples))
    assert all(1 <= len(indices) <= batch for batches in all_ranks for indices in batches)
    assert all(indices.dtype == np.int64 for batches in all_ranks for indices in batches)
    shares = [sum(map(len, batches)) for batches in all_ranks]
    assert max(shares) - min(shares) <= 1


NUMBER = st.integers(0, 2**64 - 1)


def test_similar_keys_have_different_seeds() -> None:
    keys = list(itertools.product(range(4), range(50), range(50)))
    seeds = [seed_of(*key) for key in keys]
    assert len(set(seeds)) == len(keys)
    # Uniform: each bit is set in about half of them (5 standard deviations).
    for bit in range(63):
        share = sum(seed >> bit & 1 for seed in seeds)
        assert abs(share - len(seeds) / 2) < 5 * (len(seeds) / 4) ** 0.5


@given(st.lists(NUMBER, min_size=1, max_size=3), st.lists(NUMBER, min_size=1, max_size=3))
def test_different_keys_have_different_seeds(first: list[int], second: list[int]) -> None:
    assert (seed_of(*first) == seed_of(*second)) == (first == second)
    assert 0 <= seed_of(*first) < 2**63


def test_seeds_and_orders_are_the_same_in_another_process() -> None:
    program = "from hvdtrain.steps.sharding import permutation, seed_of\n"
    program += "print(seed_of(1, 2, 3), *permutation(1000, 7, 3))"
    expected = [seed_of(1, 2, 3), *permutation(1000, 7, 3).tolist()]
    for hash_seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(filter(None, sys.path))},
        )
        assert [int(number) for number in result.stdout.split()] == expected
