"""``--diff``: two timelines side by side, phase by phase.

Times are a step's, so that records of unlike length compare: the median for a step and what it is
made of, the mean for single phases. Where steps cannot be told in both, they are of the whole file.
"""

from __future__ import annotations

from typing import Any

from hvdtrain.timeline import bars
from hvdtrain.timeline.units import duration, printable, short, table

Facts = dict[str, Any]


def compare(one: Facts, other: Facts) -> Facts:
    """Rows of ``phase``, ``name``, ``one`` and ``other`` (seconds) and ``ratio`` (other / one)."""
    a_step = bool(one["steps"] and other["steps"])
    columns = [_times(facts, a_step=a_step) for facts in (one, other)]
    keys = list(dict.fromkeys([*columns[0], *columns[1]]))
    order = {kind: place for place, kind in enumerate(bars.KINDS)}
    keys.sort(key=lambda key: order.get(key[0], -1))
    rows = []
    for key in keys:
        before, after = (column.get(key) for column in columns)
        ratio = after / before if before and after is not None else None
        rows.append(
            {"phase": key[0], "name": key[1], "one": before, "other": after, "ratio": ratio}
        )
    return {
        "a_step": a_step,
        "one": one["file"]["path"],
        "other": other["file"]["path"],
        "rows": rows,
    }


def _times(facts: Facts, *, a_step: bool) -> dict[tuple[str, str], float]:
    """Seconds by phase and name, of a step or of the whole file."""
    times: dict[tuple[str, str], float] = {}
    steps = facts["steps"]
    if a_step:
        times["step", ""] = steps["seconds"]["median"]
        for name in reversed(bars.STATES):
            times["step", name] = steps["states"][name]["median"]
        if facts["lateness"]["told"]:
            times["step", "lateness"] = facts["lateness"]["cost_seconds"] / steps["whole"]
    else:
        times["file", ""] = facts["seconds"]
        times |= {("file", name): facts["states"][name] for name in reversed(bars.STATES)}
    for row in facts["phases"]:
        seconds = row["a_step_seconds" if a_step else "seconds"]
        if seconds is not None:  # else it is in no step
            times[row["kind"], row["name"]] = seconds
    return times


def text(difference: Facts) -> str:
    """The comparison as a table."""
    rows = [
        [
            row["phase"],
            short(row["name"]),
            *("-" if row[key] is None else duration(row[key]) for key in ("one", "other")),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        ]
        for row in difference["rows"]
    ]
    width = max(len(row[1]) for row in rows)
    rows = [[row[0], f"{row[1]:<{width}}", *row[2:]] for row in rows]
    one, other = (printable(difference[key]) for key in ("one", "other"))
    of = "a step" if difference["a_step"] else "the whole file"
    return f"one: {one}\nother: {other}\n\nTimes of {of}\n" + table(
        ["", "", "one", "other", "other/one"], rows
    )
