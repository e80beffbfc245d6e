"""The rows of a comparison: medians over the repeats, as a table, JSON and CSV."""

from __future__ import annotations

import contextlib
import csv
import io
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hvdtrain.commands.compare.largest import read_largest
from hvdtrain.commands.compare.methods import AUTO, Method, full_label, sent_bytes
from hvdtrain.commands.compare.trials import Trial, failure_text, run_stem
from hvdtrain.commands.runs.curves import TrainingCurves, read_curves
from hvdtrain.commands.runs.start import CURVES, file_path
from hvdtrain.commands.runs.target import Evaluation, Target, evaluations, seconds_to
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output.tables import Table, known
from hvdtrain.system.output.text import duration, number, percent, plural, size

KINDS = ("framework", "precision")  # of a row, in addition to its strategy
HOUR = 3600.0  # seconds
Curve = dict[int, float]  # training loss by step


@dataclass(frozen=True)
class Row:
    """The results of a method, with the keys of ``--json``; None: unknown.

    Throughput and seconds are medians over the repeats, memory is the maximum.
    """

    strategy: str
    framework: str
    precision: str | None
    compression: str
    ranks: int
    available: bool
    reason: str | None = None
    images_per_second: float | None = None  # over all ranks
    images_per_second_lowest: float | None = None
    images_per_second_highest: float | None = None
    speedup: float | None = None  # over one process of the same framework and precision
    epoch_seconds: float | None = None  # of training
    peak_memory_bytes: int | None = None  # maximum over the ranks
    utilisation: float | None = None  # of the cores, a fraction; mean over the ranks
    node_hours_per_epoch: float | None = None
    price_per_epoch: float | None = None
    bytes_per_step: int | None = None  # sent by a rank, theoretical
    loss_distance: float | None = None  # from the loss curve of one process
    target_seconds: float | None = None  # time to --target; None: not reached in every repeat
    target_speedup: float | None = None  # over one process
    setup_seconds: float | None = None  # until the end of the first update
    largest_batch: int | None = None  # per rank, that fits
    largest_batch_predicted: bool | None = None  # extrapolated from small batches
    bubble: float | None = None  # fraction of a step in which pipeline stages wait
    bubble_formula: float | None = None  # that fraction for stages of equal cost
    options: str = ""  # of this strategy only
    repeats: int = 0

    @property
    def label(self) -> str:
        """The strategy with its options, without framework and precision."""
        return Method(
            self.strategy, self.framework, AUTO, self.compression, self.ranks, self.options
        ).label


def make_rows(
    trials: Sequence[Trial],
    methods: Sequence[Method] | None = None,
    folder: Path | None = None,
    price: float | None = None,
    target: Target | None = None,
) -> list[Row]:
    """Return a row per method, in order.

    Args:
        trials: the runs, and the reasons of methods without a run.
        methods: the requested rows; None: all.
        folder: directory of the comparison, with the training curves; None: without curves.
        price: of one node-hour.
        target: the metric value to report the time to, if any.
    """
    methods = methods or list(dict.fromkeys(trial.method for trial in trials))
    curves = read_all_curves(trials, folder) if folder is not None else {}
    rows = {
        method: _row(method, [trial for trial in trials if trial.method == method], price)
        for method in methods
    }
    if target is not None:
        for method, row in rows.items():
            repeats = [run for (run_method, _), run in curves.items() if run_method == method]
            rows[method] = replace(row, target_seconds=target_seconds(target, repeats))
    _compare_with_baseline(rows, {key: loss_curve(run) for key, run in curves.items()})
    for largest in read_largest(folder) if folder is not None else ():
        if largest.method in rows:
            rows[largest.method] = replace(
                rows[largest.method],
                largest_batch=largest.batch,
                largest_batch_predicted=largest.predicted,
            )
    return list(rows.values())


def _compare_with_baseline(
    rows: dict[Method, Row], losses: dict[tuple[Method, int], Curve]
) -> None:
    """Set the fields of each row that compare it with its baseline."""
    for method, row in rows.items():
        base = next((m for m in rows if m.is_baseline and m.shares_baseline(method)), None)
        if base is None or not row.available:
            continue
        distances = [
            distance(losses.get((method, number), {}), losses.get((base, number), {}))
            for number in range(1, row.repeats + 1)
        ]
        rows[method] = replace(
            row,
            speedup=_ratio(row.images_per_second, rows[base].images_per_second),
            loss_distance=_median(distances),
            target_speedup=_ratio(rows[base].target_seconds, row.target_seconds),
        )


def _row(method: Method, trials: Sequence[Trial], price: float | None) -> Row:
    summaries = [trial.summary for trial in trials if trial.summary]
    precision = None if method.precision == AUTO else method.precision
    row = Row(
        strategy=method.strategy,
        framework=method.framework,
        precision=precision,
        compression=method.compression,
        ranks=method.ranks,
        available=bool(summaries),
        options=method.options,
    )
    if not summaries:
        text = failure_text(trials[-1]) if trials else "not run yet"
        return replace(row, reason=text.removeprefix("not available: "))

    def median(value: Callable[[Summary], float | None]) -> float | None:
        return _median(value(summary) for summary in summaries)

    first = summaries[0]
    rates = [float(summary.images_per_second_mean or 0) for summary in summaries]
    rate, samples = statistics.median(rates), first.training_samples
    seconds = samples / rate if samples else None
    hours = seconds * (first.hosts or 1) / HOUR if seconds else None
    return replace(
        row,
        precision=first.precision or precision,
        ranks=first.world_size or method.ranks,
        images_per_second=rate,
        images_per_second_lowest=min(rates),
        images_per_second_highest=max(rates),
        epoch_seconds=seconds,
        peak_memory_bytes=max(summary.peak_memory_bytes or 0 for summary in summaries) or None,
        utilisation=median(lambda summary: summary.utilisation_mean),
        node_hours_per_epoch=hours,
        price_per_epoch=hours * price if hours and price is not None else None,
        bytes_per_step=sent_bytes(method, first),
        setup_seconds=median(lambda summary: summary.seconds_to_first_step),
        bubble=median(lambda summary: summary.bubble.measured if summary.bubble else None),
        bubble_formula=median(lambda summary: summary.bubble.formula if summary.bubble else None),
        repeats=len(summaries),
    )


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def read_all_curves(
    trials: Sequence[Trial], folder: Path
) -> dict[tuple[Method, int], TrainingCurves]:
    """Return the training curves of the runs by method and repeat, of readable files only."""
    all_curves = {}
    for trial in trials:
        stem = run_stem(folder, trial.method, trial.repeat)
        with contextlib.suppress(OSError, ValueError):
            if trial.summary and (curves := read_curves(file_path(stem, CURVES))):
                all_curves[trial.method, trial.repeat] = curves
    return all_curves


def evaluated(
    trials: Sequence[Trial], folder: Path, target: Target
) -> list[tuple[str, list[Evaluation]]]:
    """Return the evaluations of the first run of each method, with the method's name."""
    first: dict[Method, list[Evaluation]] = {}
    for (method, _), curves in read_all_curves(trials, folder).items():
        first.setdefault(method, evaluations(curves, target.metric))
    return [(full_label(method), curve) for method, curve in first.items()]


def loss_curve(curves: TrainingCurves) -> Curve:
    """Return the training loss by step."""
    losses = ((record["step"], record.get("loss")) for record in curves.steps)
    return {step: float(loss) for step, loss in losses if loss is not None}


def target_seconds(target: Target, repeats: Sequence[TrainingCurves]) -> float | None:
    """Return the median time to the target; None unless each run reached it."""
    times = [seconds_to(target, evaluations(curves, target.metric)) for curves in repeats]
    return None if None in times else _median(times)


def distance(a: Curve, b: Curve) -> float | None:
    """Return the largest difference of two loss curves at a common step; None without one."""
    return max((abs(a[step] - b[step]) for step in a.keys() & b.keys()), default=None)


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, with the keys of the JSON as column names."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()


def figures(rows: Sequence[Row], unit: str = "images") -> Table:
    """Return the table of the available rows, without empty columns.

    Args:
        rows: available and unavailable rows.
        unit: unit of the samples, in the plural.
    """
    available = [row for row in rows if row.available]

    def cells(value: Callable[[Row], Any], show: Callable[[Any], str]) -> list[str]:
        return ["-" if value(row) is None else show(value(row)) for row in available]

    varying = [key for key in KINDS if len({getattr(row, key) for row in available}) > 1]
    several = any(row.repeats > 1 for row in available)
    spread = [(row.images_per_second_lowest, row.images_per_second_highest) for row in available]
    columns = {
        "strategy": [row.label for row in available],
        "framework": cells(lambda row: row.framework if "framework" in varying else None, str),
        "precision": cells(lambda row: row.precision if "precision" in varying else None, str),
        "ranks": [str(row.ranks) for row in available],
        f"{unit}/s": cells(lambda row: row.images_per_second, number),
        "range": [
            f"{number(low or 0)} ... {number(high or 0)}" if several else "-"
            for low, high in spread
        ],
        "speed-up": cells(lambda row: row.speedup, "{:.2f}".format),
        "epoch": cells(lambda row: row.epoch_seconds, _epoch),
        "memory": cells(lambda row: row.peak_memory_bytes, size),
        "busy": cells(lambda row: row.utilisation, percent),
        "node-h": cells(lambda row: row.node_hours_per_epoch, "{:.2g}".format),
        "price": cells(lambda row: row.price_per_epoch, "{:.2g}".format),
        "sent": cells(lambda row: row.bytes_per_step, size),
        "loss": cells(lambda row: row.loss_distance, "{:.2g}".format),
        "largest": [
            "-"
            if row.largest_batch is None
            else f"{'~' * bool(row.largest_batch_predicted)}{row.largest_batch:,}"
            for row in available
        ],
        "to target": cells(lambda row: row.target_seconds, duration),
        "by target": cells(lambda row: row.target_speedup, "{:.2f}".format),
        "set-up": cells(lambda row: row.setup_seconds, duration),
        "bubble": cells(lambda row: row.bubble, percent),
        "by formula": cells(lambda row: row.bubble_formula, percent),
    }
    return known(columns)


def _epoch(seconds: float) -> str:
    """Return the time of an epoch as text; for ImageNet it may be a day."""
    return f"{seconds / HOUR:.1f} h" if seconds >= 2 * HOUR else duration(seconds)


NOTES = {
    "range": "lowest ... highest throughput of the repeats, whose median precedes it",
    "speed-up": "over one process of the same framework and precision",
    "epoch": "time of training on all samples once, without evaluation",
    "memory": "maximum over ranks: GPU memory, or resident memory including libraries",
    "busy": "utilisation of the cores of a rank, mean over ranks, including polling",
    "node-h": "node-hours per epoch",
    "price": "per epoch, at --price-per-hour per node",
    "sent": "bytes sent by a rank per step, theoretical value for the gradients",
    "loss": "largest difference of the training loss from that of one process",
    "largest": "largest batch per rank that fits; ~: predicted from small ones and the memory",
    "to target": "time to --target from the first update, including evaluations",
    "by target": "speed-up over one process in the time to the target",
    "set-up": "from the start of a rank to the end of its first step",
    "bubble": "fraction of a step in which the stages of a pipeline wait for one another",
    "by formula": "that fraction for stages of equal cost without other waits",
}


def notes(header: Sequence[str]) -> list[tuple[str, str]]:
    """Return the meanings of the columns of a table."""
    return [(name, text) for name, text in NOTES.items() if name in header]


def unavailable(rows: Sequence[Row]) -> list[str]:
    """Return a line per unavailable row."""
    lines = []
    for row in rows:
        if not row.available:
            kind = ", ".join(part for part in (row.framework, row.precision) if part)
            reason = str(row.reason)
            text = reason if reason.startswith("failed") else f"not available: {reason}"
            lines.append(f"{row.label} ({kind}): {text}")
    return lines


def headline(trials: Sequence[Trial]) -> str:
    """Return a description of the comparison: what is common to all rows."""
    measured = [(trial, trial.summary) for trial in trials if trial.summary]
    if not measured:
        return "no method could be measured"
    trial, first = measured[0]
    common = [
        getattr(first, key)
        for key in KINDS
        if len({getattr(summary, key) for _, summary in measured}) == 1
    ]
    parts = [
        " ".join(word for word in dict.fromkeys((first.workload, first.model, *common)) if word),
        f"global batch {trial.batch} in every row",
        plural(trial.threads, "thread") + " per rank" if trial.threads else "",
        trial.machine,
    ]
    return ", ".join(part for part in parts if part)
