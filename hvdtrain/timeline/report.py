"""The report for people: facts and verdict as text."""

from __future__ import annotations

import textwrap
from typing import Any

from hvdtrain.timeline import bars
from hvdtrain.timeline.units import duration, percent, short, size, table

Facts = dict[str, Any]

WIDTH = 100
TENSORS = 10
RANKS = 12
UNSEEN = (
    "What the file does not tell: it is written by rank 0 and holds what Horovod does there. "
    "Computing, loading data and the other ranks' work are not in it, only when each rank handed a "
    "tensor in, to the length of a cycle. Overlap is told from the side of communication: it "
    "counts as hidden while some rank still had a tensor of the step to hand in."
)


def text(facts: Facts) -> str:
    """The whole report."""
    sections = [_head(facts), _verdict(facts["verdict"])]
    if facts["phases"]:
        body = (_states, _lateness, _slowest, _phases, _operations, _cycles, _tensors)
        sections += [section(facts) for section in body] + [textwrap.fill(UNSEEN, WIDTH)]
    return "\n\n".join(section for section in sections if section)


def _head(facts: Facts) -> str:
    file, steps = facts["file"], facts["steps"]
    ranks = f"{facts['ranks'] or 'unknown'} rank{'' if facts['ranks'] == 1 else 's'}"
    when = f", from {file['recorded_at']}" if file["recorded_at"] else ""
    lines = [
        f"{file['path']}: {size(file['bytes'])}, {file['events']:,} events, {ranks}, "
        f"{duration(facts['seconds'])}{when}"
    ]
    if file["slice"]:
        low, high = file["slice"]
        end = "the end" if high is None else f"{high:g} s"
        lines.append(f"only what lies between {low:g} s after the first event and {end}")
    if steps:
        lines.append(
            f"{steps['seen']:,} steps, {steps['whole']:,} of them whole: "
            f"{duration(steps['seconds']['median'])} in the median, "
            f"{duration(steps['seconds']['mean'])} in the mean"
        )
    if file["files"] > 1:
        lines.append(f"{file['files']} timelines one after another; the time between is left out")
    if file["cut"]:
        lines.append("the file ends in the middle of an event: read up to there")
    if file["skipped_bytes"]:
        lines.append(f"{file['skipped_bytes']:,} bytes in it are no events: left out")
    if file["unfamiliar"]:
        kinds = ", ".join(f"{n:,} {short(k, 20)}" for k, n in sorted(file["unfamiliar"].items()))
        lines.append(f"unfamiliar events, left out: {kinds}")
    return "\n".join(lines)


def _verdict(findings: list[Facts]) -> str:
    lines = []
    for number, finding in enumerate(findings):
        head = "Verdict: " if number == 0 else "Also:    "
        for words, indent in ((finding["text"], head), ("-> " + finding["advice"], " " * 9)):
            lines.append(
                textwrap.fill(words, WIDTH, initial_indent=indent, subsequent_indent=" " * 9)
            )
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
        return "Time, seen from rank 0\n" + table(["", "in all"], rows)
    rows = [
        [label, duration(state["median"]), duration(state["total"]), percent(state["share"])]
        for name, label in labels.items()
        for state in [steps["states"][name]]
    ]
    overlap = steps["overlap"]
    if overlap["overlapped_share"] is not None:
        rows.insert(
            1,
            [
                "  hidden by computing",
                "",
                duration(overlap["overlapped_seconds"]),
                percent(overlap["overlapped_share"]) + " of it",
            ],
        )
    title = f"Time of the {steps['whole']:,} whole steps, seen from rank 0"
    return f"{title}\n" + table(["", "median step", "in all", "share"], rows)


def _lateness(facts: Facts) -> str:
    lateness = facts["lateness"]
    asked, ticked = lateness["negotiations"], lateness["with_ticks"]
    if not asked or facts["ranks"] == 1:
        return ""
    title = f"Lateness: {ticked:,} of {asked:,} negotiations tell which rank was ready when"
    if not lateness["told"]:
        few = ", the first ones" if ticked else ""
        return (
            f"{title}{few}: Horovod\n"
            "does not note it while its cache of responses is on; HOROVOD_CACHE_CAPACITY=0 is off"
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
    lines = [title, table([*header, "behind first"], rows)]
    if len(order) > RANKS:
        lines.append(f"  and {len(order) - RANKS} ranks more that cost less")
    return "\n".join(lines)


def _late(count: int, times: Facts) -> list[str]:
    seconds = [duration(times[key]) if count else "-" for key in ("median", "mean")]
    return [f"{count:,}" if count else "-", *seconds]


def _slowest(facts: Facts) -> str:
    if not facts["steps"]:
        return ""
    steps = [
        f"{step['step']:,} ({duration(step['seconds'])}"
        + (
            f", rank {step['late_rank']} late by {duration(step['late_seconds'])})"
            if step["late_rank"] is not None
            else ")"
        )
        for step in facts["steps"]["slowest"]
    ]
    return textwrap.fill(f"Slowest steps: {', '.join(steps)}", WIDTH, subsequent_indent="  ")


def _phases(facts: Facts) -> str:
    steps = facts["steps"]
    rows = [
        [
            row["kind"] if row["kind"] != bars.OPERATION else "operation, whole",
            row["name"],
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


def _operations(facts: Facts) -> str:
    asked = [
        f"{row['name']} {row['negotiated']:,} negotiated, {row['carried_out']:,} carried out"
        for row in facts["collectives"]
    ]
    rows = [
        [
            row["name"],
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


def _cycles(facts: Facts) -> str:
    cycles = facts["cycles"]
    if not cycles:
        return (
            "Cycles: not marked in this file (HOROVOD_TIMELINE_MARK_CYCLES=1 marks them), so the\n"
            "share of the cycle time cannot be told"
        )
    line = (
        f"Cycles: {cycles['count']:,}, the shortest "
        f"{duration(cycles['configured_estimate_seconds'])} (about what HOROVOD_CYCLE_TIME was), "
        f"the median {duration(cycles['median_seconds'])}, "
        f"the longest {duration(cycles['longest_seconds'])}"
    )
    if cycles["with_work"]:
        line += (
            f"; {cycles['with_work']:,} began operations, "
            f"{cycles['operations_per_cycle']:.1f} each, on {cycles['tensors_per_cycle']:.1f} "
            f"tensors of {size(cycles['bytes_per_cycle'])} in all"
        )
    return textwrap.fill(line, WIDTH, subsequent_indent="  ")


def _tensors(facts: Facts) -> str:
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
