"""The learning rate in closed form, at its corner points and between them."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.errors import UsageError
from hvdtrain.steps.learning_rate import SCHEDULES, LearningRate, scale_factor


@pytest.mark.parametrize("size", [1, 2, 3, 8, 1000])
def test_scaling_rules(size: int) -> None:
    assert scale_factor("linear", size) == size
    assert scale_factor("sqrt", size) ** 2 == pytest.approx(size)
    assert scale_factor("none", size) == 1


def test_invalid_options_are_reported_with_the_valid_ones() -> None:
    with pytest.raises(UsageError, match=r"--lr-scaling cubic: .*linear, sqrt, none"):
        scale_factor("cubic", 2)
    with pytest.raises(UsageError, match=r"--lr-schedule step: .*constant, linear, cosine"):
        LearningRate(0.1, schedule="step")
    with pytest.raises(UsageError, match="--lr-milestones"):
        LearningRate(0.1, schedule="multistep")


WARM_UP = {"epochs": 10, "warmup_epochs": 4}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("factor", [2.0, 3.0, math.sqrt(2)])
def test_warm_up_increases_from_the_rate_of_one_rank_to_the_scaled_rate(
    schedule: str, factor: float
) -> None:
    rate = LearningRate(0.3, factor, schedule=schedule, milestones=(7,), **WARM_UP)
    assert rate(0) == 0.3
    assert rate(1) == pytest.approx(0.3 * (1 + (factor - 1) / 4))
    assert rate(2) == pytest.approx(0.3 * (1 + factor) / 2)
    assert rate(4) == pytest.approx(0.3 * factor)  # no schedule has started to decay
    assert rate(4 - 1e-12) == pytest.approx(rate(4), rel=1e-9)


def test_warm_up_on_one_rank_increases_from_zero() -> None:
    rate = LearningRate(0.3, 1, **WARM_UP)
    assert [rate(position) for position in (0, 1, 2, 4, 9)] == pytest.approx(
        [0, 0.075, 0.15, 0.3, 0.3]
    )


# Share of the span after the warm-up, and height; cos of 0, 60, 90, 120 and 180 degrees.
HEIGHTS = {
    "constant": [(0, 1), (1 / 2, 1), (1, 1)],
    "linear": [(0, 1), (1 / 10, 9 / 10), (1 / 2, 1 / 2), (9 / 10, 1 / 10), (1, 0)],
    "cosine": [(0, 1), (1 / 3, 3 / 4), (1 / 2, 1 / 2), (2 / 3, 1 / 4), (1, 0)],
}


@pytest.mark.parametrize("schedule", HEIGHTS)
@pytest.mark.parametrize("warmup", [0, 2])
def test_decay_after_the_warm_up(schedule: str, warmup: int) -> None:
    rate = LearningRate(0.1, 3, epochs=10, warmup_epochs=warmup, schedule=schedule)
    for share, height in HEIGHTS[schedule]:
        position = warmup + share * (10 - warmup)
        assert rate(position) == pytest.approx(0.3 * height, abs=1e-12)
    assert rate(25) == rate(10)  # never below 0, and no increase


def test_multistep_decays_exactly_at_its_milestones() -> None:
    rate = LearningRate(1.0, 2, epochs=90, schedule="multistep", milestones=(30, 60, 80), decay=0.1)
    before = math.nextafter(30, 0)
    assert [
        rate(position) for position in (0, before, 30, 59.99, 60, 79.9, 80, 89)
    ] == pytest.approx([2, 2, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002])


def test_milestones_in_any_order_count_from_the_start_of_the_training() -> None:
    rate = LearningRate(1.0, epochs=9, schedule="multistep", milestones=(6, 3), decay=0.5)
    assert [rate(position) for position in (2, 3, 6)] == [1, 0.5, 0.25]
    warmed = LearningRate(
        1.0, 2, epochs=10, warmup_epochs=2, schedule="multistep", milestones=(3,), decay=0.1
    )
    assert (warmed(2.99), warmed(3)) == (2, pytest.approx(0.2))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup", [5, 6, 7.5])
def test_a_warm_up_as_long_as_the_training_or_longer(schedule: str, warmup: float) -> None:
    rate = LearningRate(
        1.0, 2, epochs=6, warmup_epochs=warmup, schedule=schedule, milestones=(5.5,)
    )
    for position in (0, 2.5, 4.9):
        assert rate(position) == pytest.approx(1 + position / warmup)
    for position in (5.9, 6, 8):
        assert 0 <= rate(position) <= 2


SHAPES: list[dict[str, Any]] = [
    {"schedule": "constant"},
    {"schedule": "linear"},
    {"schedule": "cosine"},
    {"schedule": "multistep", "milestones": (1, 2.5)},
]


@pytest.mark.parametrize("shape", SHAPES)
@given(factor=st.floats(1, 1e4), base=st.floats(1e-6, 10), position=st.floats(0, 6))
def test_never_negative_nor_above_its_maximum(
    shape: dict[str, Any], factor: float, base: float, position: float
) -> None:
    rate = LearningRate(base, factor, epochs=5, warmup_epochs=0.5, **shape)
    assert 0 <= rate(position) <= base * factor * (1 + 1e-12)


@pytest.mark.parametrize("shape", SHAPES)
@given(sizes=st.tuples(st.integers(2, 64), st.integers(2, 64)), position=st.floats(0.5, 5))
def test_after_warm_up_world_sizes_differ_by_their_factor_only(
    shape: dict[str, Any], sizes: tuple[int, int], position: float
) -> None:
    first, second = (
        LearningRate(0.1, scale_factor("linear", size), epochs=5, warmup_epochs=0.5, **shape)(
            position
        )
        for size in sizes
    )
    assert first * sizes[1] == pytest.approx(second * sizes[0])
