"""Report a batch-size study: the metric by batch and optimizer, and the largest batch that learns.

Source of the question: Shallue et al., "Measuring the Effects of Data Parallelism on Neural Network
Training" (2019).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.commands.scaling.batches import BatchRun, BatchSetting, read_runs
from hvdtrain.commands.study.curves import (
    Evaluation,
    Target,
    draw_evaluations,
    evaluations,
)
from hvdtrain.commands.study.run import curves_of
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.output import Report, plots
from hvdtrain.system.output.tables import Column, message, tabulate, write_csv
from hvdtrain.system.output.text import plural, printable

STEM = "batches"  # of the table and the plot


@dataclass(frozen=True)
class BatchResult:
    """The results of a setting over its seeds, with the keys of ``--json``."""

    optimizer: str  # with its options; empty: that of the command
    batch: int  # global
    updates: int | None  # of a run
    values: tuple[float, ...]  # of the metric at the end of each run that has one
    seeds: tuple[int, ...]  # of these runs
    reached: int  # number of runs that have reached the target at their end
    runs: int
    epochs: float | None  # median of all runs until the target; None: half did not reach it
    reason: str = ""  # why a run failed

    @property
    def middle(self) -> float | None:
        """The median of the values."""
        return statistics.median(self.values) if self.values else None

    @property
    def holds(self) -> bool:
        """Whether more than half of the runs have reached the target at their end."""
        return 2 * self.reached > self.runs


Curves = dict[BatchSetting, dict[int, list[Evaluation]]]  # of each run, by its seed


def read_evaluations(runs: Sequence[BatchRun], folder: Path, metric: str) -> Curves:
    """Return, by setting, the evaluations of each run that ends with a finite metric."""
    curves: Curves = {run.setting: {} for run in runs}
    for run in runs:
        read = curves_of(folder, run) if run.summary else None
        if read and read.epochs and read.epochs[-1].get(f"eval_{metric}") is not None:
            curves[run.setting][run.repeat] = evaluations(read, metric)
    return curves


def make_results(
    runs: Sequence[BatchRun], curves: Curves, settings: Sequence[BatchSetting], target: Target
) -> list[BatchResult]:
    """Return the results of ``settings``, of those that have run."""
    results = []
    for setting in settings:
        latest = {run.repeat: run for run in runs if run.setting == setting}
        if not latest:
            continue
        ended = {seed: curve for seed, curve in curves.get(setting, {}).items() if curve}
        first = [
            next((point.epochs for point in curve if target.is_reached(point.value)), math.inf)
            for curve in ended.values()
        ]
        first += [math.inf] * (len(latest) - len(first))  # failed, or never evaluated
        epochs = statistics.median(first)
        results.append(
            BatchResult(
                optimizer=setting.optimizer,
                batch=setting.batch,
                updates=next(
                    (run.summary.steps_completed for run in latest.values() if run.summary), None
                ),
                values=tuple(curve[-1].value for curve in ended.values()),
                seeds=tuple(ended),
                reached=sum(target.is_reached(curve[-1].value) for curve in ended.values()),
                runs=len(latest),
                epochs=epochs if math.isfinite(epochs) else None,
                reason=next((run.reason for run in latest.values() if run.reason), ""),
            )
        )
    return results


def largest(results: Sequence[BatchResult]) -> dict[str, int | None]:
    """Return by optimizer the largest batch that reaches the target, as all smaller ones do."""
    best: dict[str, int | None] = {}
    for name in dict.fromkeys(result.optimizer for result in results):
        best[name] = None
        for result in sorted(results, key=lambda result: result.batch):
            if result.optimizer == name:
                if not result.holds:
                    break
                best[name] = result.batch
    return best


def report(folder: Path, target: Target | None, settings: Sequence[BatchSetting] = ()) -> Report:
    """Report a study, and write its table and plot.

    Args:
        folder: its directory.
        target: the metric value to reach.
        settings: the requested rows; none: all.

    Raises:
        UsageError: there is no target, no run has been evaluated, or a file cannot be written.
        HvdtrainError: all runs failed.
    """
    if target is None:
        raise UsageError(f"{folder} has a batch-size study: use --target NAME=VALUE to report it")
    runs = read_runs(folder)
    if not settings:
        names = list(dict.fromkeys(run.setting.optimizer for run in runs))
        known = {run.setting for run in runs}
        settings = sorted(
            known, key=lambda setting: (names.index(setting.optimizer), setting.batch)
        )
    curves = read_evaluations(runs, folder, target.metric)
    results = make_results(runs, curves, settings, target)
    if results and not any(run.summary for run in runs):
        raise HvdtrainError(f"all runs in {folder} failed; the last one: {runs[-1].reason}")
    if not any(result.values for result in results):
        raise UsageError(
            f"--target {target.metric}={target.value:g}: no run in {folder} has an evaluation with "
            "this metric"
        )
    files = [folder / f"{STEM}.csv"]
    _write(files[0], results)
    files += draw(results, curves, folder, target)
    best = largest(results)
    head = f"{target.metric} at the end of the training, median over the seeds (lowest to highest):"
    lines = [
        f"largest batch that reaches {target}{f', {name}' if name else ''}: {batch or 'none'}"
        for name, batch in best.items()
    ]
    written = message("written: " + ", ".join(map(str, files)))
    parts = [message(head), _table(results, target), "\n".join(lines), written]
    data = {
        "ok": True,
        "metric": target.metric,
        "value": target.value,
        "rows": [asdict(result) for result in results],
        "largest": best,
        "files": list(map(str, files)),
    }
    return Report("\n\n".join(parts), data)


def _table(results: Sequence[BatchResult], target: Target) -> str:
    def values(result: BatchResult) -> str:
        if result.middle is None:
            return "failed"
        low, high = min(result.values), max(result.values)
        several = f" ({low:.4f} to {high:.4f})" if len(result.values) > 1 else ""
        return f"{result.middle:.4f}{several}"

    columns = [
        Column("optimizer", lambda result: result.optimizer or None),
        Column("batch", "batch", "{:,}".format),
        Column("updates", "updates", "{:,}".format),
        Column(target.metric, values),
        Column("reached", lambda result: f"{result.reached} of {result.runs}"),
        Column("epochs to it", "epochs", "{:g}".format),
    ]
    failures = [
        message(f"{BatchSetting(result.optimizer, result.batch).title}: {result.reason}")
        for result in results
        if result.reason
    ]
    return "\n".join([tabulate(columns, results).body, *failures])


def _write(path: Path, results: Sequence[BatchResult]) -> None:
    cells = [
        [result.optimizer, result.batch, result.updates, seed, value]
        for result in results
        for seed, value in zip(result.seeds, result.values, strict=True)
    ]
    write_csv(path, ["optimizer", "batch", "updates", "run", "value"], cells, "--out")


def draw(
    results: Sequence[BatchResult], curves: Curves, folder: Path, target: Target
) -> list[Path]:
    """Write the metric over the batch, and over the epochs at the largest batch, as PDF and PNG."""
    most = max(result.batch for result in results)
    lines = [
        (
            printable(name or f"batch {most}"),
            next((run for run in curves.get(BatchSetting(name, most), {}).values() if run), ()),
        )
        for name in dict.fromkeys(result.optimizer for result in results)
    ]
    panels = {
        "batches": partial(_draw_batches, results=results, target=target),
        "epochs": partial(draw_evaluations, lines=lines, target=target, over="epochs"),
    }
    figure = plots.figure_of(panels, (4.8, 3.8), sharey=True)
    figure.axes[1].set_title(f"global batch {most:,}", loc="left")
    return plots.save(figure, folder / STEM)


def _draw_batches(axes: Any, results: Sequence[BatchResult], target: Target) -> None:
    axes.axhline(target.value, color=plots.GREY, linestyle="--", linewidth=1)
    for number, name in enumerate(dict.fromkeys(result.optimizer for result in results)):
        mine = [result for result in results if result.optimizer == name and result.values]
        if not mine:
            continue
        middle = [result.middle or 0.0 for result in mine]
        below = [value - min(result.values) for value, result in zip(middle, mine, strict=True)]
        above = [max(result.values) - value for value, result in zip(middle, mine, strict=True)]
        batches = [result.batch for result in mine]
        label = printable(name) if name else plural(len(mine[0].values), "seed")
        axes.errorbar(
            batches, middle, yerr=(below, above), capsize=3, label=label, **plots.series(number)
        )
    ticks = sorted({result.batch for result in results})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{batch:,}" for batch in ticks])
    axes.minorticks_off()
    axes.set_xlabel("global batch")
    axes.set_ylabel(f"{target.metric} (dashed: {target.value:g})")
    axes.legend(fontsize="small")
