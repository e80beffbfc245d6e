"""The report of a comparison: medians over the repeats, as a table, JSON, CSV and plots."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.compare.methods import (
    AUTO,
    Method,
    Trial,
    full_label,
    sent_bytes,
    short_label,
)
from hvdtrain.commands.study.curves import (
    Evaluation,
    Target,
    TrainingCurves,
    evaluations,
    median_seconds,
)
from hvdtrain.commands.study.run import curves_of
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output.tables import Column, Table, entry, message, tabulate
from hvdtrain.system.output.text import duration, number, percent, plural, size

KINDS = ("framework", "precision")  # of a row, in addition to its strategy
STEM = "compare"  # of the table and the plot
HOUR = 3600.0  # seconds
Curve = dict[int, float]  # training loss by step
Curves = dict[tuple[Method, int], TrainingCurves]  # by method and repeat


@dataclass(frozen=True)
class MethodResult:
    """The results of a method, with the keys of ``--json``; None: unknown.

    Throughput and seconds are medians over the repeats, memory is the maximum.
    """

    strategy: str
    framework: str
    precision: str | None
    compression: str
    ranks: int
    available: bool
    reason: str | None = None  # why it has no results, or which run failed
    images_per_second: float | None = None  # over all ranks
    images_per_second_lowest: float | None = None
    images_per_second_highest: float | None = None
    speedup: float | None = None  # over one process of the same framework and precision
    epoch_seconds: float | None = None  # of training
    peak_memory_bytes: int | None = None  # maximum over the ranks
    utilisation: float | None = None  # of the GPU or the cores, a fraction; mean over the ranks
    node_hours_per_epoch: float | None = None
    bytes_per_step: int | None = None  # sent by a rank, theoretical
    loss_distance: float | None = None  # from the loss curve of one process
    target_seconds: float | None = None  # time to --target; None: not reached by every repeat
    target_speedup: float | None = None  # over one process
    setup_seconds: float | None = None  # until the end of the first update
    options: str = ""  # of this strategy only
    repeats: int = 0

    @property
    def label(self) -> str:
        """The strategy with its options, without framework and precision."""
        return short_label(self.strategy, self.options, self.compression)


def report_text(
    head: str, rows: Sequence[MethodResult], files: Sequence[Path], unit: str = "images"
) -> str:
    """Return the report: the table, the meaning of its columns, and the unavailable methods."""
    shown = figures(rows, unit)
    parts = [message(head)]
    if shown.rows:
        meanings = [entry("  ", f"{name}: {text}") for name, text in shown.meanings]
        parts += [shown.body, "\n".join(meanings)]
    parts.append("\n".join(map(message, unavailable(rows))))
    parts.append(message("written: " + ", ".join(map(str, files))))
    return "\n\n".join(part for part in parts if part)


def make_rows(
    trials: Sequence[Trial],
    methods: Sequence[Method] | None = None,
    curves: Curves | None = None,
    target: Target | None = None,
) -> list[MethodResult]:
    """Return a row per method, in order.

    Args:
        trials: the runs, and the reasons of methods without a run.
        methods: the requested rows; None: all.
        curves: the training curves of the runs, if known.
        target: the metric value to report the time to, if any.
    """
    methods = methods or list(dict.fromkeys(trial.method for trial in trials))
    requested = max((trial.repeat for trial in trials), default=0)
    curves, rows = curves or {}, {}
    for method in methods:
        row = _row(method, [trial for trial in trials if trial.method == method], requested)
        repeats = [run for (run_method, _), run in curves.items() if run_method == method]
        seconds = None
        if target is not None and not row.reason:
            seconds = median_seconds(target, [evaluations(run, target.metric) for run in repeats])
        rows[method] = replace(row, target_seconds=seconds)
    _compare_with_baseline(rows, {key: loss_curve(run) for key, run in curves.items()})
    return list(rows.values())


def _compare_with_baseline(
    rows: dict[Method, MethodResult], losses: dict[tuple[Method, int], Curve]
) -> None:
    """Set the fields of each row that compare it with its baseline."""
    for method, row in rows.items():
        kind = method.framework, method.precision
        base = next((m for m in rows if m.is_baseline and (m.framework, m.precision) == kind), None)
        if base is None or not row.available:
            continue
        # A repeat may have failed, so they need not count from 1.
        distances = [
            distance(curve, losses.get((base, number), {}))
            for (curve_of, number), curve in losses.items()
            if curve_of == method
        ]
        rows[method] = replace(
            row,
            speedup=_ratio(row.images_per_second, rows[base].images_per_second),
            loss_distance=_median(distances),
            target_speedup=_ratio(rows[base].target_seconds, row.target_seconds),
        )


def _failure(trials: Sequence[Trial], requested: int) -> str | None:
    """Return which run of a method failed, of those ``requested``; None if none did."""
    complete = {trial.repeat for trial in trials if trial.summary}
    failures = [trial for trial in trials if trial.failed and trial.repeat not in complete]
    if not failures:
        return None
    last = failures[-1]
    return f"failed: run {last.repeat} of {requested}: {last.reason}"


def _row(method: Method, trials: Sequence[Trial], requested: int) -> MethodResult:
    """Return the results of a method's ``trials``; ``requested``: number of its repeats."""
    summaries = [trial.summary for trial in trials if trial.summary]
    precision = None if method.precision == AUTO else method.precision
    row = MethodResult(
        strategy=method.strategy,
        framework=method.framework,
        precision=precision,
        compression=method.compression,
        ranks=method.ranks,
        available=bool(summaries),
        options=method.options,
    )
    if not summaries:
        last = trials[-1] if trials else None
        reason = f"{'failed: ' * last.failed}{last.reason}" if last else "not run yet"
        return replace(row, reason=reason)

    def median(value: Callable[[Summary], float | None]) -> float | None:
        return _median(value(summary) for summary in summaries)

    first = summaries[0]
    rates = [float(summary.images_per_second_mean or 0) for summary in summaries]
    rate, samples = statistics.median(rates), first.training_samples
    seconds = samples / rate if samples else None
    return replace(
        row,
        reason=_failure(trials, requested),
        precision=first.precision or precision,
        ranks=first.world_size or method.ranks,
        images_per_second=rate,
        images_per_second_lowest=min(rates),
        images_per_second_highest=max(rates),
        epoch_seconds=seconds,
        peak_memory_bytes=max(summary.peak_memory_bytes or 0 for summary in summaries) or None,
        utilisation=median(lambda summary: summary.utilisation_mean),
        node_hours_per_epoch=seconds and seconds * (first.hosts or 1) / HOUR,
        bytes_per_step=sent_bytes(method, first),
        setup_seconds=median(lambda summary: summary.seconds_to_first_step),
        repeats=len(summaries),
    )


def _median(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return statistics.median(numbers) if numbers else None


def _ratio(numerator: float | None, denominator: float | None) -> float | None:
    return numerator / denominator if numerator and denominator else None


def read_all_curves(trials: Sequence[Trial], folder: Path) -> Curves:
    """Return the training curves of the runs by method and repeat, of readable files only."""
    read = {
        (trial.method, trial.repeat): curves_of(folder, trial) for trial in trials if trial.summary
    }
    return {key: curves for key, curves in read.items() if curves}


def evaluated(curves: Curves, target: Target) -> list[tuple[str, list[Evaluation]]]:
    """Return the evaluations of the first run of each method, with the method's name."""
    first: dict[Method, list[Evaluation]] = {}
    for (method, _), run in curves.items():
        first.setdefault(method, evaluations(run, target.metric))
    return [(full_label(method), curve) for method, curve in first.items()]


def loss_curve(curves: TrainingCurves) -> Curve:
    """Return the training loss by step."""
    losses = ((record["step"], record.get("loss")) for record in curves.steps)
    return {step: float(loss) for step, loss in losses if loss is not None}


def distance(a: Curve, b: Curve) -> float | None:
    """Return the largest difference of two loss curves at a common step; None without one."""
    return max((abs(a[step] - b[step]) for step in a.keys() & b.keys()), default=None)


def _epoch(seconds: float) -> str:
    """Return the time of an epoch as text; for ImageNet it may be a day."""
    return f"{seconds / HOUR:.1f} h" if seconds >= 2 * HOUR else duration(seconds)


TWO_DECIMALS, TWO_DIGITS = "{:.2f}".format, "{:.2g}".format
COLUMNS = (
    Column(
        "range",
        lambda row: (
            f"{number(row.images_per_second_lowest or 0)} ... "
            f"{number(row.images_per_second_highest or 0)}"
        ),
        help="lowest ... highest throughput of the repeats, whose median precedes it",
    ),
    Column("speed-up", "speedup", TWO_DECIMALS, "over one process of this framework and precision"),
    Column("epoch", "epoch_seconds", _epoch, "training on all samples once, without evaluation"),
    Column("memory", "peak_memory_bytes", size, "maximum over ranks: of the GPU, or resident"),
    Column(
        "busy",
        "utilisation",
        percent,
        "of the GPU, or of the cores of a rank (polling counts); mean over ranks",
    ),
    Column("node-h", "node_hours_per_epoch", TWO_DIGITS, "node-hours per epoch"),
    Column("sent", "bytes_per_step", size, "by a rank per step, theoretical value for gradients"),
    Column(
        "loss", "loss_distance", TWO_DIGITS, "largest difference of the training loss from single"
    ),
    Column("to target", "target_seconds", duration, "from the first update, with evaluations"),
    Column("by target", "target_speedup", TWO_DECIMALS, "speed-up in the time to the target"),
    Column("set-up", "setup_seconds", duration, "from the start of a rank to its first step"),
)


def figures(rows: Sequence[MethodResult], unit: str = "images") -> Table:
    """Return the table of the available rows, without empty columns.

    Args:
        rows: available and unavailable rows.
        unit: unit of the samples, in the plural.
    """
    available = [row for row in rows if row.available]
    kinds = [kind for kind in KINDS if len({getattr(row, kind) for row in available}) > 1]
    columns = [
        Column("strategy", "label"),
        *(Column(kind, kind) for kind in kinds),
        Column("ranks", "ranks"),
        Column(f"{unit}/s", "images_per_second", number),
        *COLUMNS[0 if any(row.repeats > 1 for row in available) else 1 :],
    ]
    return tabulate(columns, available, names=1 + len(kinds), known=True)


def unavailable(rows: Sequence[MethodResult]) -> list[str]:
    """Return a line per row that is unavailable or has a failed run."""
    lines = []
    for row in rows:
        if row.reason:
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
