"""The steps and the lateness of the ranks as plain data: a part of ``facts``."""

from __future__ import annotations

from typing import Any

from hvdtrain.timeline import bars, fusion
from hvdtrain.timeline.analyse import Analysis
from hvdtrain.timeline.samples import Sample
from hvdtrain.timeline.steps import Steps

MICRO = 1e-6
Facts = dict[str, Any]


def _lateness(steps: Steps) -> Any:
    return steps.lateness if steps.lateness.negotiations else steps.start_up


def _sample(sample: Sample) -> dict[str, float]:
    return {
        "median": sample.median * MICRO,
        "mean": sample.mean * MICRO,
        "total": sample.total * MICRO,
    }


def steps_facts(analysis: Analysis, origin: float) -> Facts | None:
    """The whole steps, times since ``origin``; None where none can be told."""
    steps = analysis.steps
    if not steps.lengths.count:
        return None
    total = steps.lengths.total
    states = zip(bars.STATES, steps.states, strict=True)
    communicating = steps.states[bars.COMMUNICATING].total
    overlapped = steps.overlapped.total
    operations = steps.account.operations
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
            "count": int(operations[fusion.COUNT]),
            "bytes": int(operations[fusion.BYTES]),
            "seconds": operations[fusion.TIME] * MICRO,
            "small_seconds": operations[fusion.SMALL_TIME] * MICRO,
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


def ranks_facts(analysis: Analysis) -> Facts:
    """Who was late, rank by rank."""
    steps, lateness = analysis.steps, _lateness(analysis.steps)
    negotiated = sum(
        cell.count
        for row in analysis.rows.by_name.values()
        for cell in row.cells.values()
        if cell.phase.kind == bars.NEGOTIATE
    )
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
        # With its cache of responses on, Horovod ticks in the first steps alone.
        "told": bool(rows) and steps.ticked > 0 and 2 * steps.ticked >= steps.lengths.count,
        "cost_seconds": sum(row["cost_seconds"] for row in rows),
        "spread_seconds": _sample(steps.spread),
        "ranks": rows,
    }
