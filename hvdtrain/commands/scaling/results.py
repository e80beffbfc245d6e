"""Evaluate a scaling study: throughput and efficiency per number of ranks, fit, predictions.

All results are relative to the smallest number of ranks measured, usually 1: the speed-up of n
ranks is rate(n) / rate(base), the efficiency is the speed-up over n / base. This is the same for
weak scaling (constant batch per rank) and strong scaling (constant global batch), because both
compare images per second. No file is written.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

from hvdtrain.commands.scaling.cost_model import (
    MIN_ERROR,
    MIN_SIZES,
    RANKS,
    UNKNOWN_ERROR,
    AllreduceTime,
    Fit,
    Prediction,
    Step,
    fit,
    predict,
)
from hvdtrain.commands.scaling.runs import SPLIT, STRONG, MeasuredRun
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import GradientMessages, unit_of
from hvdtrain.system.output.text import plural, printable

CONFIDENCE = 0.95
# The sets of parts that add up to a step.
COMPLETE = ({"data", "compute", "communication", "waiting"}, {"data", "undivided"})
WIDEST = 0.4  # widest range of efficiencies that is reported
NOISIEST = 0.2  # largest relative standard error of a throughput for a prediction


@dataclass(frozen=True)
class SampleMean:
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


def student(degrees: float) -> float:
    """Return the factor t of a two-sided interval of 95 %, mean ± t standard errors.

    Source: Student, "The probable error of a mean", Biometrika 6 (1908).
    """
    return float(stdtrit(degrees, (1 + CONFIDENCE) / 2))


def estimate(values: Sequence[float]) -> SampleMean:
    """Return mean, sample standard deviation and 95 % interval (Student's t) of measurements.

    They are positive, so the lower end of the interval is at least 0.
    """
    mean, count = statistics.fmean(values), len(values)
    if count == 1:
        return SampleMean(mean, 1)
    deviation = statistics.stdev(values)
    half = student(count - 1) * deviation / math.sqrt(count)
    return SampleMean(mean, count, deviation, (max(0.0, mean - half), mean + half))


def _interval(ratio: float, upper: SampleMean, lower: SampleMean) -> tuple[float, float] | None:
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
class RankResult:
    """The results of one number of ranks: means over its runs."""

    ranks: int
    rate: SampleMean  # images per second over all ranks
    speedup: float
    efficiency: float  # a fraction; 1 is ideal
    interval: tuple[float, float] | None
    """95 % confidence interval of the efficiency; None if unknown, and for the base (exactly 1)."""
    hosts: int | None
    seconds: float | None  # per step, mean; None if the batch size is unknown
    split: Mapping[str, float]  # seconds per step by part; only the known parts
    communication: SampleMean | None  # that part over the runs; None if unknown or zero
    oversubscribed: bool  # whether ranks shared cores: such a result does not measure scaling
    slowest: tuple[int, float] | None
    """The rank that was most often last, and in what fraction of steps; None if it varied."""


def summarize(runs: Sequence[MeasuredRun]) -> tuple[RankResult, ...]:
    """Return the results by increasing number of ranks."""
    sizes = sorted({run.ranks for run in runs})
    by_ranks = {ranks: [run for run in runs if run.ranks == ranks] for ranks in sizes}
    base = estimate([run.rate for run in by_ranks[sizes[0]]])
    return tuple(_result(same, sizes[0], base) for same in by_ranks.values())


def _result(runs: Sequence[MeasuredRun], base: int, base_rate: SampleMean) -> RankResult:
    """Return the results of ``runs`` on one number of ranks; ``base``: the smallest number."""
    first, rate = runs[0], estimate([run.rate for run in runs])
    speedup = rate.mean / base_rate.mean
    efficiency = speedup * base / first.ranks
    splits = [run.split for run in runs]
    split = {
        part: statistics.fmean(run_split[part] for run_split in splits)
        for part in SPLIT
        if all(part in run_split for run_split in splits)
    }
    communication = [run_split.get("communication", 0.0) for run_split in splits]
    threads = first.per_host * (first.threads or 1)
    return RankResult(
        ranks=first.ranks,
        rate=rate,
        speedup=speedup,
        efficiency=efficiency,
        interval=None if first.ranks == base else _interval(efficiency, rate, base_rate),
        hosts=first.summary.hosts,
        seconds=_seconds(split) or (first.batch / rate.mean if first.batch else None),
        split=split,
        communication=estimate(communication) if all(communication) else None,
        oversubscribed=first.cores is not None and threads > first.cores,
        slowest=_slowest(runs),
    )


def _seconds(split: Mapping[str, float]) -> float | None:
    """Return the sum of the parts of a mean step; None if a part is missing.

    If epochs end with a smaller batch, that is shorter than a step with a full batch.
    """
    return sum(split.values()) if any(parts <= split.keys() for parts in COMPLETE) else None


def _slowest(runs: Sequence[MeasuredRun]) -> tuple[int, float] | None:
    splits = [run.summary.step_split for run in runs]
    ranks = {split.slowest_rank if split else None for split in splits}
    rank = ranks.pop()
    if ranks or rank is None:
        return None
    return rank, statistics.fmean(split.slowest_share or 0.0 for split in splits if split)


def errors(rates: Mapping[int, SampleMean]) -> dict[int, float]:
    """Return relative standard errors of the points, with one deviation pooled over all sizes.

    A few repeats of one size estimate its deviation poorly; all sizes together do better.
    """
    repeated = [rate for rate in rates.values() if rate.deviation is not None]
    if not repeated:
        return dict.fromkeys(rates, UNKNOWN_ERROR)
    degrees = sum(rate.count - 1 for rate in repeated)
    squares = sum((r.count - 1) * (r.deviation or 0.0) ** 2 / r.mean**2 for r in repeated)
    pooled = math.sqrt(squares / degrees)
    return {ranks: max(MIN_ERROR, pooled / math.sqrt(r.count)) for ranks, r in rates.items()}


@dataclass(frozen=True)
class Study:
    """The outcome of a scaling study."""

    scaling: str
    runs: tuple[MeasuredRun, ...]
    sizes: tuple[RankResult, ...]
    traffic: GradientMessages | None
    fit: Fit | None = None
    no_fit_reason: str = ""
    predictions: tuple[Prediction, ...] = ()
    not_predicted: tuple[int, ...] = ()
    """Requested numbers of ranks that were measured, or exceed the samples of a batch."""

    @property
    def unit(self) -> str:
        """Unit of the samples, in the plural, e.g. ``images``."""
        return unit_of(run.summary for run in self.runs)

    @property
    def shown(self) -> tuple[Prediction, ...]:
        """The predictions that are reported: their 95 % range is at most ``WIDEST``."""
        ranges = ((p, p.efficiency.high - p.efficiency.low) for p in self.predictions)
        return tuple(prediction for prediction, width in ranges if width <= WIDEST)


def title(study: Study) -> str:
    """Return a one-line description of the measurement: training, scaling, repeats, machine."""
    first, summary = study.runs[0], study.runs[0].summary
    strong = study.scaling == STRONG
    batch = first.batch if strong or not first.batch else first.batch / first.ranks
    repeats = max(size.rate.count for size in study.sizes)
    threads = f", {plural(first.threads, 'thread')} per rank" if first.threads else ""
    parts = [
        " ".join(name for name in dict.fromkeys((summary.workload, summary.model)) if name),
        " over ".join(name for name in (summary.framework, summary.strategy) if name),
        summary.precision or "",
        f"{study.scaling} scaling"
        + (f", batch {batch:g} {'over all ranks' if strong else 'per rank'}" if batch else ""),
        f"{plural(repeats, 'run')} per size",
        f"{first.machine}{threads}",
    ]
    return printable("; ".join(part for part in parts if part))  # matplotlib draws no other text


def make_study(
    runs: Sequence[MeasuredRun],
    scaling: str,
    *,
    ranks: Sequence[int] = (),
    reductions: Sequence[AllreduceTime] = (),
) -> Study:
    """Summarize the runs, fit the model to them, and predict.

    Args:
        runs: one or more comparable runs (``runs.check_comparable``).
        scaling: ``weak`` or ``strong``.
        ranks: numbers of ranks to predict (empty: ``RANKS``); measured ones are skipped.
        reductions: a table of allreduce times.

    Raises:
        UsageError: ``reductions`` cannot be used.
    """
    reported = (run.summary.gradient_messages for run in runs)
    traffic = next(filter(None, reported), None)
    study = Study(scaling, tuple(runs), summarize(runs), traffic)
    if reductions and study.traffic is None:
        raise UsageError(
            "--allreduce: the runs do not report how many messages and bytes a step reduces "
            "(columns messages and gradient_bytes), so the table cannot be used"
        )
    sizes = [size for size in study.sizes if not size.oversubscribed]
    # Efficiencies of the model and the measured ones are relative to the smallest size.
    if len(sizes) < MIN_SIZES or study.sizes[0].oversubscribed:
        shared = "non-oversubscribed " if len(study.sizes) > len(sizes) else ""
        reason = f"it needs three {shared}sizes, e.g. --ranks 1,2,4"
        return replace(study, no_fit_reason=reason)
    if reason := _noise_reason(sizes):
        return replace(study, no_fit_reason=reason)
    strong = scaling == STRONG
    fitted = fit(_steps(study, sizes), strong=strong, reductions=reductions, traffic=study.traffic)
    larger = [number for number in ranks or RANKS if number > study.sizes[-1].ranks]
    if strong and (batch := runs[0].batch):
        larger = [number for number in larger if number <= batch]  # each rank needs a sample
    return replace(
        study,
        fit=fitted,
        not_predicted=tuple(sorted({*ranks} - {*larger})),
        predictions=tuple(predict(fitted, number) for number in larger),
    )


def _steps(study: Study, sizes: Sequence[RankResult]) -> list[Step]:
    """Return the points of the fit, with their communication if known.

    An unknown batch counts as one image per rank (strong: at the smallest size), so seconds are
    per image.
    """
    first, strong = study.runs[0], study.scaling == STRONG
    total = first.batch or (study.sizes[0].ranks if strong else first.ranks)
    relative = errors({size.ranks: size.rate for size in sizes})
    exposed_errors = errors({s.ranks: s.communication for s in sizes if s.communication})
    steps = []
    for size in sizes:
        images = total if strong else total / first.ranks * size.ranks
        step = Step(size.ranks, images / size.rate.mean, relative[size.ranks])
        if size.seconds and (part := size.split.get("communication")) is not None:
            exposed = part / size.seconds * step.seconds
            error = exposed_errors.get(size.ranks, UNKNOWN_ERROR)
            if exposed < step.seconds:  # otherwise no compute time is left: a wrong measurement
                step = replace(step, exposed=exposed, exposed_error=error)
        steps.append(step)
    return steps


def _noise_reason(sizes: Sequence[RankResult]) -> str:
    """Return the reason if the repeats of a size vary too much for a prediction, or ""."""
    errors = {size.ranks: size.rate.relative_error or 0.0 for size in sizes}
    ranks = max(errors, key=lambda ranks: errors[ranks])
    if errors[ranks] <= NOISIEST:
        return ""
    return (
        f"the runs on {plural(ranks, 'rank')} vary too much (standard error of the mean: "
        f"± {100 * errors[ranks]:.0f} %); increase --repeat, or use an otherwise idle machine"
    )
