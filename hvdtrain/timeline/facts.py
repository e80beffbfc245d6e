"""The outcome of an analysis as plain data: what ``--json`` prints and the reports are made of.

All times are seconds. What a number means stands in ``bars``, ``steps`` and ``lateness``.
"""

from __future__ import annotations

from collections import Counter
from datetime import UTC, datetime
from math import inf
from typing import Any

from hvdtrain.timeline import bars
from hvdtrain.timeline.analyse import Analysis
from hvdtrain.timeline.read import Reading
from hvdtrain.timeline.step_facts import MICRO, ranks_facts, steps_facts
from hvdtrain.timeline.steps import Steps
from hvdtrain.timeline.unfinished import open_facts

Facts = dict[str, Any]

TENSORS = 200  # rows of the table of tensors


def facts(reading: Reading, analysis: Analysis, window: tuple[float, float] | None = None) -> Facts:
    """All that the file tells, within ``window`` (seconds): plain data, ready for JSON."""
    low, high = window or (0.0, inf)
    span = sum(analysis.times) * MICRO
    return {
        "file": {
            "path": str(reading.path),
            "bytes": reading.size,
            "events": analysis.events,
            "recorded_at": _moment(reading),
            "first": reading.first or 0,
            "begin": ((analysis.first or 0) - (reading.first or 0)) * MICRO,
            "cut": reading.cut,
            "closed": reading.closed,
            "skipped_bytes": reading.skipped,
            "files": max(1, reading.files),
            "unfamiliar": dict(analysis.unfamiliar),
            "headless_events": analysis.headless,
            "bars_begin": bool(analysis.rows.phases),
            "open_bars": sum(len(tensor.bars) for tensor in analysis.tensors.values()),
            "open_tensors": sum(bool(tensor.bars) for tensor in analysis.tensors.values()),
            "slice": [low, None if high == inf else high] if window else None,
        },
        "seconds": span,
        "ranks": len(analysis.ranks) or None,
        "states": dict(zip(bars.STATES, (t * MICRO for t in analysis.times), strict=True)),
        "steps": steps_facts(analysis, reading.first or 0),
        "lateness": ranks_facts(analysis),
        "open": open_facts(analysis, reading.first or 0),
        "phases": _phases(analysis),
        "collectives": _collectives(analysis),
        "operations": _operations(analysis),
        "cycles": _cycles(analysis),
        "tensor_rows": len(analysis.rows.by_name),
        "tensors": _tensors(analysis),
    }


def _moment(reading: Reading) -> str | None:
    """When the first event was, in UTC."""
    if reading.epoch is None or reading.first is None:
        return None
    try:
        moment = datetime.fromtimestamp((reading.epoch + reading.first) * MICRO, UTC)
    except (ValueError, OverflowError, OSError):
        return None
    return moment.isoformat(timespec="milliseconds")


def _phases(analysis: Analysis) -> list[Facts]:
    counts: Counter[bars.Phase] = Counter()
    totals: Counter[bars.Phase] = Counter()
    for row in analysis.rows.by_name.values():
        for cell in row.cells.values():
            counts[cell.phase] += cell.count
            totals[cell.phase] += cell.total
    rows = [
        {
            "kind": phase.kind,
            "name": phase.name,
            "bars": counts[phase],
            "seconds": phase.wall * MICRO,
            "a_step_seconds": _a_step(phase, analysis.steps),
            "tensor_seconds": totals[phase] * MICRO,
        }
        for phase in analysis.rows.phases.values()
        if counts[phase]
    ]
    return sorted(rows, key=lambda row: (bars.KINDS.index(row["kind"]), -row["seconds"]))


def _a_step(phase: bars.Phase, steps: Steps) -> float | None:
    """Seconds of the phase in a whole step, mean; None where it is in none of them."""
    wall, count = steps.account.walls.get(phase, 0), steps.lengths.count
    if not count or (phase.wall and not wall):
        return None
    return wall / count * MICRO


def _collectives(analysis: Analysis) -> list[Facts]:
    """How many tensors each kind of collective was asked for, and carried out on."""
    asked: Counter[str] = Counter()
    done: Counter[str] = Counter()
    for row in _phases(analysis):
        if row["kind"] == bars.NEGOTIATE:
            asked[row["name"].removeprefix("NEGOTIATE_")] += row["bars"]
        elif row["kind"] == bars.OPERATION:
            done[row["name"]] += row["bars"]
    names = sorted({*asked, *done})
    return [{"name": name, "negotiated": asked[name], "carried_out": done[name]} for name in names]


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
    """Horovod's cycles; None where the file has no marks of them."""
    cycles, busy = analysis.cycles, analysis.fusion.busy_cycles
    if not cycles.count:
        return None
    operations = analysis.fusion.operations.values()
    return {
        "count": cycles.count,
        # No cycle is shorter than HOROVOD_CYCLE_TIME: idle ones are as long, busy ones longer.
        "configured_estimate_seconds": cycles.quantile(0.01) * MICRO,
        "median_seconds": cycles.median * MICRO,
        "longest_seconds": cycles.maximum * MICRO,
        "with_work": busy,
        "operations_per_cycle": sum(o.tensors.count for o in operations) / busy if busy else None,
        "tensors_per_cycle": sum(o.tensors.total for o in operations) / busy if busy else None,
        "bytes_per_cycle": sum(o.nbytes.total for o in operations) / busy if busy else None,
    }


def _tensors(analysis: Analysis) -> list[Facts]:
    """The tensors that took the most time, in negotiation and operation together."""
    rows: list[Facts] = []
    for row in analysis.rows.by_name.values():
        cells = row.cells.values()
        outer = [c for c in cells if c.phase.kind in (bars.NEGOTIATE, bars.OPERATION)]
        if any(cell.count for cell in outer):
            phases: dict[str, float] = {}
            for cell in cells:
                kind = cell.phase.kind
                phases[kind] = phases.get(kind, 0.0) + cell.total * MICRO
            times = max(cell.count for cell in outer)
            total = sum(cell.total * MICRO for cell in outer)
            rows.append(
                {
                    "name": row.name,
                    "times": times,
                    "bytes": row.nbytes,
                    "seconds": total,
                    "phases": phases,
                }
            )
    return sorted(rows, key=lambda row: row["seconds"], reverse=True)[:TENSORS]
