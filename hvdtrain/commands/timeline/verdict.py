"""The verdict: bottlenecks of the training, their cost, and what to change.

Pure functions of the facts. A finding is reported if it costs at least ``NOTABLE`` of the time of
the whole steps, the most expensive first.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hvdtrain.commands.timeline.analyse import Analysis, Recorder
from hvdtrain.commands.timeline.events import NEGOTIATE
from hvdtrain.commands.timeline.facts import (
    OpenTensor,
    TimelineFacts,
    TimelineFinding,
    make_facts,
)
from hvdtrain.commands.timeline.read import Reading, timeline
from hvdtrain.commands.timeline.steps import RankLateness, StepFacts
from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import duration, percent, rank_list, short, size

log = logging.getLogger(__name__)

PROGRESS_INTERVAL = 5.0  # seconds between two progress messages
LATE = 0.05  # minimum share of the time for lateness
NOTABLE = 0.10  # for communication
WAIT = 0.05  # for waiting for the next cycle
HEADS = {
    "straggler": "bound by a straggler",
    "uneven ranks": "bound by uneven ranks",
    "ranks wait": "ranks wait for one another",
    "small tensors": "bound by small tensors",
    "bandwidth": "bound by bandwidth",
    "cycle time": "bound by the cycle time",
    "unfinished": "unfinished",
    "nothing wrong": "nothing wrong in Horovod",
    "too little": "too little to judge",
}
NO_CACHE = "HOROVOD_CACHE_CAPACITY=0"
GROUPS, NAMES = 3, 3  # maximum number of groups of open tensors, and of names in each


@dataclass(frozen=True)
class Straggler(TimelineFinding):
    """The rank that is late in most steps."""

    rank: int


@dataclass(frozen=True)
class Unfinished(TimelineFinding):
    """Tensors that are open at the end of the file, and the ranks for which they wait."""

    ranks: list[int]


def analyse(
    path: Path,
    span: tuple[float, float] | None = None,
    recorder: Recorder | None = None,
) -> tuple[TimelineFacts, Analysis]:
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
    from_horovod = reading.epoch or negotiated or analysis.cycle is not None or span
    if analysis.events and not from_horovod:
        raise UsageError(f"{path} is not a Horovod timeline: its trace events are another tool's")
    facts = make_facts(reading, analysis, span)
    return replace(facts, verdict=verdict(facts)), analysis


def verdict(facts: TimelineFacts) -> list[TimelineFinding]:
    """Return the findings, the most important one first."""
    open_at_end, steps = _unfinished(facts), facts.steps
    if not open_at_end:
        return _completed(facts)
    # A killed run leaves bars open too, but no longer than the length of its steps.
    longest = steps.slowest[0].seconds if steps else facts.seconds / 2
    hung = open_at_end[0].seconds > longest
    if facts.file.closed and not hung:
        return _completed(facts)  # the recording was stopped while ranks began the next step
    if not facts.phases:
        return open_at_end
    completed = _completed(facts)
    return [*open_at_end, *completed] if hung or not steps else [*completed, *open_at_end]


def _completed(facts: TimelineFacts) -> list[TimelineFinding]:
    """Return the findings on completed bars and steps."""
    if not facts.phases:
        when = "in the slice" if facts.file.slice else "while it recorded"
        text = f"no tensor was submitted to Horovod {when}"
        if facts.file.bars_begin:
            text = "the file does not contain the end of any tensor's bars"
        return [_too_little(text)]
    if facts.ranks == 1 and facts.lateness.negotiations:
        text = "a single rank, which exchanges no gradients"
        return [_too_little(text, "record a run of several ranks")]
    if not facts.steps:
        return [_too_little("no tensor occurs twice, so there are no steps")]
    findings = [
        *_lateness(facts, facts.steps),
        *_communication(facts.steps),
        *_cycles(facts, facts.steps),
    ]
    if findings:
        return sorted(findings, key=lambda finding: -finding.seconds)
    shares = {name: percent(state.share) for name, state in facts.steps.states.items()}
    text = (
        f"it is idle for {shares['neither']} of the time, communicates for "
        f"{shares['communicating']}, and a rank waits for another for {shares['waiting']}"
    )
    advice = "speed up computing and data loading"
    return [_finding("nothing wrong", 0.0, 0.0, text, advice)]


def _too_little(text: str, advice: str = "record several training steps") -> TimelineFinding:
    return _finding("too little", 0.0, 0.0, text, advice)


def _unfinished(facts: TimelineFacts) -> list[TimelineFinding]:
    """Return a finding on tensors open at the end of the file; none for a slice, which has some."""
    rows, window = facts.open, facts.file.slice
    if not rows or (window and window[1] is not None):
        return []
    late = sorted({rank for row in rows for rank in row.missing or ()})
    target = f"what {rank_list(late)} did" if late else "the stack of each rank"
    advice = (
        f"if the job hung, check {target}: a rank that died, or called another collective or none, "
        "leaves the others waiting; the file of a killed or running job ends like this, too"
    )
    text = _sentence(rows, facts.file.open_tensors)
    seconds = rows[0].seconds
    share = seconds / facts.seconds if facts.seconds else 0.0
    return [Unfinished(**vars(_finding("unfinished", seconds, share, text, advice)), ranks=late)]


def _finding(kind: str, seconds: float, share: float, text: str, advice: str) -> TimelineFinding:
    return TimelineFinding(kind, seconds, share, f"{HEADS[kind]}: {text}", advice)


def _lateness(facts: TimelineFacts, steps: StepFacts) -> list[TimelineFinding]:
    lateness, total = facts.lateness, steps.seconds.total
    waiting = steps.states["waiting"]
    if not lateness.recorded:
        if waiting.share < NOTABLE or facts.ranks == 1:
            return []
        text = (
            f"for {percent(waiting.share)} of the time a tensor waits for some rank; the file "
            "does not record which: Horovod's response cache was on"
        )
        advice = f"record again with {NO_CACHE} to see which rank is late"
        return [_finding("ranks wait", waiting.total, waiting.share, text, advice)]
    cost, spread = lateness.cost_seconds, lateness.spread_seconds.total
    worst = max(lateness.ranks, key=lambda row: row.cost_seconds)
    if cost >= LATE * total and worst.cost_seconds > cost / 2:
        return [_straggler(worst, lateness.steps_with_ticks, total)]
    if max(cost, spread - cost) < NOTABLE * total:
        return []
    behind = max(row.behind_first_seconds for row in lateness.ranks)
    slow = [row.rank for row in lateness.ranks if row.behind_first_seconds > behind / 2]
    text = (
        f"the last rank arrives {duration(lateness.spread_seconds.median)} after the first "
        f"in the median step ({percent(spread / total)} of the time), due to no single rank; "
        f"latest on average: {rank_list(slow)}"
    )
    advice = (
        "check what varies on these ranks: data loading, batches of uneven size, other programs "
        "on their hosts, oversubscribed cores"
    )
    return [_finding("uneven ranks", spread, spread / total, text, advice)]


def _straggler(row: RankLateness, steps: int, total: float) -> TimelineFinding:
    share = row.cost_seconds / total
    text = (
        f"rank {row.rank} was ready last in {row.late_steps} of {steps} steps "
        f"({percent(row.late_steps / steps)}), by "
        f"{duration(row.late_in_step_seconds.median)} in the median, "
        f"{duration(row.late_in_step_seconds.mean)} in the mean; that cost "
        f"{duration(row.cost_seconds)} of {duration(total)} ({percent(share)})"
    )
    advice = (
        f"check how rank {row.rank} differs from the others: its host (clock, temperature, "
        "other programs), its data (larger files, slower disk), its part of the batch, work of "
        "this rank only (logging, checkpoints)"
    )
    finding = _finding("straggler", row.cost_seconds, share, text, advice)
    return Straggler(**vars(finding), rank=row.rank)


def _communication(steps: StepFacts) -> list[TimelineFinding]:
    """Judge the exposed communication: is it due to the size or to the number of tensors."""
    exposed = steps.overlap.exposed_seconds
    share = exposed / steps.seconds.total
    operations = steps.operations  # not of the whole file, whose start has other operations
    busy = operations.seconds
    if share < NOTABLE or not busy:
        return []
    small = operations.small_seconds / busy
    summary = (
        f"{percent(share)} of the time is communication not hidden by computing: about "
        f"{operations.count / steps.whole:.1f} operations per step of "
        f"{size(operations.bytes / operations.count)} on average"
    )
    if small > 0.5:
        text = f"{summary}, {percent(small)} of their time in those under 1 MiB"
        advice = (
            "a larger batch per rank, for fewer operations per image; or fewer, larger operations: "
            "raise HOROVOD_FUSION_THRESHOLD (bytes) and, if tensors arrive far apart, "
            "HOROVOD_CYCLE_TIME (ms); or group them (num_groups of DistributedOptimizer)"
        )
        return [_finding("small tensors", exposed, share, text, advice)]
    text = f"{summary}, {size(operations.bytes / busy)}/s"
    advice = (
        "send less, or less often: compression of the gradients to 16 bits, several batches per "
        "update, a larger batch per rank; or a faster network: NCCL between GPUs, the fast network "
        "(NCCL_SOCKET_IFNAME, btl_tcp_if_include)"
    )
    return [_finding("bandwidth", exposed, share, text, advice)]


def _cycles(facts: TimelineFacts, steps: StepFacts) -> list[TimelineFinding]:
    """Judge the cycle time: the last tensor of a step waits half a cycle on average."""
    cycles = facts.cycles
    if not cycles:
        return []
    cycle, step = cycles.configured_estimate_seconds, steps.seconds.median
    wait = cycle / 2
    shorter = max(0.1, round(step * 1e3 / 40, 1))  # ms
    if wait < WAIT * step or shorter >= round(cycle * 1e3, 1):  # no advice would help
        return []
    text = (
        f"Horovod checks for work every {duration(cycle)}, a step takes {duration(step)}, and its "
        f"last tensor waits half a cycle on average ({percent(wait / step)} of the step)"
    )
    advice = f"set HOROVOD_CYCLE_TIME={shorter:g} (ms)"
    return [_finding("cycle time", wait * steps.whole, wait / step, text, advice)]


def _sentence(rows: Sequence[OpenTensor], count: int) -> str:
    """Return a sentence on ``count`` open tensors; ``rows``: the first of them."""
    groups: dict[tuple[str, str], list[OpenTensor]] = {}
    for row in rows:
        groups.setdefault((row.phase, str(row.missing)), []).append(row)
    parts = [_group(group) for group in list(groups.values())[:GROUPS]]
    if len(groups) > GROUPS:
        parts.append("and more")
    head = "a tensor is" if count == 1 else f"{count:,} tensors are"
    return f"{head} open at the end of the file: {'; '.join(parts)}"


def _group(rows: Sequence[OpenTensor]) -> str:
    """Describe tensors that are in the same phase and wait for the same ranks."""
    first = rows[0]
    names = ", ".join(short(row.tensor) for row in rows[:NAMES])
    more = f" and {len(rows) - NAMES:,} more" if len(rows) > NAMES else ""
    # A hung tensor produces no events: the time it was open is known up to the last event only.
    since = f"since {duration(first.since)}, {duration(first.seconds)} before the last event"
    text = f"{names}{more} in {short(first.phase)} {since}"
    if first.kind != NEGOTIATE:
        return text
    if first.ready is None:
        return f"{text}; the file does not record which rank it waits for"
    if first.missing:
        return f"{text}: not submitted by {rank_list(first.missing)}"
    return f"{text}: submitted by {rank_list(first.ready)}, and no other rank is in the file"
