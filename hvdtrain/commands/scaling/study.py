"""Evaluate a scaling study: results per number of ranks, fit, predictions; no file is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdtrain.commands.runs.records import STRONG, Run
from hvdtrain.commands.scaling.cost_model import (
    RANKS,
    Fit,
    Forecast,
    Prediction,
    Remedy,
    Traffic,
    predict,
    remedies,
    step_at,
)
from hvdtrain.commands.scaling.fit import UNKNOWN_ERROR, Reduction, Step, errors, fit
from hvdtrain.commands.scaling.results import RankResult, summarize
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import unit_of
from hvdtrain.system.output.text import plural

WIDEST = 0.4  # widest range of efficiencies that is reported
NOISIEST = 0.2  # largest relative standard error of a throughput for a prediction


@dataclass(frozen=True)
class LeftOut:
    """A measured point, and its prediction by a fit without it; images per second."""

    ranks: int
    measured: float
    predicted: Forecast


@dataclass(frozen=True)
class Study:
    """The outcome of a scaling study."""

    scaling: str
    runs: tuple[Run, ...]
    sizes: tuple[RankResult, ...]
    traffic: Traffic | None
    fit: Fit | None = None
    no_fit_reason: str = ""
    predictions: tuple[Prediction, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    remedies_at: tuple[int, ...] = ()
    left_out: LeftOut | None = None
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
    return "; ".join(part for part in parts if part)


def make_study(
    runs: Sequence[Run],
    scaling: str,
    *,
    ranks: Sequence[int] | None = None,
    reductions: Sequence[Reduction] = (),
    leave_out: int | None = None,
) -> Study:
    """Summarize the runs, fit the model to them, and predict.

    Args:
        runs: one or more comparable runs (``comparable.check_comparable``).
        scaling: ``weak`` or ``strong``.
        ranks: numbers of ranks to predict (None: ``RANKS``); measured ones are skipped.
        reductions: a table of allreduce times.
        leave_out: a size to exclude from the fit.

    Raises:
        UsageError: ``leave_out`` was not measured, or ``reductions`` cannot be used.
    """
    study = Study(scaling, tuple(runs), summarize(runs), _traffic(runs))
    measured = ", ".join(str(size.ranks) for size in study.sizes)
    if leave_out not in (None, *(size.ranks for size in study.sizes)):
        raise UsageError(f"--leave-out {leave_out}: not among the sizes measured, {measured}")
    if reductions and study.traffic is None:
        raise UsageError(
            "--allreduce: the runs do not report how many messages and bytes a step reduces "
            "(columns messages and gradient_bytes), so the table cannot be used"
        )
    sizes = [size for size in study.sizes if not size.oversubscribed and size.ranks != leave_out]
    if reason := _too_few_reason(study.sizes) if len(sizes) < 2 else _noise_reason(sizes):
        return replace(study, no_fit_reason=reason)
    images = _images(runs, scaling)
    points, strong = _steps(sizes, images), scaling == STRONG
    fitted = fit(points, strong=strong, reductions=reductions, traffic=study.traffic)
    # Model and measurement must be relative to the same size, even if the fit starts at another.
    fitted = replace(fitted, at_base=sizes[0].efficiency)
    left_out = _left_out(fitted, study.sizes, leave_out, images)
    return _predict(replace(study, fit=fitted, left_out=left_out), fitted, ranks)


def _predict(study: Study, fitted: Fit, ranks: Sequence[int] | None) -> Study:
    """Return ``study`` with the predictions for ``ranks`` beyond the largest measured size."""
    larger = [number for number in ranks or RANKS if number > study.sizes[-1].ranks]
    if study.scaling == STRONG and (batch := study.runs[0].batch):
        larger = [number for number in larger if number <= batch]  # each rank needs a sample
    study = replace(study, not_predicted=tuple(sorted({*(ranks or ())} - {*larger})))
    study = replace(study, predictions=tuple(predict(fitted, number) for number in larger))
    if not study.shown:
        return study
    shown = [prediction.ranks for prediction in study.shown]
    at = tuple(dict.fromkeys((shown[0], shown[len(shown) // 2], shown[-1])))
    return replace(study, remedies=tuple(remedies(fitted, study.traffic, at)), remedies_at=at)


def _steps(sizes: Sequence[RankResult], images: Callable[[int], float]) -> list[Step]:
    """Return the points of the fit, with their communication if known."""
    relative = errors({size.ranks: size.rate for size in sizes})
    exposed_errors = errors({s.ranks: s.communication for s in sizes if s.communication})
    steps = []
    for size in sizes:
        step = Step(size.ranks, images(size.ranks) / size.rate.mean, relative[size.ranks])
        if size.seconds and (part := size.split.get("communication")) is not None:
            exposed = part / size.seconds * step.seconds
            error = exposed_errors.get(size.ranks, UNKNOWN_ERROR)
            if exposed < step.seconds:  # otherwise no compute time is left: a wrong measurement
                step = replace(step, exposed=exposed, exposed_error=error)
        steps.append(step)
    return steps


def _traffic(runs: Sequence[Run]) -> Traffic | None:
    """Return the gradient messages of a step, from the first run that reports them."""
    reported = (run.summary.gradient_messages for run in runs)
    return next((Traffic(sums.count, sums.bytes) for sums in reported if sums), None)


def _images(runs: Sequence[Run], scaling: str) -> Callable[[int], float]:
    """Return a function for the images per step by number of ranks.

    An unknown batch counts as one image per rank (strong: at the smallest size), so seconds are
    per image.
    """
    first, base = runs[0], min(run.ranks for run in runs)
    total = first.batch or (base if scaling == STRONG else first.ranks)
    return lambda ranks: total if scaling == STRONG else total / first.ranks * ranks


def _too_few_reason(sizes: Sequence[RankResult]) -> str:
    if len(sizes) < 2:
        return "at least two sizes are needed"
    if any(size.oversubscribed for size in sizes):
        return "at least two non-oversubscribed sizes are needed"
    return "only one size remains after --leave-out"


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


def _left_out(
    fitted: Fit, sizes: Sequence[RankResult], ranks: int | None, images: Callable[[int], float]
) -> LeftOut | None:
    if ranks is None:
        return None
    seconds = step_at(fitted, ranks)
    rates = (images(ranks) / value for value in (seconds.middle, seconds.high, seconds.low))
    measured = next(size.rate.mean for size in sizes if size.ranks == ranks)
    return LeftOut(ranks, measured, Forecast(*rates))


def study_data(study: Study) -> dict[str, Any]:
    """Return the study as JSON: fractions, seconds, images per second."""
    fit, traffic = study.fit, study.traffic
    return {
        "ok": True,
        "scaling": study.scaling,
        "sizes": [_size_data(size) for size in study.sizes],
        "runs": len(study.runs),
        "fit": fit
        and {
            "base": fit.base,
            "efficiency_at_base": fit.at_base,
            "misfit": fit.misfit,
            "laws": [
                {"law": candidate.law.name, "weight": candidate.weight, **asdict(candidate.costs)}
                for candidate in fit.candidates
            ],
            "traffic": traffic and asdict(traffic),
        },
        "why_no_fit": study.no_fit_reason or None,
        "predictions": [asdict(prediction) for prediction in study.predictions],
        "remedies": [_remedy_data(remedy, study.remedies_at) for remedy in study.remedies],
        "passed_over": list(study.not_predicted),
        "left_out": study.left_out and asdict(study.left_out),
    }


def _remedy_data(remedy: Remedy, ranks: Sequence[int]) -> dict[str, Any]:
    pairs = zip(ranks, remedy.efficiencies, strict=True)
    efficiency = {str(number): asdict(expected) for number, expected in pairs}
    return {"name": remedy.name, "what": remedy.action, "efficiency": efficiency}


def _size_data(size: RankResult) -> dict[str, Any]:
    rate, slowest = size.rate, size.slowest
    return {
        "ranks": size.ranks,
        "hosts": size.hosts,
        "runs": rate.count,
        "images_per_second_mean": rate.mean,
        "images_per_second_std": rate.deviation,
        "images_per_second_interval": rate.interval,
        "speedup": size.speedup,
        "efficiency": size.efficiency,
        "efficiency_interval": size.interval,
        "step_seconds": size.seconds,
        "step_split": dict(size.split) or None,
        "slowest": dict(zip(("rank", "share"), slowest, strict=True)) if slowest else None,
        "shares_cores": size.oversubscribed,
    }
