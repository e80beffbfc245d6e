"""The result of an analysis as plain data, for ``--json`` and the reports.

All times are seconds. ``events`` and ``steps`` define the numbers.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import inf
from pathlib import Path

from hvdtrain.commands.timeline.analyse import Analysis, Recorder
from hvdtrain.commands.timeline.events import (
    BYTES,
    COMMUNICATING,
    COUNT,
    KINDS,
    NEGOTIATE,
    OPERATION,
    SMALL_TIME,
    STATES,
    TIME,
    Cell,
    Facts,
    Phase,
    Tensor,
)
from hvdtrain.commands.timeline.read import Reading, timeline
from hvdtrain.commands.timeline.steps import Steps
from hvdtrain.commands.timeline.streaming_stats import Sample
from hvdtrain.commands.timeline.verdict import verdict
from hvdtrain.errors import UsageError

log = logging.getLogger(__name__)

MICRO = 1e-6
TENSORS = 200  # rows of the table of tensors, and of that of open tensors
PROGRESS_INTERVAL = 5.0  # seconds between two progress messages


def facts(reading: Reading, analysis: Analysis, window: tuple[float, float] | None = None) -> Facts:
    """Return the facts of the file, within ``window`` (seconds)."""
    low, high = window or (0.0, inf)
    open_tensors = [tensor for tensor in analysis.tensors.values() if tensor.bars]
    origin = reading.first or 0
    return {
        "file": {
            "path": str(reading.path),
            "bytes": reading.size,
            "events": analysis.events,
            "recorded_at": _moment(reading),
            "first": origin,
            "begin": ((analysis.first or 0) - origin) * MICRO,
            "cut": reading.cut,
            "closed": reading.closed,
            "skipped_bytes": reading.skipped,
            "files": max(1, reading.files),
            "unfamiliar": dict(analysis.unfamiliar),
            "headless_events": analysis.headless,
            "bars_begin": bool(analysis.rows.phases),
            "open_bars": sum(len(tensor.bars) for tensor in open_tensors),
            "open_tensors": len(open_tensors),
            "slice": [low, None if high == inf else high] if window else None,
        },
        "seconds": sum(analysis.times) * MICRO,
        "ranks": len(analysis.ranks) or None,
        "states": dict(zip(STATES, (t * MICRO for t in analysis.times), strict=True)),
        "steps": _steps(analysis, origin),
        "lateness": _lateness(analysis),
        "open": _open(open_tensors, analysis, origin),
        "phases": _phases(analysis),
        "collectives": _collectives(analysis),
        "operations": _operations(analysis),
        "cycles": _cycles(analysis),
        "tensor_rows": len(analysis.rows.by_name),
        "tensors": _tensors(analysis),
    }


def _moment(reading: Reading) -> str | None:
    """Return when the first event was, in UTC."""
    if reading.epoch is None or reading.first is None:
        return None
    try:
        moment = datetime.fromtimestamp((reading.epoch + reading.first) * MICRO, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds")


def _cells(analysis: Analysis) -> Iterator[Cell]:
    return (cell for row in analysis.rows.by_name.values() for cell in row.cells.values())


def _phases(analysis: Analysis) -> list[Facts]:
    counts: Counter[Phase] = Counter()
    totals: defaultdict[Phase, float] = defaultdict(float)
    for cell in _cells(analysis):
        counts[cell.phase] += cell.count
        totals[cell.phase] += cell.total
    rows = [
        {
            "kind": phase.kind,
            "name": phase.name,
            "bars": counts[phase],
            "seconds": phase.wall * MICRO,
            "a_step_seconds": _per_step(phase, analysis.steps),
            "tensor_seconds": totals[phase] * MICRO,
        }
        for phase in analysis.rows.phases.values()
        if counts[phase]
    ]
    return sorted(rows, key=lambda row: (KINDS.index(row["kind"]), -row["seconds"]))


def _per_step(phase: Phase, steps: Steps) -> float | None:
    """Return the mean seconds of the phase per whole step; None if it is in none of them."""
    wall, count = steps.step_totals.walls.get(phase, 0), steps.lengths.count
    if not count or (phase.wall and not wall):
        return None
    return wall / count * MICRO


def _collectives(analysis: Analysis) -> list[Facts]:
    """Count the tensors negotiated and carried out, per kind of collective."""
    negotiated: Counter[str] = Counter()
    executed: Counter[str] = Counter()
    for row in _phases(analysis):
        if row["kind"] == NEGOTIATE:
            negotiated[row["name"].removeprefix("NEGOTIATE_")] += row["bars"]
        elif row["kind"] == OPERATION:
            executed[row["name"]] += row["bars"]
    return [
        {"name": name, "negotiated": negotiated[name], "carried_out": executed[name]}
        for name in sorted({*negotiated, *executed})
    ]


def _operations(analysis: Analysis) -> list[Facts]:
    return [
        {
            "name": name,
            "count": operations.tensors.count,
            "tensors": int(operations.tensors.total),
            "tensors_mean": operations.tensors.mean,
            "bytes": int(operations.nbytes.total),
            "bytes_mean": operations.nbytes.mean,
            "bytes_median": operations.nbytes.median,
            "seconds": operations.microseconds.total * MICRO,
            "seconds_median": operations.microseconds.median * MICRO,
            "small_seconds": operations.small * MICRO,
        }
        for name, operations in sorted(analysis.fusion.operations.items())
    ]


def _cycles(analysis: Analysis) -> Facts | None:
    """Return Horovod's cycles; None if they are not marked in the file."""
    cycles, busy = analysis.cycles, analysis.fusion.busy_cycles
    if not cycles.count:
        return None
    operations = analysis.fusion.operations.values()
    return {
        "count": cycles.count,
        # No cycle is shorter than HOROVOD_CYCLE_TIME: idle cycles take as long, busy ones longer.
        "configured_estimate_seconds": cycles.quantile(0.01) * MICRO,
        "median_seconds": cycles.median * MICRO,
        "longest_seconds": cycles.maximum * MICRO,
        "with_work": busy,
        "operations_per_cycle": sum(o.tensors.count for o in operations) / busy if busy else None,
        "tensors_per_cycle": sum(o.tensors.total for o in operations) / busy if busy else None,
        "bytes_per_cycle": sum(o.nbytes.total for o in operations) / busy if busy else None,
    }


def _tensors(analysis: Analysis) -> list[Facts]:
    """Return the tensors that took the most time, in negotiation and operation together."""
    rows: list[Facts] = []
    for row in analysis.rows.by_name.values():
        outer = [c for c in row.cells.values() if c.phase.kind in (NEGOTIATE, OPERATION)]
        times = max((cell.count for cell in outer), default=0)
        if times:
            phases: dict[str, float] = {}
            for cell in row.cells.values():
                kind = cell.phase.kind
                phases[kind] = phases.get(kind, 0.0) + cell.total * MICRO
            total = sum(cell.total * MICRO for cell in outer)
            fields = {"name": row.name, "times": times, "bytes": row.nbytes, "seconds": total}
            rows.append({**fields, "phases": phases})
    return sorted(rows, key=lambda row: row["seconds"], reverse=True)[:TENSORS]


def _sample(sample: Sample) -> dict[str, float]:
    return {name: getattr(sample, name) * MICRO for name in ("median", "mean", "total")}


def _steps(analysis: Analysis, origin: float) -> Facts | None:
    """Return the whole steps, times since ``origin``; None if there are none."""
    steps = analysis.steps
    if not steps.lengths.count:
        return None
    total = steps.lengths.total
    states = zip(STATES, steps.states, strict=True)
    communicating = steps.states[COMMUNICATING].total
    overlapped = steps.overlapped.total
    operations = steps.step_totals.operations
    return {
        "seen": steps.number,
        "whole": steps.lengths.count,
        "seconds": _sample(steps.lengths),
        "states": {name: {**_sample(s), "share": s.total / total} for name, s in states},
        "overlap": {
            "overlapped_seconds": overlapped * MICRO,
            "exposed_seconds": (communicating - overlapped) * MICRO,
            "overlapped_share": overlapped / communicating if communicating else None,
        },
        "operations": {
            "count": int(operations[COUNT]),
            "bytes": int(operations[BYTES]),
            "seconds": operations[TIME] * MICRO,
            "small_seconds": operations[SMALL_TIME] * MICRO,
        },
        "slowest": [
            {
                "step": step.number,
                "start": (step.start - origin) * MICRO,
                "seconds": step.length * MICRO,
                "late_rank": None if step.late_rank is None else int(step.late_rank),
                "late_seconds": step.late * MICRO,
            }
            for step in sorted(steps.slowest, reverse=True)
        ],
    }


def _lateness(analysis: Analysis) -> Facts:
    """Return how late the ranks were, rank by rank."""
    steps = analysis.steps
    lateness = steps.lateness if steps.lateness.negotiations else steps.start_up
    negotiated = sum(cell.count for cell in _cells(analysis) if cell.phase.kind == NEGOTIATE)
    none = Sample()
    rows = []
    for rank in sorted(lateness.behind, key=int):
        step, negotiation = steps.late.get(rank, none), lateness.late.get(rank, none)
        rows.append(
            {
                "rank": int(rank),
                "late_steps": step.count,
                "late_steps_share": step.count / steps.ticked if steps.ticked else None,
                "late_in_step_seconds": _sample(step),
                "cost_seconds": step.total * MICRO,
                "late_negotiations": negotiation.count,
                "late_negotiations_share": negotiation.count / lateness.negotiations,
                "late_in_negotiation_seconds": _sample(negotiation),
                "behind_first_seconds": lateness.behind[rank] / lateness.negotiations * MICRO,
            }
        )
    return {
        "negotiations": negotiated,
        "with_ticks": steps.lateness.negotiations + steps.start_up.negotiations,
        "steps_with_ticks": steps.ticked,
        # With its response cache on, Horovod records ticks in the first steps only.
        "told": bool(rows) and steps.ticked > 0 and 2 * steps.ticked >= steps.lengths.count,
        "cost_seconds": sum(row["cost_seconds"] for row in rows),
        "spread_seconds": _sample(steps.spread),
        "ranks": rows,
    }


def _open(tensors: Sequence[Tensor], analysis: Analysis, origin: float) -> list[Facts]:
    """Return a row per open tensor, the longest open first.

    ``since`` counts from ``origin``. ``ready`` and ``missing`` are the ranks that have submitted
    the tensor and those that have not, of the ranks anywhere in the file; both are None if
    unknown: the negotiation has ended, or Horovod's response cache was on.
    """
    seen = {int(rank) for rank in analysis.ranks}
    rows = []
    for tensor in sorted(tensors, key=lambda tensor: tensor.bars[-1][1])[:TENSORS]:
        cell, since = tensor.bars[-1]
        phase = cell.phase
        ready = {int(rank) for _, rank in tensor.ticks} if phase.kind == NEGOTIATE else set()
        rows.append(
            {
                "tensor": tensor.row.name,
                "phase": phase.name,
                "kind": phase.kind,
                "since": (since - origin) * MICRO,
                "seconds": (analysis.last - since) * MICRO,
                "ready": sorted(ready) if ready else None,
                "missing": sorted(seen - ready) if ready else None,
            }
        )
    return rows


def analyse(
    path: Path, span: tuple[float, float] | None = None, recorder: Recorder | None = None
) -> tuple[Facts, Analysis]:
    """Return the facts of the timeline at ``path``, with the verdict.

    Args:
        path: the file, gzipped or not.
        span: time range to analyse, in seconds since the first event.
        recorder: receives all bars and steps.

    Raises:
        UsageError: the file cannot be read, or is not a Horovod timeline.
    """
    reading, analysis = Reading(path), Analysis(recorder)
    reported = time.monotonic()
    for events in timeline(reading, span):
        analysis.feed(events)
        if time.monotonic() - reported > PROGRESS_INTERVAL:
            reported = time.monotonic()
            log.info("%s: %.0f of %.0f MB", path, reading.position / 1e6, path.stat().st_size / 1e6)
    analysis.finish()
    negotiated = any(phase.kind == NEGOTIATE for phase in analysis.rows.phases.values())
    from_horovod = reading.files or negotiated or analysis.cycle is not None or span
    if analysis.events and not from_horovod:
        raise UsageError(f"{path} is not a Horovod timeline: its trace events are another tool's")
    results = facts(reading, analysis, span)
    return {**results, "verdict": verdict(results)}, analysis
