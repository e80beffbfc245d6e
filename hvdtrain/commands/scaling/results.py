"""Sum up the runs of each number of ranks: throughput, efficiency, errors, parts of a step.

Everything is relative to the smallest number of ranks measured, most often 1: the speed-up of n
ranks is rate(n) / rate(base), the efficiency is the speed-up over n / base. It is the same for weak
scaling (the batch per rank stays) and strong scaling (the global batch stays), because both compare
images per second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from hvdtrain.commands.runs.records import SPLIT, Run

CONFIDENCE = 0.95
# The parts that together are a step, told apart or not.
WHOLE = ({"data", "compute", "communication", "waiting"}, {"data", "undivided"})


@dataclass(frozen=True)
class Estimate:
    """The mean of repeated measurements."""

    mean: float
    count: int
    deviation: float | None = None  # sample standard deviation; None of a single value
    interval: tuple[float, float] | None = None
    """Where the true mean lies with 95 %; None of a single value."""

    @property
    def relative_error(self) -> float | None:
        """Standard error of the mean over the mean; None of a single value."""
        if self.deviation is None:
            return None
        return self.deviation / math.sqrt(self.count) / self.mean


@dataclass(frozen=True)
class Point:
    """Throughput of one number of ranks."""

    ranks: int
    rate: Estimate  # images per second over all ranks
    speedup: float
    efficiency: float  # a fraction; 1 is ideal
    interval: tuple[float, float] | None
    """Of the efficiency, 95 %; None where it is not known, and of the base, which is 1."""


def student(degrees: float) -> float:
    """Return the factor t of a two-sided interval of 95 %, mean ± t standard errors.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908).
    """
    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean, sample standard deviation and 95 % interval (Student's t) of measurements.

    They are positive, so the interval reaches no further down than 0.
    """
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Estimate(mean, 1)
    deviation = statistics.stdev(values)
    half = student(count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, count, deviation, (max(0.0, mean - half), mean + half))


def points(rates: Mapping[int, Sequence[float]]) -> list[Point]:
    """Return speed-up and efficiency by rising ranks; ``rates``: images/s of each repeat."""
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
    """Return the 95 % interval of a ratio of two means.

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


@dataclass(frozen=True)
class RankResult(Point):
    """What one number of ranks achieved: the means over its runs."""

    hosts: int | None
    seconds: float | None  # per step, mean; None where the batch is not known
    split: Mapping[str, float]  # seconds per step by part; without those that are not known
    communication: Estimate | None  # that part over the runs; None: not known, or nothing
    oversubscribed: bool  # whether ranks had to share cores, which says little about scaling
    slowest: tuple[int, float] | None
    """The rank that came last most often, and in what share of the steps; None if it differed."""


def summarize(runs: Sequence[Run]) -> tuple[RankResult, ...]:
    """Return the results by rising number of ranks."""
    by_ranks: dict[int, list[Run]] = {}
    for run in runs:
        by_ranks.setdefault(run.ranks, []).append(run)
    rates = {ranks: [run.rate for run in same] for ranks, same in by_ranks.items()}
    return tuple(_result(point, by_ranks[point.ranks]) for point in points(rates))


def _result(point: Point, runs: Sequence[Run]) -> RankResult:
    first = runs[0]
    hosts, cores = first.summary.hosts, first.cores
    threads = math.ceil(point.ranks / (hosts or 1)) * (first.threads or 1)
    splits = [run.split for run in runs]
    split = {
        part: statistics.fmean(one[part] for one in splits)
        for part in SPLIT
        if all(part in one for one in splits)
    }
    communication = [one.get("communication", 0.0) for one in splits]
    return RankResult(
        **vars(point),
        hosts=hosts,
        seconds=_seconds(split) or (first.batch / point.rate.mean if first.batch else None),
        split=split,
        communication=estimate(communication) if all(communication) else None,
        oversubscribed=cores is not None and threads > cores,
        slowest=_slowest(runs),
    )


def _seconds(split: Mapping[str, float]) -> float | None:
    """Return the sum of the parts of a mean step, where they are all there.

    Where epochs end in a smaller batch, that is shorter than a step of a whole batch.
    """
    return sum(split.values()) if any(whole <= split.keys() for whole in WHOLE) else None


def _slowest(runs: Sequence[Run]) -> tuple[int, float] | None:
    splits = [run.summary.step_split for run in runs]
    ranks = {split.slowest_rank if split else None for split in splits}
    rank = ranks.pop()
    if ranks or rank is None:
        return None
    return rank, statistics.fmean(split.slowest_share or 0.0 for split in splits if split)
