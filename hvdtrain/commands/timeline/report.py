"""Facts and verdict as text, or two timelines side by side (``--diff``)."""

from __future__ import annotations

from collections.abc import Sequence

from hvdtrain.commands.timeline.events import KINDS, OPERATION, STATES, Facts
from hvdtrain.commands.timeline.verdict import TimelineFinding
from hvdtrain.system.output.tables import entry, message, paragraph, table
from hvdtrain.system.output.text import duration, percent, plural, printable, short, size

RANKS = 12
TENSORS = 10
LATE = ("by median", "mean", "cost")  # columns that belong to the preceding one
UNSEEN = (
    "Limits: the file is written by rank 0 and records Horovod's work there. Computing, data "
    "loading and the other ranks' work are not in it, only the time at which each rank submitted a "
    "tensor, to within a cycle. Communication counts as hidden while some rank still had a tensor "
    "of the step to submit."
)


def text(facts: Facts) -> str:
    """Return the whole report."""
    sections = [_head(facts), _verdict(facts["verdict"])]
    if facts["phases"]:
        body = (_states, _lateness, _slowest, _phases, _operations, _cycles, _tensors)
        sections += [section(facts) for section in body] + [paragraph(UNSEEN)]
    return "\n\n".join(section for section in sections if section)


def _head(facts: Facts) -> str:
    file, steps = facts["file"], facts["steps"]
    when = f", from {file['recorded_at']}" if file["recorded_at"] else ""
    lines = [
        f"{printable(file['path'])}: {size(file['bytes'])}, {file['events']:,} events, "
        f"{ranks(facts)}, {duration(facts['seconds'])}{when}"
    ]
    if file["slice"]:
        low, high = file["slice"]
        end = "the end" if high is None else f"{high:g} s"
        lines.append(f"slice: between {low:g} s after the first event and {end}")
    if steps:
        lines.append(
            f"{steps['seen']:,} steps, {steps['whole']:,} of them whole: "
            f"{duration(steps['seconds']['median'])} in the median, "
            f"{duration(steps['seconds']['mean'])} in the mean"
        )
    if file["files"] > 1:
        lines.append(f"{file['files']} consecutive timelines, without the time between them")
    if file["cut"]:
        lines.append("the file ends in the middle of an event: read up to there")
    if file["skipped_bytes"]:
        lines.append(f"{file['skipped_bytes']:,} bytes in it are not events: ignored")
    if file["unfamiliar"]:
        kinds = ", ".join(f"{n:,} {short(k, 20)}" for k, n in sorted(file["unfamiliar"].items()))
        lines.append(f"unknown events, ignored: {kinds}")
    return "\n".join(message(line, "  ") for line in lines)


def ranks(facts: Facts) -> str:
    """Return the number of ranks, in words."""
    count = facts["ranks"]
    if not count:
        return "unknown ranks"
    # Only the end of a negotiation proves that these are all ranks.
    seen = "" if facts["lateness"]["negotiations"] else " seen"
    return plural(count, "rank") + seen


def _verdict(findings: Sequence[TimelineFinding]) -> str:
    lines = []
    for number, finding in enumerate(findings):
        head = "Verdict: " if number == 0 else "Also:    "
        lines += [entry(head, finding["text"]), entry(" " * len(head), "-> " + finding["advice"])]
    return "\n".join(lines)


def _states(facts: Facts) -> str:
    steps = facts["steps"]
    labels = {
        "communicating": "communicating",
        "waiting": "waiting for a rank",
        "neither": "neither: computing, data ...",
    }
    if not steps:
        rows = [[label, duration(facts["states"][name])] for name, label in labels.items()]
        return "Time, seen from rank 0\n" + table(["", "total"], rows)
    rows = [
        [label, duration(state["median"]), duration(state["total"]), percent(state["share"])]
        for name, label in labels.items()
        for state in [steps["states"][name]]
    ]
    overlap = steps["overlap"]
    if overlap["overlapped_share"] is not None:
        share = percent(overlap["overlapped_share"]) + " of it"
        hidden = ["  hidden by computing", "", duration(overlap["overlapped_seconds"]), share]
        rows.insert(1, hidden)
    title = f"Time of the {steps['whole']:,} whole steps, seen from rank 0"
    return f"{title}\n" + table(["", "median step", "total", "share"], rows)


def _lateness(facts: Facts) -> str:
    lateness = facts["lateness"]
    negotiated, ticked = lateness["negotiations"], lateness["with_ticks"]
    if not negotiated or facts["ranks"] == 1:
        return ""
    title = f"Lateness: {ticked:,} of {negotiated:,} negotiations record when each rank was ready"
    if not lateness["told"]:
        few = ", the first ones" if ticked else ""
        return paragraph(
            f"{title}{few}: Horovod does not record it while its response cache is on "
            "(HOROVOD_CACHE_CAPACITY=0: off)"
        )
    order = sorted(lateness["ranks"], key=lambda r: (-r["cost_seconds"], -r["late_negotiations"]))
    rows = [
        [
            f"rank {row['rank']}",
            *_late(row["late_steps"], row["late_in_step_seconds"]),
            duration(row["cost_seconds"]) if row["late_steps"] else "-",
            *_late(row["late_negotiations"], row["late_in_negotiation_seconds"]),
            duration(row["behind_first_seconds"]),
        ]
        for row in order[:RANKS]
    ]
    header = ["last in", "steps", "by median", "mean", "cost", "tensors", "by median", "mean"]
    lines = [message(title), table([*header, "behind first"], rows, joined=LATE)]
    if len(order) > RANKS:
        lines.append(f"  and {len(order) - RANKS} more ranks that cost less")
    return "\n".join(lines)


def _late(count: int, times: Facts) -> list[str]:
    seconds = [duration(times[key]) if count else "-" for key in ("median", "mean")]
    return [f"{count:,}" if count else "-", *seconds]


def _slowest(facts: Facts) -> str:
    if not facts["steps"]:
        return ""
    steps = []
    for step in facts["steps"]["slowest"]:
        late = f", rank {step['late_rank']} late by {duration(step['late_seconds'])}"
        late = "" if step["late_rank"] is None else late
        steps.append(f"{step['step']:,} ({duration(step['seconds'])}{late})")
    return paragraph(f"Slowest steps: {', '.join(steps)}", "  ")


def _phases(facts: Facts) -> str:
    steps = facts["steps"]
    rows = [
        [
            row["kind"] if row["kind"] != OPERATION else "operation, whole",
            short(row["name"]),
            f"{row['bars']:,}",
            duration(row["seconds"]),
            duration(row["tensor_seconds"]),
            *([_seconds(row["a_step_seconds"])] if steps else []),
        ]
        for row in facts["phases"]
    ]
    header = ["", "", "bars", "time", "summed over tensors", *(["time per step"] if steps else [])]
    return "Phases, whole file\n" + table(header, rows, names=2)


def _seconds(value: float | None) -> str:
    return "-" if value is None else duration(value)


def _operations(facts: Facts) -> str:
    negotiated = [
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
    lines = [message("Collectives, in tensors: " + "; ".join(negotiated), "  ")]
    if rows:
        header = ["", "operations", "tensors each", "bytes each", "median", "total", "bytes/time"]
        lines += ["", "Fusion: operations carried out", table(header, rows)]
    return "\n".join(lines)


def _cycles(facts: Facts) -> str:
    cycles = facts["cycles"]
    if not cycles:
        return paragraph(
            "Cycles: not marked in this file, so the share of the cycle time is unknown "
            "(HOROVOD_TIMELINE_MARK_CYCLES=1 marks them)"
        )
    line = (
        f"Cycles: {cycles['count']:,}, the shortest "
        f"{duration(cycles['configured_estimate_seconds'])} (about HOROVOD_CYCLE_TIME), "
        f"the median {duration(cycles['median_seconds'])}, "
        f"the longest {duration(cycles['longest_seconds'])}"
    )
    if cycles["with_work"]:
        line += (
            f"; {cycles['with_work']:,} began operations, "
            f"{cycles['operations_per_cycle']:.1f} each, on {cycles['tensors_per_cycle']:.1f} "
            f"tensors of {size(cycles['bytes_per_cycle'])} in total"
        )
    return paragraph(line, "  ")


def _tensors(facts: Facts) -> str:
    shown = facts["tensors"][:TENSORS]
    used = {kind for row in shown for kind, seconds in row["phases"].items() if seconds}
    kinds = [kind for kind in KINDS if kind in used - {OPERATION}]
    rows = [
        [
            short(row["name"]),
            f"{row['times']:,}",
            size(row["bytes"]) if row["bytes"] else "-",
            *(_seconds(row["phases"].get(kind) or None) for kind in kinds),
        ]
        for row in shown
    ]
    if not rows:
        return ""
    title = f"Tensors that took the most time ({len(rows)} of {facts['tensor_rows']:,})"
    return f"{title}\n" + table(["", "times", "bytes", *kinds], rows)


def compare(first: Facts, second: Facts) -> Facts:
    """Return rows of ``phase``, ``name``, ``one``, ``other`` (seconds), ``ratio`` (other / one).

    Times are per step, so that recordings of different lengths are comparable: the median for a
    step and its states, the mean for single phases. If either has no whole steps, times are those
    of the whole file.
    """
    per_step = bool(first["steps"] and second["steps"])
    columns = [_times(facts, per_step=per_step) for facts in (first, second)]
    keys = list(dict.fromkeys([*columns[0], *columns[1]]))
    order = {kind: index for index, kind in enumerate(KINDS)}
    keys.sort(key=lambda key: order.get(key[0], -1))
    rows = []
    for phase, name in keys:
        before, after = (column.get((phase, name)) for column in columns)
        ratio = after / before if before and after is not None else None
        row = {"phase": phase, "name": name, "one": before, "other": after, "ratio": ratio}
        rows.append(row)
    files = {"one": first["file"]["path"], "other": second["file"]["path"]}
    return {"a_step": per_step, **files, "rows": rows}


def _times(facts: Facts, *, per_step: bool) -> dict[tuple[str, str], float]:
    """Return seconds by phase and name, per step or of the whole file."""
    times: dict[tuple[str, str], float] = {}
    steps = facts["steps"]
    if per_step:
        times["step", ""] = steps["seconds"]["median"]
        for name in reversed(STATES):
            times["step", name] = steps["states"][name]["median"]
        if facts["lateness"]["told"]:
            times["step", "lateness"] = facts["lateness"]["cost_seconds"] / steps["whole"]
    else:
        times["file", ""] = facts["seconds"]
        times |= {("file", name): facts["states"][name] for name in reversed(STATES)}
    for row in facts["phases"]:
        seconds = row["a_step_seconds" if per_step else "seconds"]
        if seconds is not None:  # None: the phase is in no step
            times[row["kind"], row["name"]] = seconds
    return times


def comparison(difference: Facts) -> str:
    """Return the comparison as a table."""
    rows = [
        [
            row["phase"],
            short(row["name"]),
            *(_seconds(row[key]) for key in ("one", "other")),
            "-" if row["ratio"] is None else f"{row['ratio']:.2f}",
        ]
        for row in difference["rows"]
    ]
    first, second = (printable(difference[key]) for key in ("one", "other"))
    scope = "per step" if difference["a_step"] else "of the whole file"
    times = table(["", "", "one", "other", "other/one"], rows, names=2)
    return f"one: {first}\nother: {second}\n\nTimes {scope}\n{times}"
