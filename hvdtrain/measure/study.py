"""A scaling study: what the runs say together, and what they foretell. No run, no file, no text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hvdtrain.errors import UsageError
from hvdtrain.measure import predict
from hvdtrain.measure.cost import Parts
from hvdtrain.measure.fit import Fit, errors, fit
from hvdtrain.measure.predict import Forecast, Remedy
from hvdtrain.measure.problem import UNKNOWN_ERROR, Reduction, Step, Traffic
from hvdtrain.measure.records import STRONG, Run
from hvdtrain.measure.sizes import Size, summarize

WIDEST = 0.4  # a range of efficiencies that is wider tells nothing
NOISIEST = 0.2  # relative standard error of a throughput from which nothing can be predicted


@dataclass(frozen=True)
class Prediction:
    """What the fit expects at a number of ranks."""

    ranks: int
    efficiency: Forecast
    parts: Parts
    limit: str
    """What costs most beside computing: see ``predict.limit``."""


@dataclass(frozen=True)
class LeftOut:
    """A measured point held against a fit that has not seen it; images per second."""

    ranks: int
    measured: float
    predicted: Forecast


@dataclass(frozen=True)
class Study:
    """All of it."""

    scaling: str
    runs: tuple[Run, ...]
    sizes: tuple[Size, ...]
    traffic: Traffic | None
    fit: Fit | None = None
    why_no_fit: str = ""
    predictions: tuple[Prediction, ...] = ()
    remedies: tuple[Remedy, ...] = ()
    remedies_at: tuple[int, ...] = ()
    left_out: LeftOut | None = None
    passed_over: tuple[int, ...] = ()
    """Numbers of ranks that the user wanted to be foretold, but that tell nothing new."""

    @property
    def shown(self) -> tuple[Prediction, ...]:
        """The predictions that say something: their 95 % range is at most ``WIDEST``."""
        ranges = ((one, one.efficiency.high - one.efficiency.low) for one in self.predictions)
        return tuple(one for one, width in ranges if width <= WIDEST)


def make_study(
    runs: Sequence[Run],
    scaling: str,
    *,
    ranks: Sequence[int] | None = None,
    reductions: Sequence[Reduction] = (),
    leave_out: int | None = None,
) -> Study:
    """Sum the runs up, fit the model to them, and foretell.

    Args:
        runs: that belong together (``alike.check_alike``), one or more.
        scaling: ``weak`` or ``strong``.
        ranks: numbers of ranks to foretell (None: some); what was measured is passed over.
        reductions: a table of allreduce times.
        leave_out: a size that the fit is not to see.

    Raises:
        UsageError: ``leave_out`` was not measured, or ``reductions`` cannot be used.
    """
    study = Study(scaling, tuple(runs), summarize(runs), _traffic(runs))
    measured = [size.ranks for size in study.sizes]
    if leave_out is not None and leave_out not in measured:
        shown = ", ".join(map(str, measured))
        raise UsageError(f"--leave-out {leave_out}: not among the sizes measured, {shown}")
    if reductions and study.traffic is None:
        raise UsageError(
            "--allreduce: the runs do not tell how many messages and bytes a step reduces (columns "
            "messages and gradient_bytes), so the table cannot be used"
        )
    seen = [size for size in study.sizes if not size.crowded and size.ranks != leave_out]
    if len(seen) < 2:
        return replace(study, why_no_fit=_why(study.sizes))
    if noisy := _noisy(seen):
        return replace(study, why_no_fit=noisy)
    images = _images(runs, scaling)
    fitted = fit(
        _steps(seen, images), strong=scaling == STRONG, reductions=reductions, traffic=study.traffic
    )
    # So that model and measurement are of the same rank, also where the fit begins with another.
    fitted = replace(fitted, at_base=seen[0].point.efficiency)
    left_out = _left_out(fitted, study.sizes, leave_out, images)
    return _foretell(replace(study, fit=fitted, left_out=left_out), fitted, ranks)


def _foretell(study: Study, fitted: Fit, ranks: Sequence[int] | None) -> Study:
    """``study`` with what its fit expects at those of ``ranks`` that were not reached."""
    wanted = [number for number in ranks or predict.RANKS if number > study.sizes[-1].ranks]
    if study.scaling == STRONG and (batch := study.runs[0].batch):
        wanted = [number for number in wanted if number <= batch]  # others would have no sample
    study = replace(study, passed_over=tuple(sorted({*(ranks or ())} - {*wanted})))
    study = replace(study, predictions=tuple(_prediction(fitted, number) for number in wanted))
    if not study.shown:
        return study
    told = [one.ranks for one in study.shown]
    at = tuple(dict.fromkeys((told[0], told[len(told) // 2], told[-1])))
    return replace(
        study,
        remedies=tuple(predict.remedies(fitted, study.traffic, at)),
        remedies_at=at,
    )


def _steps(sizes: Sequence[Size], images: Callable[[int], float]) -> list[Step]:
    """The points of the fit; with their communication, where that was told apart."""
    relative = errors({size.ranks: size.point.rate for size in sizes})
    told = {size.ranks: size.communication for size in sizes if size.communication}
    apart = errors(told)
    steps = []
    for size in sizes:
        step = Step(size.ranks, images(size.ranks) / size.point.rate.mean, relative[size.ranks])
        if size.seconds and (part := size.split.get("communication")) is not None:
            exposed = part / size.seconds * step.seconds
            error = apart.get(size.ranks, UNKNOWN_ERROR)
            if exposed < step.seconds:  # parts that leave no time to compute were not measured so
                step = replace(step, exposed=exposed, exposed_error=error)
        steps.append(step)
    return steps


def _traffic(runs: Sequence[Run]) -> Traffic | None:
    """What a step reduces, from a run that says so."""
    for run in runs:
        told = run.summary.get("gradient_messages")
        if told:
            return Traffic(told["count"], told["bytes"])
    return None


def _images(runs: Sequence[Run], scaling: str) -> Callable[[int], float]:
    """Images a step by number of ranks.

    Where the batch is not known it is one image a rank (strong: at the smallest size), so that
    seconds are those of an image.
    """
    first, base = runs[0], min(run.ranks for run in runs)
    total = first.batch or (base if scaling == STRONG else first.ranks)
    return lambda ranks: total if scaling == STRONG else total / first.ranks * ranks


def _why(sizes: Sequence[Size]) -> str:
    if len(sizes) < 2:
        return "it takes two numbers of ranks"
    if any(size.crowded for size in sizes):
        return "it takes two numbers of ranks that do not share cores"
    return "without the size left out there is but one"


def _noisy(sizes: Sequence[Size]) -> str:
    """Why the repeats of a size are no ground for a prediction; nothing where they are."""
    errors = {size.ranks: size.point.rate.relative_error or 0.0 for size in sizes}
    ranks = max(errors, key=lambda ranks: errors[ranks])
    if errors[ranks] <= NOISIEST:
        return ""
    return (
        f"the runs on {ranks} rank{'s' * (ranks > 1)} differ so much that their mean is known to "
        f"± {100 * errors[ranks]:.0f} % only; repeat them (--repeat) on a machine that does "
        "nothing else"
    )


def _prediction(fitted: Fit, ranks: int) -> Prediction:
    return Prediction(
        ranks,
        predict.efficiency_at(fitted, ranks),
        predict.parts_at(fitted, ranks),
        predict.limit(fitted, ranks),
    )


def _left_out(
    fitted: Fit, sizes: Sequence[Size], ranks: int | None, images: Callable[[int], float]
) -> LeftOut | None:
    if ranks is None:
        return None
    seconds = predict.step_at(fitted, ranks)
    rates = (images(ranks) / value for value in (seconds.middle, seconds.high, seconds.low))
    measured = next(size.point.rate.mean for size in sizes if size.ranks == ranks)
    return LeftOut(ranks, measured, Forecast(*rates))
