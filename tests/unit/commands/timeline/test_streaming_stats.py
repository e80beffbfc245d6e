"""Statistics of streams: exact if short, an even selection if long; time by state adds up."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.timeline.analyse import BINS, StateHistory
from hvdtrain.commands.timeline.events import KEPT, Sample


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=60))
def test_a_short_sample_is_exact(values: list[float]) -> None:
    sample = Sample()
    for value in values:
        sample.add(value)
    assert sample.count == len(values)
    assert sample.total == pytest.approx(sum(values))
    assert sample.mean == pytest.approx(statistics.fmean(values))
    assert sample.median == statistics.median(values)
    assert sample.maximum == max(values)
    assert sample.quantile(0) == min(values)


def test_statistics_of_no_values_are_zero() -> None:
    sample = Sample()
    assert (sample.mean, sample.median, sample.quantile(0.5), sample.maximum) == (0, 0, 0, 0)


def test_a_long_sample_keeps_an_even_selection() -> None:
    sample = Sample()
    count = 5 * KEPT + 7
    for value in range(count):
        sample.add(value)
    assert sample.count == count
    assert sample.total == count * (count - 1) / 2
    assert sample.median == pytest.approx(count / 2, rel=1e-3)
    assert sample.quantile(0.25) == pytest.approx(count / 4, rel=1e-3)
    assert len(sample._kept) <= KEPT
    assert list(sample._kept) == list(range(0, count, sample._every))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 100_000)), min_size=1, max_size=200))
def test_the_state_history_is_exact(stretches: list[tuple[int, int]]) -> None:
    history, sums, now = StateHistory(3), [0.0, 0.0, 0.0], 0
    for state, length in stretches:
        if now + length >= history.border:
            history.extend(sums, state, now, now + length)
        sums[state] += length
        now += length
    columns = history.columns(sums)
    assert len(columns[0]) <= BINS + 1
    assert [sum(column) for column in columns] == pytest.approx(sums)
    # Each stretch against the definition.
    for index in range(len(columns[0])):
        low, high = index * history.width, (index + 1) * history.width
        expected, start = [0.0, 0.0, 0.0], 0
        for state, length in stretches:
            expected[state] += max(0.0, min(high, start + length) - max(low, start))
            start += length
        assert [column[index] for column in columns] == pytest.approx(expected)
