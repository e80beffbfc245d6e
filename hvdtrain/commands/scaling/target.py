"""The time to a target metric at each number of ranks."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from hvdtrain.commands.runs import accuracy_plot
from hvdtrain.commands.runs.curves import read_curves
from hvdtrain.commands.runs.records import Run
from hvdtrain.commands.runs.target import Evaluation, Target, evaluations, seconds_to
from hvdtrain.errors import UsageError
from hvdtrain.system.output import plots
from hvdtrain.system.output.tables import message, table
from hvdtrain.system.output.text import duration, plural

STEM = "target"  # of the plot


@dataclass(frozen=True)
class TargetResult:
    """The time to the target on one number of ranks."""

    ranks: int
    evaluated: list[list[Evaluation]]  # the evaluations of each run that has any
    seconds: float | None  # median; None unless each of these runs reached the target
    speedup: float | None = None  # over the smallest number of ranks


def results(runs: Sequence[Run], folder: Path, target: Target) -> list[TargetResult]:
    """Return the time to ``target`` by increasing ranks.

    Raises:
        UsageError: no run was evaluated.
    """
    sizes: list[TargetResult] = []
    for ranks in sorted({run.ranks for run in runs}):
        curves = [_evaluations(folder, run, target) for run in runs if run.ranks == ranks]
        evaluated = [curve for curve in curves if curve]
        times = [seconds_to(target, curve) for curve in evaluated]
        reached = [time for time in times if time is not None]
        all_reached = bool(reached) and len(reached) == len(times)
        seconds = statistics.median(reached) if all_reached else None
        base = sizes[0].seconds if sizes else seconds
        speedup = base / seconds if base and seconds else None
        sizes.append(TargetResult(ranks, evaluated, seconds, speedup))
    if not any(size.evaluated for size in sizes):
        raise UsageError(
            f"--target {target.metric}={target.value:g}: no run in {folder} has an evaluation with "
            "this metric at the end of an epoch; train for whole epochs, without --num-steps"
        )
    return sizes


def _evaluations(folder: Path, run: Run, target: Target) -> list[Evaluation]:
    """Return the evaluations of a run; sizes that were submitted as jobs have subdirectories."""
    for base in (folder, folder / f"ranks-{run.ranks}"):
        with contextlib.suppress(OSError, ValueError):
            if curves := read_curves(base / "runs" / f"{run.name}.jsonl"):
                return evaluations(curves, target.metric)
    return []


def text(sizes: Sequence[TargetResult], target: Target) -> str:
    """Return the times as a table."""
    rows = [
        [
            str(size.ranks),
            "not reached" if size.seconds is None else duration(size.seconds),
            "-" if size.speedup is None else f"{size.speedup:.2f}",
            str(len(size.evaluated)),
        ]
        for size in sizes
    ]
    head = f"Time to {target}, from the first update, including evaluations (median):"
    return f"{message(head)}\n\n{table(['ranks', 'time', 'speed-up', 'runs'], rows)}"


def data(sizes: Sequence[TargetResult], target: Target) -> dict[str, Any]:
    """Return the times as JSON."""
    rows = [
        {
            "ranks": size.ranks,
            "seconds": size.seconds,
            "speedup": size.speedup,
            "runs": len(size.evaluated),
        }
        for size in sizes
    ]
    return {"metric": target.metric, "value": target.value, "sizes": rows}


def draw(sizes: Sequence[TargetResult], target: Target, folder: Path) -> list[Path]:
    """Write the first run of each size, over epochs and over seconds, as PDF and PNG."""
    plots.style()
    lines = [(plural(size.ranks, "rank"), size.evaluated[0]) for size in sizes if size.evaluated]
    figure, axes = plt.subplots(1, len(accuracy_plot.OVER), figsize=(9.6, 3.8), sharey=True)
    for panel_axes, over in zip(axes, accuracy_plot.OVER, strict=True):
        accuracy_plot.draw(panel_axes, lines, target, over)
    return plots.save(figure, folder / STEM)
