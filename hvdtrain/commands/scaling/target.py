"""The time to a target at each number of ranks, which is what a user of more ranks waits for."""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from matplotlib import pyplot as plt

from hvdtrain.commands.runs import accuracy_plot
from hvdtrain.commands.runs.course import read_course
from hvdtrain.commands.runs.records import Run
from hvdtrain.commands.runs.target import Evaluation, Target, evaluations, seconds_to
from hvdtrain.errors import UsageError
from hvdtrain.system.output import plots
from hvdtrain.system.output.tables import message, table
from hvdtrain.system.output.text import duration, plural

STEM = "target"  # of the plot


@dataclass(frozen=True)
class TargetResult:
    """What one number of ranks achieved."""

    ranks: int
    courses: list[list[Evaluation]]  # of each run whose file is there
    seconds: float | None  # median; None unless each of them reached the target
    speedup: float | None = None  # over the smallest number of ranks


def results(runs: Sequence[Run], folder: Path, target: Target) -> list[TargetResult]:
    """Return the time to ``target`` by rising ranks.

    Raises:
        UsageError: no run was evaluated.
    """
    found: list[TargetResult] = []
    for ranks in sorted({run.ranks for run in runs}):
        courses = [_course(folder, run, target) for run in runs if run.ranks == ranks]
        known = [course for course in courses if course]
        times = [seconds_to(target, course) for course in known]
        reached = [time for time in times if time is not None]
        done = bool(reached) and len(reached) == len(times)
        seconds = statistics.median(reached) if done else None
        base = found[0].seconds if found else seconds
        speedup = base / seconds if base and seconds else None
        found.append(TargetResult(ranks, known, seconds, speedup))
    if not any(one.courses for one in found):
        raise UsageError(
            f"--target {target.metric}={target.value:g}: no run in {folder} was evaluated at the "
            "end of an epoch, or none has that metric: train on whole epochs, without --num-steps"
        )
    return found


def _course(folder: Path, run: Run, target: Target) -> list[Evaluation]:
    """Return the evaluations of a run; where each size was a job, it has a directory of its own."""
    for home in (folder, folder / f"ranks-{run.ranks}"):
        with contextlib.suppress(OSError, ValueError):
            if course := read_course(home / "runs" / f"{run.name}.jsonl"):
                return evaluations(course, target.metric)
    return []


def text(found: Sequence[TargetResult], target: Target) -> str:
    """Return the times as a table."""
    rows = [
        [
            str(one.ranks),
            "not reached" if one.seconds is None else duration(one.seconds),
            "-" if one.speedup is None else f"{one.speedup:.2f}",
            str(len(one.courses)),
        ]
        for one in found
    ]
    head = f"Time to {target}, from the first update on, evaluations included (median):"
    return f"{message(head)}\n\n{table(['ranks', 'time', 'speed-up', 'runs'], rows)}"


def data(found: Sequence[TargetResult], target: Target) -> dict[str, Any]:
    """Return the times as ``--json`` gives them."""
    sizes = [
        {
            "ranks": one.ranks,
            "seconds": one.seconds,
            "speedup": one.speedup,
            "runs": len(one.courses),
        }
        for one in found
    ]
    return {"metric": target.metric, "value": target.value, "sizes": sizes}


def draw(found: Sequence[TargetResult], target: Target, folder: Path) -> list[Path]:
    """Write the first run of each size, over epochs and over seconds, as PDF and PNG."""
    plots.style()
    lines = [(plural(one.ranks, "rank"), one.courses[0]) for one in found if one.courses]
    figure, axes = plt.subplots(1, len(accuracy_plot.OVER), figsize=(9.6, 3.8), sharey=True)
    for one, over in zip(axes, accuracy_plot.OVER, strict=True):
        accuracy_plot.draw(one, lines, target, over)
    return plots.save(figure, folder / STEM)
