"""The report for people: facts and verdict as text."""

from __future__ import annotations

import textwrap
from typing import Any

from hvdtrain.timeline.report_tables import WIDTH, cycles, operations, phases, tensors
from hvdtrain.timeline.units import duration, percent, printable, short, size, table

Facts = dict[str, Any]

RANKS = 12
UNSEEN = (
    "What is not in the file: it is written by rank 0 and holds what Horovod does there. "
    "Computing, loading data and the other ranks' work are not in it, only when each rank handed a "
    "tensor in, to within a cycle. Communication counts as hidden while some rank still had a "
    "tensor of the step to hand in."
)


def text(facts: Facts) -> str:
    """The whole report."""
    sections = [_head(facts), _verdict(facts["verdict"])]
    if facts["phases"]:
        body = (_states, _lateness, _slowest, phases, operations, cycles, tensors)
        sections += [section(facts) for section in body] + [textwrap.fill(UNSEEN, WIDTH)]
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


def ranks(facts: Facts) -> str:
    """How many ranks there are, as far as can be told."""
    count = facts["ranks"]
    if not count:
        return "unknown ranks"
    # Only where a negotiation ends have all ranks come.
    seen = "" if facts["lateness"]["negotiations"] else " seen"
    return f"{count} rank{'' if count == 1 else 's'}{seen}"


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
            "does not record it while its response cache is on (HOROVOD_CACHE_CAPACITY=0: off)"
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
