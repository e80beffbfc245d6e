"""``--profile``: steps of a framework's profile beside the same steps of the timeline.

A profile is a trace in Chrome's JSON format with spans ``ProfilerStep#N``, by ``--profile`` of
hvdtrain's trainers or by torch.profiler. Its steps and those of the timeline are matched by time: a
step of the timeline belongs to the update in which the last rank submits its first gradient. At
that moment every rank is in this update, however late one of them is. So the clocks of the two
hosts must agree, to within a step.

The time of an update is split into *communication* that computing does not hide, *computing* (an
operation of the framework runs: on a GPU if its kernels are in the trace, else on the processor)
and the rest. On a processor a rank that waits for the others computes nothing.
"""

from __future__ import annotations

import gzip
import re
import statistics
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from hvdtrain.adapters.profiler import COMMUNICATION, STEP
from hvdtrain.commands.timeline.analyse import Analysis
from hvdtrain.commands.timeline.events import COMMUNICATING, MICRO, WAITING
from hvdtrain.commands.timeline.steps import WholeStep
from hvdtrain.errors import UsageError
from hvdtrain.system.output.tables import TitledTable
from hvdtrain.system.output.text import duration, printable

LARGEST = 2**30  # bytes of a profile without compression
ROWS = 40  # of the table
OPERATION, KERNEL = "cpu_op", "kernel"  # categories of events
ON_GPU = "gpu_user_annotation"  # category of copies of spans, for the kernels started in them
UPDATE = re.compile(rf"{STEP}#(\d+)")
COLLECTIVE = re.compile(r"nccl|gloo:|mpi:|c10d::|Horovod(Grouped)?(All|Broadcast|Reducescatter)")

Spans = list[tuple[float, float]]
"""Disjoint intervals in order of time."""


class Event(msgspec.Struct):
    """An event of a profile; times are microseconds."""

    name: str = ""
    cat: str = ""
    ph: str = ""
    ts: float = 0.0
    dur: float = 0.0


class RankInfo(msgspec.Struct):
    """The rank of a profile."""

    rank: int = 0


class Profile(msgspec.Struct):
    """A profile; ``baseTimeNanoseconds`` is its time 0 since 1970."""

    traceEvents: list[Event]  # noqa: N815 (the keys of the file)
    baseTimeNanoseconds: int = 0  # noqa: N815
    distributedInfo: RankInfo = msgspec.field(default_factory=RankInfo)  # noqa: N815


@dataclass(frozen=True)
class _Update:
    """A span of an update, and the events that begin in it."""

    number: int
    begin: float
    end: float
    events: list[Event]


@dataclass(frozen=True)
class ProfiledStep:
    """Seconds of an update: on the rank of the profile, and in the timeline, None if not in it."""

    step: int
    seconds: float
    computing_seconds: float
    communication_seconds: float
    other_seconds: float
    timeline_step: int | None = None
    timeline_seconds: float | None = None
    communicating_seconds: float | None = None
    waiting_seconds: float | None = None


@dataclass(frozen=True)
class ProfileFacts:
    """The steps of a profile."""

    path: str
    rank: int
    steps: list[ProfiledStep]


def profile_facts(path: Path, timeline: Path, analysis: Analysis) -> ProfileFacts:
    """Return the steps of the profile at ``path``, with those of the ``timeline``.

    Raises:
        UsageError: it is no profile with steps, or of another run.
    """
    profile = read(path)
    whole = analysis.steps.kept or []
    shift = (1000 * (analysis.epoch or 0) - profile.baseTimeNanoseconds) / 1000
    times = [step.ready + shift for step in whole]
    steps = []
    for update in _updates(profile, path):
        first = bisect_left(times, update.begin)
        is_in = first < len(times) and times[first] < update.end
        steps.append(_step(update, whole[first] if is_in else None))
    if all(step.timeline_step is None for step in steps):
        raise UsageError(
            f"{path}: none of its steps is in {timeline}: record both in one run, e.g. with "
            "--timeline-steps 20:40 --profile 20:40"
        )
    return ProfileFacts(str(path), profile.distributedInfo.rank, steps)


def read(path: Path) -> Profile:
    """Read a profile, gzipped or not.

    Raises:
        UsageError: it cannot be read, or is not one.
    """
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            with gzip.open(file) if compressed else file as content:
                data = content.read(LARGEST + 1)
        if len(data) > LARGEST:
            raise UsageError(f"{path} is too large: profile fewer updates")
        return msgspec.json.decode(data, type=Profile)
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {reason}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is no profile in Chrome's JSON format: {error}") from error


def _updates(profile: Profile, path: Path) -> list[_Update]:
    """Return the updates in order of time, each with the events that begin in it."""
    events = [event for event in profile.traceEvents if event.ph == "X" and event.cat != ON_GPU]
    matches = ((event, UPDATE.fullmatch(event.name)) for event in events)
    updates = [_Update(int(m[1]), e.ts, e.ts + e.dur, []) for e, m in matches if m]
    if not updates:
        raise UsageError(f"{path} has no spans ProfilerStep#N: record it with --profile A:B")
    updates.sort(key=lambda update: update.begin)
    begins = [update.begin for update in updates]
    for event in events:
        index = bisect_right(begins, event.ts) - 1
        if index >= 0 and event.ts < updates[index].end:
            updates[index].events.append(event)
    return updates


def _step(update: _Update, match: WholeStep | None) -> ProfiledStep:
    """Split the time of an update, and add the step of the timeline."""
    kind = KERNEL if any(event.cat == KERNEL for event in update.events) else OPERATION
    blocked, collective, computing = list[Event](), list[Event](), list[Event]()
    for event in update.events:
        if event.name.startswith(COMMUNICATION):
            blocked.append(event)
        elif COLLECTIVE.search(event.name):
            if kind == OPERATION or event.cat == KERNEL:  # else it only starts a kernel
                collective.append(event)
        elif event.cat == kind:
            computing.append(event)
    waits, messages, work = (_union(e, update.end) for e in (blocked, collective, computing))
    if kind == KERNEL:
        exposed = _without(_merged([*waits, *messages]), work)
    else:
        work = _without(work, waits)
        exposed = _merged([*waits, *_without(messages, work)])
    length, computed, communicated = (
        MICRO * time for time in (update.end - update.begin, _length(work), _length(exposed))
    )
    step = ProfiledStep(
        step=update.number,
        seconds=length,
        computing_seconds=computed,
        communication_seconds=communicated,
        other_seconds=length - computed - communicated,
    )
    if match is None:
        return step
    return replace(
        step,
        timeline_step=match.step,
        timeline_seconds=(match.end - match.start) * MICRO,
        communicating_seconds=match.states[COMMUNICATING] * MICRO,
        waiting_seconds=match.states[WAITING] * MICRO,
    )


def _union(events: Iterable[Event], end: float) -> Spans:
    return _merged((event.ts, min(end, event.ts + event.dur)) for event in events)


def _merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """Return the time that is in any of ``spans``."""
    result: Spans = []
    for begin, end in sorted(spans):
        if result and begin <= result[-1][1]:
            result[-1] = (result[-1][0], max(end, result[-1][1]))
        else:
            result.append((begin, end))
    return result


def _without(spans: Spans, removed: Spans) -> Spans:
    """Return the time in ``spans`` that is not in ``removed``."""
    result: Spans = []
    first = 0
    for begin, end in spans:
        while first < len(removed) and removed[first][1] <= begin:
            first += 1
        index = first  # an interval may reach into several spans
        while index < len(removed) and removed[index][0] < end:
            low, high = removed[index]
            if begin < low:
                result.append((begin, low))
            begin = high
            index += 1
        if begin < end:
            result.append((begin, end))
    return result


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)


def table(facts: ProfileFacts) -> TitledTable:
    """Return the steps, and their mean."""
    rows = [[str(step.step), *_cells([step])] for step in facts.steps[:ROWS]]
    if len(facts.steps) > 1:
        rows.append(["mean", *_cells(facts.steps)])
    others = len(facts.steps) - ROWS
    return TitledTable(
        f"Updates of rank {facts.rank} in {printable(facts.path)}, and their steps in the timeline",
        ["", "update", "computing", "communication", "other", "step", "communicating", "waiting"],
        rows,
        note=f"and {others} more updates" if others > 0 else "",
    )


def _cells(steps: Sequence[ProfiledStep]) -> list[str]:
    columns = [
        [
            step.seconds,
            step.computing_seconds,
            step.communication_seconds,
            step.other_seconds,
            step.timeline_seconds,
            step.communicating_seconds,
            step.waiting_seconds,
        ]
        for step in steps
    ]
    known = [[v for v in column if v is not None] for column in zip(*columns, strict=True)]
    return [duration(statistics.fmean(values)) if values else "-" for values in known]
