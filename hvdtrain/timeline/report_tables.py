"""The report for people: the tables of the whole file."""

from __future__ import annotations

import textwrap
from typing import Any

from hvdtrain.timeline import bars
from hvdtrain.timeline.units import duration, short, size, table

Facts = dict[str, Any]

WIDTH = 100
TENSORS = 10


def phases(facts: Facts) -> str:
    """The phases, over the whole file and a step."""
    steps = facts["steps"]
    rows = [
        [
            row["kind"] if row["kind"] != bars.OPERATION else "operation, whole",
            short(row["name"]),
            f"{row['bars']:,}",
            duration(row["seconds"]),
            duration(row["tensor_seconds"]),
            *([_a_step(row["a_step_seconds"])] if steps else []),
        ]
        for row in facts["phases"]
    ]
    header = ["", "", "bars", "time", "summed over tensors", *(["time a step"] if steps else [])]
    # Names to the left as well.
    width = max(len(row[1]) for row in rows)
    rows = [[row[0], f"{row[1]:<{width}}", *row[2:]] for row in rows]
    return "Phases, whole file\n" + table(header, rows)


def _a_step(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def operations(facts: Facts) -> str:
    """What was asked for, and what was carried out."""
    asked = [
        f"{short(row['name'])} {row['negotiated']:,} negotiated, {row['carried_out']:,} carried out"
        for row in facts["collectives"]
    ]
    rows = [
        [
            short(row["name"]),
            f"{row['count']:,}",
            f"{row['tensors_mean']:.1f}",
            size(row["bytes_mean"]) if row["bytes"] else "-",
            duration(row["seconds_median"]),
            duration(row["seconds"]),
            f"{size(row['bytes'] / row['seconds'])}/s" if row["bytes"] and row["seconds"] else "-",
        ]
        for row in facts["operations"]
    ]
    lines = ["Collectives, in tensors: " + "; ".join(asked)]
    if rows:
        header = ["", "operations", "tensors each", "bytes each", "median", "in all", "bytes/time"]
        lines += ["", "Fusion: operations carried out", table(header, rows)]
    return "\n".join(lines)


def cycles(facts: Facts) -> str:
    """Horovod's cycles."""
    found = facts["cycles"]
    if not found:
        return (
            "Cycles: not marked in this file (HOROVOD_TIMELINE_MARK_CYCLES=1 marks them), so the\n"
            "share of the cycle time cannot be told"
        )
    line = (
        f"Cycles: {found['count']:,}, the shortest "
        f"{duration(found['configured_estimate_seconds'])} (about what HOROVOD_CYCLE_TIME was), "
        f"the median {duration(found['median_seconds'])}, "
        f"the longest {duration(found['longest_seconds'])}"
    )
    if found["with_work"]:
        line += (
            f"; {found['with_work']:,} began operations, "
            f"{found['operations_per_cycle']:.1f} each, on {found['tensors_per_cycle']:.1f} "
            f"tensors of {size(found['bytes_per_cycle'])} in all"
        )
    return textwrap.fill(line, WIDTH, subsequent_indent="  ")


def tensors(facts: Facts) -> str:
    """The tensors that took the most time."""
    kinds = [kind for kind in bars.KINDS if kind != bars.OPERATION]
    shown = facts["tensors"][:TENSORS]
    kinds = [kind for kind in kinds if any(row["phases"].get(kind) for row in shown)]
    rows = [
        [
            short(row["name"]),
            f"{row['times']:,}",
            size(row["bytes"]) if row["bytes"] else "-",
            *(
                duration(row["phases"].get(kind, 0)) if row["phases"].get(kind) else "-"
                for kind in kinds
            ),
        ]
        for row in shown
    ]
    if not rows:
        return ""
    title = f"Tensors that took the most time ({len(rows)} of {facts['tensor_rows']:,})"
    return f"{title}\n" + table(["", "times", "bytes", *kinds], rows)
