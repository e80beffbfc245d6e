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
from hvdtrain.commands.compare.methods import AUTO, Method, in_words, sent_bytes
from hvdtrain.commands.compare.trials import Trial, run_stem, said
from hvdtrain.commands.runs.course import Course, read_course
from hvdtrain.commands.runs.start import COURSE, file_of
from hvdtrain.commands.runs.target import Evaluation, Target, evaluations, seconds_to
from hvdtrain.steps.summary import Summary
from hvdtrain.system.output.tables import Table, known
from hvdtrain.system.output.text import duration, number, percent, plural, size

KINDS = ("framework", "precision")  # of a row, besides its strategy
HOUR = 3600.0  # seconds
Curve = dict[int, float]  # the training loss by step


@dataclass(frozen=True)
class Row:
    """A method's figures, as ``--json`` gives them; None: not known.

    Throughput and seconds are medians over the repeats, memory is the largest.
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
    peak_memory_bytes: int | None = None  # of the rank that took most
    utilisation: float | None = None  # of the cores, a fraction; over the ranks
    node_hours_per_epoch: float | None = None
    price_per_epoch: float | None = None
    bytes_per_step: int | None = None  # that a rank sends, by theory
    loss_distance: float | None = None  # from the loss curve of one process
    target_seconds: float | None = None  # until --target was reached; None: not in each repeat
    target_speedup: float | None = None  # over one process
    setup_seconds: float | None = None  # until the first update was done
    largest_batch: int | None = None  # per rank, that fits
    largest_batch_predicted: bool | None = None  # by a line from small batches
    bubble: float | None = None  # share of a step in which stages of a pipeline wait
    bubble_formula: float | None = None  # as it would be with stages that cost the same
    options: str = ""  # of this strategy alone
    repeats: int = 0

    @property
    def label(self) -> str:
        """Return what a person calls it among others of its framework and precision."""
        own = (self.compression, self.ranks, self.options)
        return Method(self.strategy, self.framework, AUTO, *own).label


def make_rows(
    trials: Sequence[Trial],
    methods: Sequence[Method] | None = None,
    folder: Path | None = None,
    price: float | None = None,
    target: Target | None = None,
) -> list[Row]:
    """Return a row per method, in order.

    Args:
        trials: the runs, and the reasons of those that cannot run.
        methods: the rows that are asked for; None: all that there are.
        folder: of the comparison, where the loss curves are; None: they are not known.
        price: of an hour of a node.
        target: how good an evaluation has to be, where the time until then counts.
    """
    methods = methods or list(dict.fromkeys(trial.method for trial in trials))
    by_method = {one: [trial for trial in trials if trial.method == one] for one in methods}
    courses = read_courses(trials, folder) if folder is not None else {}
    curves = {key: loss_curve(course) for key, course in courses.items()}
    rows = {method: _row(method, some, price) for method, some in by_method.items()}
    if target is not None:
        for method, row in rows.items():
            mine = [course for (other, _), course in courses.items() if other == method]
            rows[method] = replace(row, target_seconds=target_seconds(target, mine))
    _set_beside_baseline(rows, curves)
    for found in read_largest(folder) if folder is not None else ():
        if found.method in rows:
            rows[found.method] = replace(
                rows[found.method],
                largest_batch=found.batch,
                largest_batch_predicted=found.predicted,
            )
    return list(rows.values())


def _set_beside_baseline(rows: dict[Method, Row], curves: dict[tuple[Method, int], Curve]) -> None:
    """Fill in what one process of the same framework and precision makes of each row."""
    for method, row in rows.items():
        base = next((one for one in rows if one.is_baseline and one.shares_baseline(method)), None)
        if base is None or not row.available:
            continue
        distances = [
            distance(curves.get((method, number), {}), curves.get((base, number), {}))
            for number in range(1, row.repeats + 1)
        ]
        rows[method] = replace(
            row,
            speedup=_ratio(row.images_per_second, rows[base].images_per_second),
            loss_distance=_median(distances),
            target_speedup=_ratio(rows[base].target_seconds, row.target_seconds),
        )


def _row(method: Method, trials: Sequence[Trial], price: float | None) -> Row:
    done = [trial.summary for trial in trials if trial.summary]
    asked = None if method.precision == AUTO else method.precision
    row = Row(
        *(method.strategy, method.framework, asked, method.compression, method.ranks),
        available=bool(done),
        options=method.options,
    )
    if not done:
        reason = said(trials[-1]).removeprefix("not available: ") if trials else "not run yet"
        return replace(row, reason=reason)

    def median(of: Callable[[Summary], float | None]) -> float | None:
        return _median(of(summary) for summary in done)

    rates = [float(one.images_per_second_mean or 0) for one in done]
    rate, samples = statistics.median(rates), done[0].training_samples
    seconds = samples / rate if samples else None
    hours = seconds * (done[0].hosts or 1) / HOUR if seconds else None
    return replace(
        row,
        precision=done[0].precision or asked,
        ranks=done[0].world_size or method.ranks,
        images_per_second=rate,
        images_per_second_lowest=min(rates),
        images_per_second_highest=max(rates),
        epoch_seconds=seconds,
        peak_memory_bytes=max(one.peak_memory_bytes or 0 for one in done) or None,
        utilisation=median(lambda one: one.utilisation_mean),
        node_hours_per_epoch=hours,
        price_per_epoch=hours * price if hours and price is not None else None,
        bytes_per_step=sent_bytes(method, done[0]),
        setup_seconds=median(lambda one: one.seconds_to_first_step),
        bubble=median(lambda one: one.bubble.measured if one.bubble else None),
        bubble_formula=median(lambda one: one.bubble.formula if one.bubble else None),
        repeats=len(done),
    )


def _median(values: Iterable[float | None]) -> float | None:
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _ratio(one: float | None, other: float | None) -> float | None:
    return one / other if one and other else None


def read_courses(trials: Sequence[Trial], folder: Path) -> dict[tuple[Method, int], Course]:
    """Return the courses of the runs by method and repeat, as far as their files are there."""
    found = {}
    for trial in trials:
        stem = run_stem(folder, trial.method, trial.repeat)
        with contextlib.suppress(OSError, ValueError):
            if trial.summary and (course := read_course(file_of(stem, COURSE))):
                found[trial.method, trial.repeat] = course
    return found


def evaluated(
    trials: Sequence[Trial], folder: Path, target: Target
) -> list[tuple[str, list[Evaluation]]]:
    """Return the evaluations of the first run of each method, after the method's name."""
    first: dict[Method, list[Evaluation]] = {}
    for (method, _), course in read_courses(trials, folder).items():
        first.setdefault(method, evaluations(course, target.metric))
    return [(in_words(method), found) for method, found in first.items()]


def loss_curve(course: Course) -> Curve:
    """Return the training loss by step."""
    return {one["step"]: float(one["loss"]) for one in course.steps if one.get("loss") is not None}


def target_seconds(target: Target, courses: Sequence[Course]) -> float | None:
    """Return the median of the seconds until the target; None unless each run reached it."""
    times = [seconds_to(target, evaluations(course, target.metric)) for course in courses]
    return None if None in times else _median(times)


def distance(one: Curve, other: Curve) -> float | None:
    """Return the largest difference of two loss curves at a step of both; None without one."""
    return max((abs(one[step] - other[step]) for step in one.keys() & other.keys()), default=None)


def csv_text(rows: Sequence[Row]) -> str:
    """Return the rows as CSV, with the names of the JSON."""
    out = io.StringIO()
    writer = csv.DictWriter(out, [field.name for field in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return out.getvalue()


def figures(rows: Sequence[Row], unit: str = "images") -> Table:
    """Return the rows that have figures, without the columns that none of them knows.

    Args:
        rows: with and without figures.
        unit: what the samples are, in the plural.
    """
    some = [row for row in rows if row.available]

    def cells(of: Callable[[Row], Any], show: Callable[[Any], str]) -> list[str]:
        return ["-" if of(row) is None else show(of(row)) for row in some]

    told = [key for key in KINDS if len({getattr(row, key) for row in some}) > 1]
    several = any(row.repeats > 1 for row in some)
    spread = [(row.images_per_second_lowest, row.images_per_second_highest) for row in some]
    columns = {
        "strategy": [row.label for row in some],
        "framework": [row.framework if "framework" in told else "-" for row in some],
        "precision": cells(lambda row: row.precision if "precision" in told else None, str),
        "ranks": [str(row.ranks) for row in some],
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
            for row in some
        ],
        "to target": cells(lambda row: row.target_seconds, duration),
        "by target": cells(lambda row: row.target_speedup, "{:.2f}".format),
        "set-up": cells(lambda row: row.setup_seconds, duration),
        "bubble": cells(lambda row: row.bubble, percent),
        "by formula": cells(lambda row: row.bubble_formula, percent),
    }
    return known(columns)


def _epoch(seconds: float) -> str:
    """Return the time of an epoch: of ImageNet it may be a day."""
    return f"{seconds / HOUR:.1f} h" if seconds >= 2 * HOUR else duration(seconds)


NOTES = {
    "range": "lowest ... highest of the repeats; beside it is their median",
    "speed-up": "over one process of the same framework and precision",
    "epoch": "training on all samples once, without evaluation",
    "memory": "the most of any rank: of its GPU, else resident, libraries included",
    "busy": "of the cores of a rank, mean over ranks; polling in a wait counts as busy",
    "node-h": "node-hours of an epoch",
    "price": "of an epoch, at --price-per-hour for a node",
    "sent": "by a rank in a step, as theory has it for the gradients that were counted",
    "loss": "largest distance of the training loss from that of one process",
    "largest": "batch per rank that fits; ~: predicted from small ones and the host's memory",
    "to target": "seconds to --target, from the first update on, evaluations included",
    "by target": "speed-up over one process by that time",
    "set-up": "from the start of a rank to the end of its first step",
    "bubble": "share of a step in which the stages of a pipeline wait for one another",
    "by formula": "that share with stages that cost the same, and nothing else to wait for",
}


def notes(header: Sequence[str]) -> list[tuple[str, str]]:
    """Return what the columns of a table mean."""
    return [(name, text) for name, text in NOTES.items() if name in header]


def unavailable(rows: Sequence[Row]) -> list[str]:
    """Return a line per row that has no figures."""
    lines = []
    for row in rows:
        if not row.available:
            kind = ", ".join(part for part in (row.framework, row.precision) if part)
            reason = str(row.reason)
            what = reason if reason.startswith("failed") else f"not available: {reason}"
            lines.append(f"{row.label} ({kind}): {what}")
    return lines


def headline(trials: Sequence[Trial]) -> str:
    """Return what was compared, with what is the same in all rows."""
    done = [(trial, trial.summary) for trial in trials if trial.summary]
    if not done:
        return "nothing could be measured"
    trial, first = done[0]
    same = [
        getattr(first, key)
        for key in KINDS
        if len({getattr(summary, key) for _, summary in done}) == 1
    ]
    parts = [
        " ".join(word for word in dict.fromkeys((first.workload, first.model, *same)) if word),
        f"global batch {trial.batch} in every row",
        plural(trial.threads, "thread") + " per rank" if trial.threads else "",
        trial.machine,
    ]
    return ", ".join(part for part in parts if part)
