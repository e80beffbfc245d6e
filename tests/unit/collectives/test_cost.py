"""Latency and bandwidth: costs in closed form, and fits of times whose truth is known."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import nnls

from hvdtrain.collectives.cost import (
    Link,
    _non_negative_shares,
    bandwidths,
    fit,
    ring_hops,
    ring_volume,
)

SIZES = (4, 4096, 2**20, 2**26)
SHARES = st.one_of(st.just(0.0), st.floats(1e-3, 1.0))


def test_a_ring() -> None:
    """2 (p - 1) messages, each with 1/p of the data."""
    assert [(ring_hops(p), ring_volume(p)) for p in (1, 2, 4, 5)] == [
        *((0, 0), (2, 1), (6, 1.5), (8, 1.6))
    ]


@pytest.mark.parametrize("truth", [Link(5e-6, 2e-10), Link(0.0, 1e-9), Link(3e-4, 0.0)])
def test_the_fit_finds_latency_and_bandwidth(truth: Link) -> None:
    link = fit([(size, truth.latency + truth.transfer * size) for size in SIZES])
    assert link.latency == pytest.approx(truth.latency, rel=1e-6, abs=1e-12)
    assert link.transfer == pytest.approx(truth.transfer, rel=1e-6, abs=1e-16)


def test_the_largest_message_does_not_dominate_the_fit() -> None:
    """Even if it is 30 % off, the latency, a ten-thousandth of its time, is fitted."""
    truth = Link(1e-5, 1e-9)
    measured = [(size, 1e-5 + 1e-9 * size) for size in SIZES[:-1]]
    measured.append((SIZES[-1], 1.3 * (1e-5 + 1e-9 * SIZES[-1])))
    assert fit(measured).latency == pytest.approx(truth.latency, rel=0.1)


@given(st.lists(st.tuples(SHARES, SHARES), min_size=1, max_size=8))
def test_the_shares_are_the_non_negative_least_squares(rows: list[tuple[float, float]]) -> None:
    def misfit(x: float, y: float) -> float:
        return sum((a * x + b * y - 1) ** 2 for a, b in rows)

    shares, _ = nnls(rows, [1.0] * len(rows))
    assert misfit(*_non_negative_shares(rows)) <= misfit(*shares) + 1e-6


def test_a_time_that_size_does_not_change_has_no_bandwidth() -> None:
    link = fit([(size, 1e-3) for size in SIZES])
    assert (link.latency, link.bandwidth) == (pytest.approx(1e-3), math.inf)


@pytest.mark.parametrize(
    ("size", "seconds", "ranks", "expected"),
    [(10**9, 1.0, 1, (1.0, 0.0)), (10**9, 0.5, 2, (2.0, 2.0)), (10**9, 1.0, 4, (1.0, 1.5))],
)
def test_bandwidths(size: int, seconds: float, ranks: int, expected: tuple[float, float]) -> None:
    assert bandwidths(size, seconds, ranks) == expected
