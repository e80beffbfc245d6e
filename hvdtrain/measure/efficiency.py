"""Throughput at several numbers of ranks: mean, interval, speed-up, efficiency. Pure arithmetic.

Everything is relative to the smallest number of ranks measured, most often 1: the speed-up of n
ranks is rate(n) / rate(base), the efficiency is the speed-up over n / base. It is the same for weak
scaling (the batch of a rank stays) and strong scaling (the batch of all ranks stays), because both
compare images per second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """The mean of repeated measurements."""

    mean: float
    count: int
    deviation: float | None = None
    """Sample standard deviation; None of a single value."""
    interval: tuple[float, float] | None = None
    """Where the true mean lies with 95 %; None where a single value cannot tell."""

    @property
    def relative_error(self) -> float | None:
        """Standard error of the mean over the mean; None of a single value."""
        if self.deviation is None:
            return None
        return self.deviation / math.sqrt(self.count) / self.mean


@dataclass(frozen=True)
class Point:
    """How one number of ranks did."""

    ranks: int
    rate: Estimate
    """Images per second over all ranks."""
    speedup: float
    efficiency: float
    """A fraction; 1 is ideal."""
    interval: tuple[float, float] | None
    """Of the efficiency, 95 %; None where it cannot be told, and of the base, which is 1."""


def student(degrees: float, confidence: float = CONFIDENCE) -> float:
    """The factor t of a two-sided interval mean ± t standard errors.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908).
    """
    return float(stdtrit(degrees, (1 + confidence) / 2))


def estimate(values: Sequence[float]) -> Estimate:
    """Mean, sample standard deviation and 95 % interval (Student's t) of repeated measurements.

    Args:
        values: at least one, positive; the interval reaches no further down than 0.
    """
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Estimate(mean, 1)
    deviation = statistics.stdev(values)
    half = student(count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, count, deviation, (max(0.0, mean - half), mean + half))


def points(rates: Mapping[int, Sequence[float]]) -> list[Point]:
    """Speed-up and efficiency of every number of ranks, by rising number.

    Args:
        rates: images per second over all ranks, of each repeat, by number of ranks.
    """
    estimates = {ranks: estimate(rates[ranks]) for ranks in sorted(rates)}
    base = next(iter(estimates))
    result = []
    for ranks, rate in estimates.items():
        speedup = rate.mean / estimates[base].mean
        efficiency = speedup * base / ranks
        interval = None if ranks == base else _interval(efficiency, rate, estimates[base])
        result.append(Point(ranks, rate, speedup, efficiency, interval))
    return result


def _interval(ratio: float, one: Estimate, other: Estimate) -> tuple[float, float] | None:
    """95 % interval of a ratio of two means.

    To first order the squares of the relative errors add; the degrees of freedom are those of
    Welch and Satterthwaite (B. L. Welch, Biometrika 34, 1947).
    """
    first, second = one.relative_error, other.relative_error
    if first is None or second is None:
        return None
    variance = first**2 + second**2
    if variance == 0:
        return ratio, ratio
    degrees = variance**2 / (first**4 / (one.count - 1) + second**4 / (other.count - 1))
    half = student(degrees) * math.sqrt(variance) * ratio
    return max(0.0, ratio - half), ratio + half
