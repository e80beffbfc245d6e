"""Facts and verdict as text, their tables, or two timelines side by side (``--diff``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.commands.timeline.events import KINDS, OPERATION, STATES, TimeStatistics
from hvdtrain.commands.timeline.facts import TimelineFacts, TimelineFinding
from hvdtrain.system.output.tables import Table, entry, message, paragraph
from hvdtrain.system.output.text import duration, percent, plural, printable, short, size

RANKS = 12
TENSORS = 10
LABELS = {
    "communicating": "communicating",
    "waiting": "waiting for a rank",
    "neither": "neither: computing, data ...",
}
LATE = ("by median", "mean", "cost")  # columns that belong to the preceding one
UNSEEN = (
    "Limits: the file is written by rank 0 and records Horovod's work there. Computing, data "
    "loading and the other ranks' work are not in it, only the time at which each rank submitted a "
    "tensor, to within a cycle. Communication counts as hidden while some rank still had a tensor "
    "of the step to submit."
)


@dataclass(frozen=True)
class Change:
    """The time of a phase or state in two timelines, in seconds; ``ratio``: after / before."""

    phase: str
    name: str
    before: float | None
    after: float | None
    ratio: float | None


@dataclass(frozen=True)
class Difference:
    """Two timelines side by side; ``per_step``: times are per step, not of the whole file."""

    per_step: bool
    before: str  # path
    after: str
    rows: list[Change]


def text(facts: TimelineFacts) -> str:
    """Return the whole report."""
    first, *others = head(facts)
    lines = [f"{printable(facts.file.path)}: {first}", *others]
    parts = ["\n".join(message(line, "  ") for line in lines), _verdict(facts.verdict)]
    if facts.phases:
        parts += [
            states(facts).text,
            _lateness(facts),
            _slowest(facts),
            phases(facts).text,
            message("Collectives, in tensors: " + "; ".join(_collectives(facts)), "  "),
            operations(facts).text if facts.operations else "",
            paragraph(cycles(facts), "  " if facts.cycles else ""),
            tensors(facts).text if facts.tensors else "",
            paragraph(UNSEEN),
        ]
    return "\n\n".join(part for part in parts if part)


def head(facts: TimelineFacts) -> list[str]:
    """Return lines on the size of the file, its steps and its damage."""
    file, steps = facts.file, facts.steps
    when = f", from {file.recorded_at}" if file.recorded_at else ""
    lines = [
        f"{size(file.bytes)}, {file.events:,} events, {_ranks(facts)}, "
        f"{duration(facts.seconds)}{when}"
    ]
    if file.slice:
        low, high = file.slice
        end = "the end" if high is None else f"{high:g} s"
        lines.append(f"slice: between {low:g} s after the first event and {end}")
    if steps:
        lines.append(
            f"{steps.seen:,} steps, {steps.whole:,} of them whole: "
            f"{duration(steps.seconds.median)} in the median, "
            f"{duration(steps.seconds.mean)} in the mean"
        )
    if file.cut:
        lines.append("the file ends in the middle of an event: read up to there")
    if file.skipped_bytes:
        lines.append(f"{file.skipped_bytes:,} bytes in it are not events: ignored")
    if file.unfamiliar:
        kinds = ", ".join(f"{n:,} {short(k, 20)}" for k, n in sorted(file.unfamiliar.items()))
        lines.append(f"unknown events, ignored: {kinds}")
    return lines


def _ranks(facts: TimelineFacts) -> str:
    """Return the number of ranks, in words."""
    if not facts.ranks:
        return "unknown ranks"
    # Only the end of a negotiation proves that these are all ranks.
    seen = "" if facts.lateness.negotiations else " seen"
    return plural(facts.ranks, "rank") + seen


def _verdict(findings: Sequence[TimelineFinding]) -> str:
    lines = []
    for number, finding in enumerate(findings):
        head = "Verdict: " if number == 0 else "Also:    "
        lines += [entry(head, finding.text), entry(" " * len(head), "-> " + finding.advice)]
    return "\n".join(lines)


def states(facts: TimelineFacts) -> Table:
    """Return the time of rank 0 by state, in the whole steps if there are any."""
    steps = facts.steps
    if not steps:
        rows = [[label, duration(facts.states[name])] for name, label in LABELS.items()]
        return Table("Time, seen from rank 0", ["", "total"], rows)
    rows = []
    for name, label in LABELS.items():
        state = steps.states[name]
        times = [duration(state.median), duration(state.total), percent(state.share)]
        rows.append([label, *times])
    overlap = steps.overlap
    if overlap.overlapped_share is not None:
        share = percent(overlap.overlapped_share) + " of it"
        hidden = ["  hidden by computing", "", duration(overlap.overlapped_seconds), share]
        rows.insert(1, hidden)
    title = f"Time of the {steps.whole:,} whole steps, seen from rank 0"
    return Table(title, ["", "median step", "total", "share"], rows)


def _lateness(facts: TimelineFacts) -> str:
    if not facts.lateness.negotiations or facts.ranks == 1:
        return ""
    if facts.lateness.recorded:
        return lateness(facts, RANKS).text
    few = ", the first ones" if facts.lateness.with_ticks else ""
    return paragraph(
        f"{_ticked(facts)}{few}: Horovod does not record it while its response cache is on "
        "(HOROVOD_CACHE_CAPACITY=0: off)"
    )


def _ticked(facts: TimelineFacts) -> str:
    negotiated, ticked = facts.lateness.negotiations, facts.lateness.with_ticks
    return f"Lateness: {ticked:,} of {negotiated:,} negotiations record when each rank was ready"


def lateness(facts: TimelineFacts, most: int | None = None) -> Table:
    """Return how late the ranks were, the most expensive first, ``most`` of them."""
    order = sorted(facts.lateness.ranks, key=lambda r: (-r.cost_seconds, -r.late_negotiations))
    rows = [
        [
            f"rank {row.rank}",
            *_late(row.late_steps, row.late_in_step_seconds),
            duration(row.cost_seconds) if row.late_steps else "-",
            *_late(row.late_negotiations, row.late_in_negotiation_seconds),
            duration(row.behind_first_seconds),
        ]
        for row in order[:most]
    ]
    header = ["last in", "steps", "by median", "mean", "cost", "tensors", "by median", "mean"]
    others = len(order) - len(rows)
    return Table(
        _ticked(facts),
        [*header, "behind first"],
        rows,
        joined=LATE,
        note=f"and {others} more ranks that cost less" if others else "",
    )


def _late(count: int, times: TimeStatistics) -> list[str]:
    seconds = [duration(value) if count else "-" for value in (times.median, times.mean)]
    return [f"{count:,}" if count else "-", *seconds]


def slowest(facts: TimelineFacts) -> list[tuple[int, str]]:
    """Return number, duration and late rank of the slowest steps."""
    steps = []
    for step in facts.steps.slowest if facts.steps else ():
        late = f", rank {step.late_rank} late by {duration(step.late_seconds)}"
        late = "" if step.late_rank is None else late
        steps.append((step.step, duration(step.seconds) + late))
    return steps


def _slowest(facts: TimelineFacts) -> str:
    steps = ", ".join(f"{number:,} ({text})" for number, text in slowest(facts))
    return paragraph(f"Slowest steps: {steps}", "  ") if steps else ""


def phases(facts: TimelineFacts) -> Table:
    """Return the time by phase."""
    rows = []
    for row in facts.phases:
        kind = row.kind if row.kind != OPERATION else "operation, whole"
        times = [duration(row.seconds), duration(row.tensor_seconds)]
        per_step = [_seconds(row.seconds_per_step)] if facts.steps else []
        rows.append([kind, short(row.name), f"{row.bars:,}", *times, *per_step])
    header = ["", "", "bars", "time", "summed over tensors"]
    header += ["time per step"] if facts.steps else []
    return Table("Phases, whole file", header, rows, names=2)


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _collectives(facts: TimelineFacts) -> list[str]:
    return [
        f"{short(row.name)} {row.negotiated:,} negotiated, {row.carried_out:,} carried out"
        for row in facts.collectives
    ]


def operations(facts: TimelineFacts) -> Table:
    """Return the operations that were carried out, by implementation."""
    rows = [
        [
            short(row.name),
            f"{row.count:,}",
            f"{row.tensors_mean:.1f}",
            size(row.bytes_mean) if row.bytes else "-",
            duration(row.seconds_median),
            duration(row.seconds),
            f"{size(row.bytes / row.seconds)}/s" if row.bytes and row.seconds else "-",
        ]
        for row in facts.operations
    ]
    header = ["", "operations", "tensors each", "bytes each", "median", "total", "bytes/time"]
    return Table("Fusion: operations carried out", header, rows)


def cycles(facts: TimelineFacts) -> str:
    """Return a sentence on Horovod's cycles."""
    cycles = facts.cycles
    if not cycles:
        return (
            "Cycles: not marked in this file, so the share of the cycle time is unknown "
            "(HOROVOD_TIMELINE_MARK_CYCLES=1 marks them)"
        )
    line = (
        f"Cycles: {cycles.count:,}, the shortest "
        f"{duration(cycles.configured_estimate_seconds)} (about HOROVOD_CYCLE_TIME), "
        f"the median {duration(cycles.median_seconds)}, "
        f"the longest {duration(cycles.longest_seconds)}"
    )
    if cycles.with_work:
        line += (
            f"; {cycles.with_work:,} began operations, "
            f"{cycles.operations_per_cycle:.1f} each, on {cycles.tensors_per_cycle:.1f} "
            f"tensors of {size(cycles.bytes_per_cycle or 0)} in total"
        )
    return line


def tensors(facts: TimelineFacts, most: int = TENSORS) -> Table:
    """Return the ``most`` tensors that took the most time."""
    shown = facts.tensors[:most]
    used = {kind for row in shown for kind, seconds in row.phases.items() if seconds}
    kinds = [kind for kind in KINDS if kind in used - {OPERATION}]
    rows = []
    for row in shown:
        times = [_seconds(row.phases.get(kind) or None) for kind in kinds]
        nbytes = size(row.bytes) if row.bytes else "-"
        rows.append([short(row.name), f"{row.times:,}", nbytes, *times])
    title = f"Tensors that took the most time ({len(rows)} of {facts.tensor_rows:,})"
    return Table(title, ["", "times", "bytes", *kinds], rows)


def compare(first: TimelineFacts, second: TimelineFacts) -> Difference:
    """Return the times of two timelines.

    They are per step, so that recordings of different lengths are comparable: the median for a
    step and its states, the mean for single phases. If either has no whole steps, times are those
    of the whole file.
    """
    per_step = bool(first.steps and second.steps)
    columns = [_times(facts, per_step=per_step) for facts in (first, second)]
    keys = list(dict.fromkeys([*columns[0], *columns[1]]))
    order = {kind: index for index, kind in enumerate(KINDS)}
    keys.sort(key=lambda key: order.get(key[0], -1))
    rows = []
    for phase, name in keys:
        before, after = (column.get((phase, name)) for column in columns)
        ratio = after / before if before and after is not None else None
        rows.append(Change(phase, name, before, after, ratio))
    return Difference(per_step, first.file.path, second.file.path, rows)


def _times(facts: TimelineFacts, *, per_step: bool) -> dict[tuple[str, str], float]:
    """Return seconds by phase and name, per step or of the whole file."""
    times: dict[tuple[str, str], float] = {}
    steps = facts.steps
    if per_step and steps:
        times["step", ""] = steps.seconds.median
        times |= {("step", name): steps.states[name].median for name in reversed(STATES)}
        if facts.lateness.recorded:
            times["step", "lateness"] = facts.lateness.cost_seconds / steps.whole
    else:
        times["file", ""] = facts.seconds
        times |= {("file", name): facts.states[name] for name in reversed(STATES)}
    for row in facts.phases:
        seconds = row.seconds_per_step if per_step else row.seconds
        if seconds is not None:  # None: the phase is in no step
            times[row.kind, row.name] = seconds
    return times


def comparison(difference: Difference) -> str:
    """Return the comparison as a table."""
    rows = [
        [
            row.phase,
            short(row.name),
            _seconds(row.before),
            _seconds(row.after),
            "-" if row.ratio is None else f"{row.ratio:.2f}",
        ]
        for row in difference.rows
    ]
    scope = "per step" if difference.per_step else "of the whole file"
    times = Table(f"Times {scope}", ["", "", "before", "after", "after/before"], rows, names=2)
    files = f"before: {printable(difference.before)}\nafter: {printable(difference.after)}"
    return f"{files}\n\n{times.text}"
