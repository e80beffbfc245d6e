"""The section of a timeline in a report."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hvdtrain.measure.report_find import Record
from hvdtrain.measure.tables import Table
from hvdtrain.timeline.units import duration, percent, printable


def timeline(path: Path, facts: Record) -> dict[str, Any]:
    """Its head, verdict and tables."""
    file, steps = facts["file"], facts["steps"]
    head = f"{file['events']:,} events in {duration(facts['seconds'])}"
    states: Table | None = None
    if steps:
        head += f", {steps['whole']:,} whole steps, {duration(steps['seconds']['median'])} each"
        names = {"neither": "neither: computing, data"}
        states = (
            ["seen from rank 0", "of a step, median", "share"],
            [
                [names.get(name, name), duration(one["median"]), percent(one["share"])]
                for name, one in steps["states"].items()
            ],
        )
    return {
        "path": printable(path),
        "head": head,
        "verdict": [(one["text"], one["advice"]) for one in facts["verdict"]],
        "tables": [table for table in (states, _lateness(facts["lateness"])) if table],
    }


def _lateness(lateness: Record) -> Table | None:
    """Who was late; None where the file does not tell it of most steps.

    With its cache of responses on Horovod notes it in the first steps alone, which come up late
    and say nothing about the others.
    """
    if not lateness["told"]:
        return None
    rows = [
        [
            str(row["rank"]),
            percent(row["late_steps_share"]) + " of steps",
            duration(row["late_in_step_seconds"]["median"]),
            duration(row["cost_seconds"]),
        ]
        for row in lateness["ranks"]
    ]
    return ["rank", "last to be ready", "then late by", "costs in all"], rows
