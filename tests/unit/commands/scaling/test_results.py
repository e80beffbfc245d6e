"""Speed-up, efficiency and their intervals in closed form, and invariants for any measurement."""

from __future__ import annotations

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.scaling.results import RankResult, estimate, student, summarize
from tests.studies import run

RATES = st.floats(0.1, 1e6)
STUDIES = st.dictionaries(
    st.integers(1, 4096), st.lists(RATES, min_size=1, max_size=4), min_size=1, max_size=5
)


def points(rates: dict[int, list[float]]) -> tuple[RankResult, ...]:
    """Return the results of runs with these throughputs."""
    return summarize([run(ranks, 1, rate) for ranks in rates for rate in rates[ranks]])


@pytest.mark.parametrize(
    ("degrees", "t"),  # tables of Student's t, two-sided 95 %
    [(1, 12.706), (2, 4.303), (4, 2.776), (9, 2.262), (30, 2.042), (1e9, 1.960)],
)
def test_students_t(degrees: float, t: float) -> None:
    assert student(degrees) == pytest.approx(t, abs=5e-4)


def test_the_interval_of_three_repeats() -> None:
    rate = estimate([90.0, 100.0, 110.0])
    assert rate.mean == 100
    assert rate.deviation == 10
    assert rate.interval == pytest.approx((100 - 24.84, 100 + 24.84), abs=0.01)


def test_one_repeat_has_no_interval() -> None:
    rate = estimate([5.0])
    assert (rate.mean, rate.deviation, rate.interval) == (5.0, None, None)
    assert points({1: [2.0], 2: [3.0]})[1].interval is None


def test_the_interval_of_an_efficiency_in_closed_form() -> None:
    # Relative standard errors of 3 % and 4 % make 5 %; the degrees of freedom are those of Welch.
    root = math.sqrt(3)
    base = [100 * (1 + step * 0.03 * root) for step in (-1, 0, 1)]
    four = [300 * (1 + step * 0.04 * root) for step in (-1, 0, 1)]
    point = points({1: base, 4: four})[1]
    degrees = 0.05**4 / (0.03**4 / 2 + 0.04**4 / 2)
    half = student(degrees) * 0.05 * 0.75
    assert point.efficiency == pytest.approx(0.75)
    assert point.interval == pytest.approx((0.75 - half, 0.75 + half))


def test_without_scatter_the_interval_is_a_point() -> None:
    assert points({1: [2.0, 2.0], 2: [3.0, 3.0]})[1].interval == (0.75, 0.75)


def test_without_one_rank_the_fewest_are_the_base() -> None:
    first, second = points({4: [40.0], 2: [30.0]})
    assert (first.ranks, first.speedup, first.efficiency) == (2, 1.0, 1.0)
    assert (second.ranks, second.speedup) == (4, pytest.approx(4 / 3))
    assert second.efficiency == pytest.approx(2 / 3)


@given(STUDIES)
def test_any_study(rates: dict[int, list[float]]) -> None:
    results = points(rates)
    base = results[0]
    assert [point.ranks for point in results] == sorted(rates)
    assert (base.speedup, base.efficiency, base.interval) == (1.0, 1.0, None)
    for point in results:
        mean = statistics.fmean(rates[point.ranks])
        assert point.rate.mean == pytest.approx(mean)
        assert point.speedup == pytest.approx(mean / base.rate.mean)
        assert point.efficiency * point.ranks == pytest.approx(point.speedup * base.ranks)
        if point.interval:
            assert point.interval[0] <= point.efficiency <= point.interval[1]
