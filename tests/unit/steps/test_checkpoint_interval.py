"""The interval between checkpoints, against a simulation and its own optimum."""

from __future__ import annotations

import random

import numpy as np
import pytest

from hvdtrain.steps.checkpoint_interval import (
    HOST_HOURS,
    best_interval,
    failure_costs,
    hours_between_failures,
)

CASES = [(1.0, 3600.0), (30.0, 3600.0), (60.0, 600.0)]  # cost of a save, mean between failures


def test_the_assumed_failures_are_those_of_the_source() -> None:
    assert hours_between_failures(2048) * 419 == pytest.approx(54 * 24, rel=1e-4)
    assert hours_between_failures(1) == HOST_HOURS == 6335


@pytest.mark.parametrize(("cost", "between"), CASES)
def test_no_other_interval_is_better(cost: float, between: float) -> None:
    """The formula is an approximation: no interval gains more than a thousandth over it."""

    def goodput(interval: float) -> float:
        mean = failure_costs(interval, cost=cost, latency=cost, restart=0.0, between=between)
        return mean.goodput

    chosen = best_interval(cost, between)
    best = max(goodput(chosen * factor) for factor in np.geomspace(0.1, 10, 400))
    assert goodput(chosen) == pytest.approx(best, rel=1e-3)
    assert goodput(chosen / 3) < goodput(chosen) > goodput(chosen * 3)


@pytest.mark.parametrize(("cost", "between"), CASES)
def test_the_goodput_is_that_of_a_simulated_job(cost: float, between: float) -> None:
    interval, restart = best_interval(cost, between), 20.0
    chance = random.Random(5)
    clock, done = 0.0, 0.0
    fails = chance.expovariate(1 / between)
    while clock < 5000 * between:
        if clock + interval + cost <= fails:
            clock, done = clock + interval + cost, done + interval
            continue
        clock = fails + restart  # failures while it restarts begin the restart again
        fails = clock + chance.expovariate(1 / between)
        while (at := chance.expovariate(1 / between)) < restart:
            clock += at
            fails += at
    mean = failure_costs(interval, cost=cost, latency=cost, restart=restart, between=between)
    assert done / clock == pytest.approx(mean.goodput, rel=0.02)
    assert mean.lost_seconds == interval / 2


def test_a_save_that_takes_longer_than_failures_are_apart() -> None:
    assert best_interval(500.0, 100.0) == 100.0
    late = failure_costs(100.0, cost=1.0, latency=31.0, restart=0.0, between=1000.0)
    early = failure_costs(100.0, cost=1.0, latency=1.0, restart=0.0, between=1000.0)
    assert late.lost_seconds == early.lost_seconds + 30
    assert late.goodput < early.goodput < 1


def test_a_job_that_cannot_get_on_has_no_goodput() -> None:
    mean = failure_costs(10.0, cost=1.0, latency=1.0, restart=5.0, between=0.001)
    assert mean.goodput == 0 and mean.lost_seconds == 5
