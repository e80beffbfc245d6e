"""The result of an analysis as plain data, for ``--json`` and the reports.

All times are seconds. ``events`` and ``steps`` define the numbers.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf

from hvdtrain.commands.timeline.analyse import Analysis
from hvdtrain.commands.timeline.events import (
    KINDS,
    MICRO,
    NEGOTIATE,
    OPERATION,
    STATES,
    Phase,
    Tensor,
)
from hvdtrain.commands.timeline.read import Reading
from hvdtrain.commands.timeline.steps import LatenessFacts, StepFacts

TENSORS = 200  # rows of the table of tensors, and of that of open tensors


@dataclass(frozen=True)
class FileFacts:
    """The file: its size, and what is damaged, unknown or open in it."""

    path: str
    bytes: int
    events: int
    recorded_at: str | None  # UTC
    first: float  # time of the first event on the clock of the file, microseconds
    begin: float  # of the slice, after the first event
    cut: bool
    closed: bool
    skipped_bytes: int
    unfamiliar: dict[str, int]  # events by kind
    headless_events: int
    bars_begin: bool
    open_bars: int
    open_tensors: int
    slice: tuple[float, float | None] | None


@dataclass(frozen=True)
class OpenTensor:
    """A tensor that is open at the end of the file.

    ``since`` counts from the first event. ``ready`` and ``missing`` are the ranks that have
    submitted the tensor and those that have not, of the ranks anywhere in the file; both are None
    if unknown: the negotiation has ended, or Horovod's response cache was on.
    """

    tensor: str
    phase: str
    kind: str
    since: float
    seconds: float
    ready: list[int] | None
    missing: list[int] | None


@dataclass(frozen=True)
class PhaseFacts:
    """All bars of one name."""

    kind: str
    name: str
    bars: int
    seconds: float
    seconds_per_step: float | None  # mean per whole step; None: it is in none of them
    tensor_seconds: float


@dataclass(frozen=True)
class CollectiveFacts:
    """Number of tensors of one kind of collective."""

    name: str
    negotiated: int
    carried_out: int


@dataclass(frozen=True)
class OperationFacts:
    """All operations of one implementation."""

    name: str
    count: int
    tensors: int
    tensors_mean: float
    bytes: int
    bytes_mean: float
    bytes_median: float
    seconds: float
    seconds_median: float
    small_seconds: float


@dataclass(frozen=True)
class CycleFacts:
    """Horovod's cycles."""

    count: int
    configured_estimate_seconds: float
    median_seconds: float
    longest_seconds: float
    with_work: int
    operations_per_cycle: float | None
    tensors_per_cycle: float | None
    bytes_per_cycle: float | None


@dataclass(frozen=True)
class TensorFacts:
    """A tensor's times in negotiation and operation together, and by phase."""

    name: str
    times: int
    bytes: int
    seconds: float
    phases: dict[str, float]


@dataclass(frozen=True)
class TimelineFinding:
    """One cause of lost time; ``kind`` is a key of ``verdict.HEADS``."""

    kind: str
    seconds: float
    share: float  # of the time of the whole steps
    text: str
    advice: str


@dataclass(frozen=True)
class TimelineFacts:
    """Everything that is known of a timeline."""

    file: FileFacts
    seconds: float
    ranks: int | None
    states: dict[str, float]
    steps: StepFacts | None
    lateness: LatenessFacts
    open: list[OpenTensor]
    phases: list[PhaseFacts]
    collectives: list[CollectiveFacts]
    operations: list[OperationFacts]
    cycles: CycleFacts | None
    tensor_rows: int
    tensors: list[TensorFacts]
    verdict: Sequence[TimelineFinding] = ()


def make_facts(
    reading: Reading, analysis: Analysis, window: tuple[float, float] | None = None
) -> TimelineFacts:
    """Return the facts of the file, within ``window`` (seconds), without the verdict."""
    open_tensors = [tensor for tensor in analysis.tensors.values() if tensor.bars]
    phases, origin = _phases(analysis), reading.first or 0
    negotiations = sum(row.bars for row in phases if row.kind == NEGOTIATE)
    return TimelineFacts(
        file=FileFacts(
            path=str(reading.path),
            bytes=reading.size,
            events=analysis.events,
            recorded_at=_moment(reading),
            first=origin,
            begin=((analysis.first or 0) - origin) * MICRO,
            cut=reading.cut,
            closed=reading.closed,
            skipped_bytes=reading.skipped,
            unfamiliar=dict(analysis.unfamiliar),
            headless_events=analysis.headless,
            bars_begin=bool(analysis.rows.phases),
            open_bars=sum(len(tensor.bars) for tensor in open_tensors),
            open_tensors=len(open_tensors),
            slice=window and (window[0], None if window[1] == inf else window[1]),
        ),
        seconds=sum(analysis.times) * MICRO,
        ranks=len(analysis.ranks) or None,
        states=dict(zip(STATES, (t * MICRO for t in analysis.times), strict=True)),
        steps=analysis.steps.facts(origin),
        lateness=analysis.steps.lateness_facts(negotiations),
        open=_open(open_tensors, analysis, origin),
        phases=phases,
        collectives=_collectives(phases),
        operations=_operations(analysis),
        cycles=_cycles(analysis),
        tensor_rows=len(analysis.rows.by_name),
        tensors=_tensors(analysis),
    )


def _moment(reading: Reading) -> str | None:
    """Return when the first event was, in UTC."""
    if reading.epoch is None or reading.first is None:
        return None
    moment = datetime.fromtimestamp((reading.epoch + reading.first) * MICRO, UTC)
    return moment.isoformat(timespec="milliseconds")


def _phases(analysis: Analysis) -> list[PhaseFacts]:
    counts: Counter[Phase] = Counter()
    totals: defaultdict[Phase, float] = defaultdict(float)
    for row in analysis.rows.by_name.values():
        for cell in row.cells.values():
            counts[cell.phase] += cell.count
            totals[cell.phase] += cell.total
    steps, in_steps = analysis.steps.lengths.count, analysis.steps.step_totals.walls

    def per_step(phase: Phase) -> float | None:
        wall = in_steps.get(phase, 0)
        return wall / steps * MICRO if steps and (wall or not phase.wall) else None

    facts = [
        PhaseFacts(
            kind=phase.kind,
            name=phase.name,
            bars=counts[phase],
            seconds=phase.wall * MICRO,
            seconds_per_step=per_step(phase),
            tensor_seconds=totals[phase] * MICRO,
        )
        for phase in analysis.rows.phases.values()
        if counts[phase]
    ]
    return sorted(facts, key=lambda facts: (KINDS.index(facts.kind), -facts.seconds))


def _collectives(phases: Sequence[PhaseFacts]) -> list[CollectiveFacts]:
    """Count the tensors negotiated and carried out, per kind of collective."""
    negotiated: Counter[str] = Counter()
    executed: Counter[str] = Counter()
    for row in phases:
        if row.kind == NEGOTIATE:
            negotiated[row.name.removeprefix("NEGOTIATE_")] += row.bars
        elif row.kind == OPERATION:
            executed[row.name] += row.bars
    names = sorted({*negotiated, *executed})
    return [CollectiveFacts(name, negotiated[name], executed[name]) for name in names]


def _operations(analysis: Analysis) -> list[OperationFacts]:
    return [
        OperationFacts(
            name=name,
            count=operations.tensors.count,
            tensors=int(operations.tensors.total),
            tensors_mean=operations.tensors.mean,
            bytes=int(operations.nbytes.total),
            bytes_mean=operations.nbytes.mean,
            bytes_median=operations.nbytes.median,
            seconds=operations.microseconds.total * MICRO,
            seconds_median=operations.microseconds.median * MICRO,
            small_seconds=operations.small * MICRO,
        )
        for name, operations in sorted(analysis.fusion.operations.items())
    ]


def _cycles(analysis: Analysis) -> CycleFacts | None:
    """Return Horovod's cycles; None if they are not marked in the file."""
    cycles, busy = analysis.cycles, analysis.fusion.busy_cycles
    if not cycles.count:
        return None
    operations = analysis.fusion.operations.values()
    return CycleFacts(
        count=cycles.count,
        # No cycle is shorter than HOROVOD_CYCLE_TIME: idle cycles take as long, busy ones longer.
        configured_estimate_seconds=cycles.quantile(0.01) * MICRO,
        median_seconds=cycles.median * MICRO,
        longest_seconds=cycles.maximum * MICRO,
        with_work=busy,
        operations_per_cycle=sum(o.tensors.count for o in operations) / busy if busy else None,
        tensors_per_cycle=sum(o.tensors.total for o in operations) / busy if busy else None,
        bytes_per_cycle=sum(o.nbytes.total for o in operations) / busy if busy else None,
    )


def _tensors(analysis: Analysis) -> list[TensorFacts]:
    """Return the tensors that took the most time."""
    rows = []
    for row in analysis.rows.by_name.values():
        outer = [c for c in row.cells.values() if c.phase.kind in (NEGOTIATE, OPERATION)]
        times = max((cell.count for cell in outer), default=0)
        if times:
            phases: dict[str, float] = {}
            for cell in row.cells.values():
                kind = cell.phase.kind
                phases[kind] = phases.get(kind, 0.0) + cell.total * MICRO
            seconds = sum(cell.total * MICRO for cell in outer)
            rows.append(TensorFacts(row.name, times, row.nbytes, seconds, phases))
    return sorted(rows, key=lambda row: row.seconds, reverse=True)[:TENSORS]


def _open(tensors: Sequence[Tensor], analysis: Analysis, origin: float) -> list[OpenTensor]:
    """Return a row per open tensor, the longest open first."""
    seen = {int(rank) for rank in analysis.ranks}
    rows = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.bars[-1][1])[:TENSORS]:
        cell, since = tensor.bars[-1]
        phase = cell.phase
        ready = {int(rank) for _, rank in tensor.ticks} if phase.kind == NEGOTIATE else set()
        row = OpenTensor(
            tensor=tensor.row.name,
            phase=phase.name,
            kind=phase.kind,
            since=(since - origin) * MICRO,
            seconds=(analysis.last - since) * MICRO,
            ready=sorted(ready) if ready else None,
            missing=sorted(seen - ready) if ready else None,
        )
        rows.append(row)
    return rows
