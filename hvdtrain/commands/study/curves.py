"""The training curves of a run, from its ``--metrics`` file, and the time until a ``--target``.

With ``--target accuracy=0.985`` that is the time until an evaluation first reached the value: as in
MLPerf from the start of the first update to the end of that evaluation, including evaluations.
Source: Mattson et al., "MLPerf Training Benchmark", 2020.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hvdtrain.errors import UsageError
from hvdtrain.system.files import read_regular
from hvdtrain.system.output import plots
from hvdtrain.system.output.tables import Column, message, tabulate
from hvdtrain.system.output.text import duration, plural

LOSS = "loss"  # lower is better; for other metrics higher is better, unless specified
PLOT = "target"  # stem of the plot of a scaling study
OVER = ("epochs", "seconds")  # axes of an ``Evaluation``
Record = dict[str, Any]


@dataclass(frozen=True)
class TrainingCurves:
    """The records of a ``--metrics`` file: one per log interval, and one per epoch."""

    path: Path
    steps: list[Record]
    epochs: list[Record]


class Evaluation(NamedTuple):
    """The result of one evaluation during a training."""

    epochs: int  # completed
    seconds: float  # since the start of the first update
    value: float


@dataclass(frozen=True)
class Target:
    """A metric, by its name in ``eval_NAME``, and the value to reach."""

    metric: str
    value: float
    falls: bool = False  # lower is better

    def __str__(self) -> str:
        return f"{self.metric} {self.value:g}"

    def is_reached(self, value: float) -> bool:
        """Return whether ``value`` is at least as good as the target."""
        return value <= self.value if self.falls else value >= self.value


def read_target(text: str) -> Target:
    """Return the target in ``NAME=VALUE``; with ``NAME<=VALUE`` lower is better.

    Raises:
        ValueError: the text has another form.
    """
    left, _, value = text.partition("=")
    name = left.removesuffix("<").strip().removeprefix("eval_")
    try:
        target = Target(name, float(value), falls=left.endswith("<") or name == LOSS)
    except ValueError:
        target = Target("", 0.0)
    if not target.metric:
        raise ValueError(f"{text!r} is not NAME=VALUE, e.g. accuracy=0.985, or NAME<=VALUE")
    return target


def read_curves(path: Path, shown: Path | None = None) -> TrainingCurves | None:
    """Return the training curves in a file; None if no line is a training record.

    Args:
        path: the file.
        shown: its path in reports, if different.

    Raises:
        OSError, ValueError: it cannot be read, or is no text.
    """
    kinds: dict[str, dict[int, Record]] = {"step": {}, "epoch": {}}
    for line in read_regular(path).decode().splitlines():
        try:
            record = json.loads(line)
            step, records = int(record["step"]), kinds[record["kind"]]
        except (ValueError, KeyError, TypeError):  # cut off by a crash, or of another program
            continue
        # A run that resumed or began anew repeats steps: later ones are of the run before it.
        # An evaluation follows the training record of its step.
        for kind, earlier in kinds.items():
            while earlier and next(reversed(earlier)) >= step + (kind == "step"):
                earlier.popitem()
        records[step] = record
    steps, epochs = (list(records.values()) for records in kinds.values())
    return TrainingCurves(shown or path, steps, epochs) if steps or epochs else None


def evaluations(curves: TrainingCurves, metric: str) -> list[Evaluation]:
    """Return the evaluations that have ``metric`` and their time."""
    key = f"eval_{metric}"
    return [
        Evaluation(int(record["epoch"]) + 1, float(record["elapsed"]), float(record[key]))
        for record in curves.epochs
        if all(record.get(name) is not None for name in ("epoch", "elapsed", key))
    ]


def seconds_to(target: Target, curve: Sequence[Evaluation]) -> float | None:
    """Return the seconds until the target was first reached; None if it was not."""
    return next((point.seconds for point in curve if target.is_reached(point.value)), None)


def median_seconds(target: Target, repeats: Sequence[Sequence[Evaluation]]) -> float | None:
    """Return the median time to the target; None unless each evaluated run reached it."""
    times = [seconds_to(target, curve) for curve in repeats if curve]
    reached = [time for time in times if time is not None]
    return statistics.median(reached) if reached and len(reached) == len(times) else None


@dataclass(frozen=True)
class TargetResult:
    """The time to the target on one number of ranks."""

    ranks: int
    evaluated: list[list[Evaluation]]  # the evaluations of each run that has any
    seconds: float | None  # median; None unless each of these runs reached the target
    speedup: float | None = None  # over the smallest number of ranks


def target_results(
    curves: Mapping[int, Sequence[list[Evaluation]]], folder: Path, target: Target
) -> list[TargetResult]:
    """Return the time to ``target`` by increasing ranks.

    Args:
        curves: the evaluations of each run, by ranks.
        folder: the directory of the study, for the message.
        target: the metric value to reach.

    Raises:
        UsageError: no run was evaluated.
    """
    sizes: list[TargetResult] = []
    for ranks in sorted(curves):
        evaluated = [curve for curve in curves[ranks] if curve]
        seconds = median_seconds(target, evaluated)
        base = sizes[0].seconds if sizes else seconds
        speedup = base / seconds if base and seconds else None
        sizes.append(TargetResult(ranks, evaluated, seconds, speedup))
    if not any(size.evaluated for size in sizes):
        raise UsageError(
            f"--target {target.metric}={target.value:g}: no run in {folder} has an evaluation with "
            "this metric at the end of an epoch; train for whole epochs, without --num-steps"
        )
    return sizes


TARGET_COLUMNS = {  # by the key of ``--json``
    "ranks": Column("ranks", "ranks"),
    "seconds": Column("time", "seconds", duration, unknown="not reached"),
    "speedup": Column("speed-up", "speedup", "{:.2f}".format),
    "runs": Column("runs", lambda size: len(size.evaluated)),
}


def target_text(sizes: Sequence[TargetResult], target: Target) -> str:
    """Return the times as a table."""
    head = f"Time to {target}, from the first update, including evaluations (median):"
    return f"{message(head)}\n\n{tabulate(list(TARGET_COLUMNS.values()), sizes).body}"


def target_data(sizes: Sequence[TargetResult], target: Target) -> dict[str, object]:
    """Return the times as JSON."""
    rows = [
        {key: column.value_of(size) for key, column in TARGET_COLUMNS.items()} for size in sizes
    ]
    return {"metric": target.metric, "value": target.value, "sizes": rows}


def draw_target(sizes: Sequence[TargetResult], target: Target, folder: Path) -> list[Path]:
    """Write the first run of each size, over epochs and over seconds, as PDF and PNG."""
    lines = [(plural(size.ranks, "rank"), size.evaluated[0]) for size in sizes if size.evaluated]
    panels = {
        over: partial(draw_evaluations, lines=lines, target=target, over=over) for over in OVER
    }
    figure = plots.figure_of(panels, (4.8, 3.8), sharey=True)
    return plots.save(figure, folder / PLOT)


def draw_evaluations(
    axes: Any, lines: Sequence[tuple[str, Sequence[Evaluation]]], target: Target, over: str
) -> None:
    """Draw a line per labelled run, and the target as a horizontal line, over one of ``OVER``.

    A run without evaluations has no line, and the others keep their colours.
    """
    axes.axhline(target.value, color=plots.GREY, linestyle="--", linewidth=1)
    for number, (label, curve) in enumerate(lines):
        if not curve:
            continue
        x = [getattr(evaluation, over) for evaluation in curve]
        y = [evaluation.value for evaluation in curve]
        axes.plot(x, y, label=label, **plots.series(number))
    axes.set_xlim(left=0)
    axes.set_xlabel(over)
    axes.set_ylabel(f"{target.metric} (dashed: {target.value:g})")
    if any(curve for _, curve in lines):
        axes.legend(fontsize="small")
