"""Summarize the runs of each number of ranks: throughput, efficiency, errors, parts of a step.

All results are relative to the smallest number of ranks measured, usually 1: the speed-up of n
ranks is rate(n) / rate(base), the efficiency is the speed-up over n / base. This is the same for
weak scaling (constant batch per rank) and strong scaling (constant global batch), because both
compare images per second.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import stdtrit

from hvdtrain.commands.runs.records import SPLIT, Run

CONFIDENCE = 0.95
# The sets of parts that add up to a step.
COMPLETE = ({"data", "compute", "communication", "waiting"}, {"data", "undivided"})


@dataclass(frozen=True)
class Estimate:
    """The mean of repeated measurements."""

    mean: float
    count: int
    deviation: float | None = None  # sample standard deviation; None for a single value
    interval: tuple[float, float] | None = None
    """95 % confidence interval of the mean; None for a single value."""

    @property
    def relative_error(self) -> float | None:
        """Standard error of the mean over the mean; None for a single value."""
        if self.deviation is None:
            return None
        return self.deviation / math.sqrt(self.count) / self.mean


@dataclass(frozen=True)
class Point:
    """Throughput on one number of ranks."""

    ranks: int
    rate: Estimate  # images per second over all ranks
    speedup: float
    efficiency: float  # a fraction; 1 is ideal
    interval: tuple[float, float] | None
    """95 % confidence interval of the efficiency; None if unknown, and for the base (exactly 1)."""


def student(degrees: float) -> float:
    """Return the factor t of a two-sided interval of 95 %, mean ± t standard errors.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908).
    """
    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def estimate(values: Sequence[float]) -> Estimate:
    """Return mean, sample standard deviation and 95 % interval (Student's t) of measurements.

    They are positive, so the lower end of the interval is at least 0.
    """
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return Estimate(mean, 1)
    deviation = statistics.stdev(values)
    half = student(count - 1) * deviation / math.sqrt(count)
    return Estimate(mean, count, deviation, (max(0.0, mean - half), mean + half))


def points(rates: Mapping[int, Sequence[float]]) -> list[Point]:
    """Return speed-up and efficiency by increasing ranks; ``rates``: images/s of each repeat."""
    estimates = {ranks: estimate(rates[ranks]) for ranks in sorted(rates)}
    base = next(iter(estimates))
    result = []
    for ranks, rate in estimates.items():
        speedup = rate.mean / estimates[base].mean
        efficiency = speedup * base / ranks
        interval = None if ranks == base else _interval(efficiency, rate, estimates[base])
        result.append(Point(ranks, rate, speedup, efficiency, interval))
    return result


def _interval(ratio: float, upper: Estimate, lower: Estimate) -> tuple[float, float] | None:
    """Return the 95 % interval of a ratio of two means.

    To first order the squares of the relative errors add; the degrees of freedom are those of
    Welch and Satterthwaite (B. L. Welch, Biometrika 34, 1947).
    """
    first, second = upper.relative_error, lower.relative_error
    if first is None or second is None:
        return None
    variance = first**2 + second**2
    if variance == 0:
        return ratio, ratio
    degrees = variance**2 / (first**4 / (upper.count - 1) + second**4 / (lower.count - 1))
    half = student(degrees) * math.sqrt(variance) * ratio
    return max(0.0, ratio - half), ratio + half


@dataclass(frozen=True)
class RankResult(Point):
    """The results of one number of ranks: means over its runs."""

    hosts: int | None
    seconds: float | None  # per step, mean; None if the batch size is unknown
    split: Mapping[str, float]  # seconds per step by part; only the known parts
    communication: Estimate | None  # that part over the runs; None if unknown or zero
    oversubscribed: bool  # whether ranks shared cores: such a result does not measure scaling
    slowest: tuple[int, float] | None
    """The rank that was most often last, and in what fraction of steps; None if it varied."""


def summarize(runs: Sequence[Run]) -> tuple[RankResult, ...]:
    """Return the results by increasing number of ranks."""
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
        part: statistics.fmean(run_split[part] for run_split in splits)
        for part in SPLIT
        if all(part in run_split for run_split in splits)
    }
    communication = [run_split.get("communication", 0.0) for run_split in splits]
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
    """Return the sum of the parts of a mean step; None if a part is missing.

    If epochs end with a smaller batch, that is shorter than a step with a full batch.
    """
    return sum(split.values()) if any(parts <= split.keys() for parts in COMPLETE) else None


def _slowest(runs: Sequence[Run]) -> tuple[int, float] | None:
    splits = [run.summary.step_split for run in runs]
    ranks = {split.slowest_rank if split else None for split in splits}
    rank = ranks.pop()
    if ranks or rank is None:
        return None
    return rank, statistics.fmean(split.slowest_share or 0.0 for split in splits if split)
