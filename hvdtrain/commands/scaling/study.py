"""Evaluate a scaling study: results per number of ranks, fit, predictions; no file is written."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from hvdtrain.commands.runs.records import STRONG, Run
from hvdtrain.commands.scaling.fit import UNKNOWN_ERROR, Reduction, Step, errors, fit
from hvdtrain.commands.scaling.model import (
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
from hvdtrain.commands.scaling.results import RankResult, summarize
from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import unit_of
from hvdtrain.system.output.text import plural

WIDEST = 0.4  # a range of efficiencies that is wider tells nothing
NOISIEST = 0.2  # relative standard error of a throughput from which nothing can be predicted


@dataclass(frozen=True)
class LeftOut:
    """A measured point held against a fit that has not seen it; images per second."""

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
    why_no_fit: str = ""
    predictions: tuple[Prediction, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    remedies_at: tuple[int, ...] = ()
    left_out: LeftOut | None = None
    passed_over: tuple[int, ...] = ()
    """Numbers of ranks that the user asked for and that need no prediction, or can have none."""

    @property
    def unit(self) -> str:
        """What the samples are, in the plural."""
        return unit_of(run.summary for run in self.runs)

    @property
    def shown(self) -> tuple[Prediction, ...]:
        """The predictions that say something: their 95 % range is at most ``WIDEST``."""
        ranges = ((one, one.efficiency.high - one.efficiency.low) for one in self.predictions)
        return tuple(one for one, width in ranges if width <= WIDEST)


def title(study: Study) -> str:
    """Return what was measured, in a line, as far as it is known."""
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
        runs: that belong together (``comparable.check_comparable``), one or more.
        scaling: ``weak`` or ``strong``.
        ranks: numbers of ranks to predict (None: some); what was measured is passed over.
        reductions: a table of allreduce times.
        leave_out: a size that the fit is not to see.

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
    seen = [size for size in study.sizes if not size.oversubscribed and size.ranks != leave_out]
    if why := _why(study.sizes) if len(seen) < 2 else _noisy(seen):
        return replace(study, why_no_fit=why)
    images = _images(runs, scaling)
    points, strong = _steps(seen, images), scaling == STRONG
    fitted = fit(points, strong=strong, reductions=reductions, traffic=study.traffic)
    # So that model and measurement are of the same rank, also where the fit begins with another.
    fitted = replace(fitted, at_base=seen[0].efficiency)
    left_out = _left_out(fitted, study.sizes, leave_out, images)
    return _predict(replace(study, fit=fitted, left_out=left_out), fitted, ranks)


def _predict(study: Study, fitted: Fit, ranks: Sequence[int] | None) -> Study:
    """Return ``study`` with what its fit predicts at those of ``ranks`` that were not reached."""
    wanted = [number for number in ranks or RANKS if number > study.sizes[-1].ranks]
    if study.scaling == STRONG and (batch := study.runs[0].batch):
        wanted = [number for number in wanted if number <= batch]  # others would have no sample
    study = replace(study, passed_over=tuple(sorted({*(ranks or ())} - {*wanted})))
    study = replace(study, predictions=tuple(predict(fitted, number) for number in wanted))
    if not study.shown:
        return study
    shown = [one.ranks for one in study.shown]
    at = tuple(dict.fromkeys((shown[0], shown[len(shown) // 2], shown[-1])))
    return replace(study, remedies=tuple(remedies(fitted, study.traffic, at)), remedies_at=at)


def _steps(sizes: Sequence[RankResult], images: Callable[[int], float]) -> list[Step]:
    """Return the points of the fit; with their communication, where that is known."""
    relative = errors({size.ranks: size.rate for size in sizes})
    known = {size.ranks: size.communication for size in sizes if size.communication}
    exposed_errors = errors(known)
    steps = []
    for size in sizes:
        step = Step(size.ranks, images(size.ranks) / size.rate.mean, relative[size.ranks])
        if size.seconds and (part := size.split.get("communication")) is not None:
            exposed = part / size.seconds * step.seconds
            error = exposed_errors.get(size.ranks, UNKNOWN_ERROR)
            if exposed < step.seconds:  # parts that leave no time to compute were not measured so
                step = replace(step, exposed=exposed, exposed_error=error)
        steps.append(step)
    return steps


def _traffic(runs: Sequence[Run]) -> Traffic | None:
    """Return what a step reduces, from a run that reports it."""
    reported = (run.summary.gradient_messages for run in runs)
    return next((Traffic(one.count, one.bytes) for one in reported if one), None)


def _images(runs: Sequence[Run], scaling: str) -> Callable[[int], float]:
    """Return the images per step by number of ranks.

    Where the batch is not known it is one image per rank (strong: at the smallest size), so that
    seconds are those of an image.
    """
    first, base = runs[0], min(run.ranks for run in runs)
    total = first.batch or (base if scaling == STRONG else first.ranks)
    return lambda ranks: total if scaling == STRONG else total / first.ranks * ranks


def _why(sizes: Sequence[RankResult]) -> str:
    if len(sizes) < 2:
        return "it takes two numbers of ranks"
    if any(size.oversubscribed for size in sizes):
        return "it takes two numbers of ranks that do not share cores"
    return "without the size left out there is but one"


def _noisy(sizes: Sequence[RankResult]) -> str:
    """Return why the repeats of a size are no ground for a prediction; nothing where they are."""
    errors = {size.ranks: size.rate.relative_error or 0.0 for size in sizes}
    ranks = max(errors, key=lambda ranks: errors[ranks])
    if errors[ranks] <= NOISIEST:
        return ""
    return (
        f"the runs on {plural(ranks, 'rank')} differ so much that their mean is known to "
        f"± {100 * errors[ranks]:.0f} % only; repeat them (--repeat) on a machine that does "
        "nothing else"
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
    """Return the study for programs: fractions, seconds, images per second."""
    fit, traffic = study.fit, study.traffic
    return {
        "ok": True,
        "scaling": study.scaling,
        "sizes": [_size_data(one) for one in study.sizes],
        "runs": len(study.runs),
        "fit": fit
        and {
            "base": fit.base,
            "efficiency_at_base": fit.at_base,
            "misfit": fit.misfit,
            "laws": [
                {"law": one.law.name, "weight": one.weight, **asdict(one.costs)}
                for one in fit.candidates
            ],
            "traffic": traffic and asdict(traffic),
        },
        "why_no_fit": study.why_no_fit or None,
        "predictions": [asdict(one) for one in study.predictions],
        "remedies": [_remedy_data(one, study.remedies_at) for one in study.remedies],
        "passed_over": list(study.passed_over),
        "left_out": study.left_out and asdict(study.left_out),
    }


def _remedy_data(one: Remedy, ranks: Sequence[int]) -> dict[str, Any]:
    pairs = zip(ranks, one.efficiencies, strict=True)
    efficiency = {str(number): asdict(expected) for number, expected in pairs}
    return {"name": one.name, "what": one.what, "efficiency": efficiency}


def _size_data(one: RankResult) -> dict[str, Any]:
    rate = one.rate
    return {
        "ranks": one.ranks,
        "hosts": one.hosts,
        "runs": rate.count,
        "images_per_second_mean": rate.mean,
        "images_per_second_std": rate.deviation,
        "images_per_second_interval": rate.interval,
        "speedup": one.speedup,
        "efficiency": one.efficiency,
        "efficiency_interval": one.interval,
        "step_seconds": one.seconds,
        "step_split": dict(one.split) or None,
        "slowest": dict(zip(("rank", "share"), one.slowest, strict=True)) if one.slowest else None,
        "shares_cores": one.oversubscribed,
    }
