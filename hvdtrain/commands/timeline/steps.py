"""Training steps, recognized by the recurrence of tensors, and the rank that was late in each.

A step begins when a tensor is negotiated that was already reduced in the current step. Unnamed
tensors, broadcasts and gathers do not count. So a step lasts from the beginning of its first
negotiation to that of the next step, and ends with the data loading and the forward pass of the
next.

A metric that is reduced repeatedly between the steps must not count as a step: a step has at
least half as many tensors as the largest one so far. When a step has twice as many, everything
before it was the start-up.

Rank 0 records a *tick* for each rank that has submitted a tensor. It does so once per cycle, in
rank order, so ticks of one cycle are not ordered in time: a negotiation whose last two ticks are in
one cycle (or, if cycles are not marked in the file, less than 1 ms apart, the default cycle time)
is a *tie*, and no rank was late in it. Otherwise the rank of the last tick was *late*, by that tick
minus the second-to-last: the time that all ranks would have saved, had this rank been as early as
the second-to-last. So two slow ranks of three do not hide behind the fast one, and no rank is
blamed for a cost that it shares with another.

A step is *whole* when the next one has begun. The last step never is, nor is the first one if
another tensor preceded the one that recurred. The statistics include whole steps only.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

from hvdtrain.commands.timeline.events import (
    COMMUNICATING,
    MICRO,
    STATES,
    Operations,
    Phase,
    Sample,
    Tensor,
    TimeStatistics,
)

SLOWEST = 5  # number of steps listed individually
SUMS = 4  # number of ``Operations.sums``
UNRESOLVED = 1000.0  # microseconds: the default of HOROVOD_CYCLE_TIME

Ticks = list[tuple[float, str]]
"""Microseconds and rank, sorted by time."""


def is_tie(earlier: float, later: float, cycle: float | None) -> bool:
    """Return whether two ticks are not ordered; ``cycle``: start of the later one's cycle."""
    return later - earlier < UNRESOLVED if cycle is None else cycle <= earlier


class Lateness:
    """Lateness per rank over many negotiations, in microseconds."""

    def __init__(self) -> None:
        self.negotiations = 0  # with ticks of two ranks or more
        self.late: defaultdict[str, Sample] = defaultdict(Sample)  # by rank
        self.behind: defaultdict[str, float] = defaultdict(float)  # sum after the first tick

    def add(self, ticks: Ticks, cycle: float | None) -> None:
        """Add the ticks of an ended negotiation; ``cycle``: start of the cycle that ended it."""
        if len(ticks) < 2:
            return
        self.negotiations += 1
        first = ticks[0][0]
        behind = self.behind
        for time, rank in ticks:
            behind[rank] += time - first
        (earlier, _), (later, rank) = ticks[-2:]
        if not is_tie(earlier, later, cycle):
            self.late[rank].add(later - earlier)


class LastReady:
    """Times at which each rank was ready with its last tensor of a step.

    A step can end when the last rank has submitted its last tensor. So the cost of a late rank is
    the latest of these times minus the second-latest; simultaneous waits of several tensors count
    once.
    """

    def __init__(self) -> None:
        self.ready: defaultdict[str, float] = defaultdict(float)
        self._cycle: float | None = None

    def clear(self) -> None:
        """Begin a step."""
        self.ready.clear()

    def add(self, ticks: Ticks, cycle: float | None) -> None:
        """Add the ticks of an ended negotiation; ``cycle``: start of the cycle that ended it."""
        ready = self.ready
        for time, rank in ticks:
            if time > ready[rank]:
                ready[rank] = time
        self._cycle = cycle

    def judge(self) -> tuple[str | None, float, float]:
        """Return the straggler of this step (None: a tie), its lateness, and the spread; in µs.

        The spread is the time from the first ready rank to the last.
        """
        if len(self.ready) < 2:
            return None, 0.0, 0.0
        times = sorted(self.ready.values())
        spread = times[-1] - times[0]
        if is_tie(times[-2], times[-1], self._cycle):
            return None, 0.0, spread
        rank = max(self.ready, key=lambda rank: self.ready[rank])
        return rank, times[-1] - times[-2], spread


@dataclass(frozen=True)
class StateTimes(TimeStatistics):
    """Times of a state of rank 0 in whole steps."""

    share: float  # of the time of the whole steps


@dataclass(frozen=True)
class Overlap:
    """Communication in whole steps, by whether computing hides it."""

    overlapped_seconds: float
    exposed_seconds: float
    overlapped_share: float | None


@dataclass(frozen=True)
class StepOperations:
    """All operations in whole steps."""

    count: int
    bytes: int
    seconds: float
    small_seconds: float


@dataclass(frozen=True, order=True)
class SlowStep:
    """One of the slowest whole steps."""

    step: int  # the first one of the file is 1
    start: float  # since the first event of the file
    seconds: float
    late_rank: int | None
    late_seconds: float


@dataclass(frozen=True)
class StepFacts:
    """The whole steps."""

    seen: int
    whole: int
    seconds: TimeStatistics
    states: dict[str, StateTimes]
    overlap: Overlap
    operations: StepOperations
    slowest: list[SlowStep]


@dataclass(frozen=True)
class RankLateness:
    """How late a rank was: in the steps, and in all negotiations."""

    rank: int
    late_steps: int
    late_steps_share: float | None
    late_in_step_seconds: TimeStatistics
    cost_seconds: float
    late_negotiations: int
    late_negotiations_share: float
    late_in_negotiation_seconds: TimeStatistics
    behind_first_seconds: float


@dataclass(frozen=True)
class LatenessFacts:
    """How late the ranks were; ``recorded``: whether the file records it for most steps."""

    negotiations: int
    with_ticks: int
    steps_with_ticks: int
    recorded: bool
    cost_seconds: float
    spread_seconds: TimeStatistics
    ranks: list[RankLateness]


class StepTotals:
    """The part of the running totals that belongs to whole steps: operations, and time per phase.

    A file contains more than steps, e.g. the initial broadcasts, which may be larger than all
    operations of the steps. A bar or an operation counts in the step in which it ends. The cost is
    a copy of the totals at the end of each step. The sums of ``operations`` only grow, new
    ``phases`` are appended to those of the whole file.
    """

    def __init__(self, operations: Mapping[str, Operations], phases: Mapping[Any, Phase]) -> None:
        self._operations, self._phases = operations, phases
        self.begin()

    def begin(self) -> None:
        """Begin a step, and drop those before it: they were the start-up."""
        self._sums: list[float] = []  # of the whole steps
        self._start = self._now()  # of the file, when the current step began

    def close(self) -> None:
        """End a step and begin the next."""
        now = self._now()
        columns = zip_longest(self._sums, self._start, now, fillvalue=0.0)
        self._sums = [total + end - start for total, start, end in columns]
        self._start = now

    @property
    def operations(self) -> list[float]:
        """Return the ``Operations.sums`` over whole steps."""
        return self._sums[:SUMS]

    @property
    def walls(self) -> dict[Phase, float]:
        """Return the microseconds within whole steps in which a bar was open, by phase."""
        return dict(zip(self._phases.values(), self._sums[SUMS:], strict=False))

    def _now(self) -> list[float]:
        sums = zip([0.0] * SUMS, *(each.sums for each in self._operations.values()), strict=True)
        return [*map(sum, sums), *(phase.wall for phase in self._phases.values())]


class Steps:
    """Splits the negotiations, in file order, into steps."""

    def __init__(self, step_totals: StepTotals) -> None:
        self.step_totals = step_totals
        self.number = 1  # of the current step
        self.lateness = Lateness()  # of the whole steps, and of the last one
        self.start_up = Lateness()  # of the negotiations before them
        self._last_ready = LastReady()
        self._tensors, self._largest = 0, 0  # number of tensors of this step, of the largest one
        self._opening: Tensor | None = None  # the first tensor, until the first whole step begins
        self._start = 0.0
        self._before: list[float] = []  # times by state when the step began
        self._overlap = 0.0  # time of communication when the last tensor was ready on all ranks
        self._reset()

    def _reset(self) -> None:
        self.step_totals.begin()
        self.lengths = Sample()
        self.states: list[Sample] = []  # by state, one value per step
        self.overlapped = Sample()  # communicating while some rank still had a tensor to submit
        self.late: dict[str, Sample] = {}  # by rank, over the steps in which it was late
        self.spread = Sample()  # from the first ready rank to the last
        self.ticked = 0  # number of whole steps with ticks of two ranks or more
        # By length; their starts are microseconds on the clock of the file.
        self.slowest: list[tuple[float, SlowStep]] = []

    def is_next(self, tensor: Tensor) -> bool:
        """Return whether the negotiation of ``tensor`` begins a step."""
        if tensor.step != self.number:
            self._tensors += 1
            return self._tensors == 1
        return 2 * self._tensors >= self._largest

    def next(self, tensor: Tensor, time: float, times: list[float]) -> None:
        """Begin a step with ``tensor``; ``times``: by state, up to now."""
        if tensor.step != self.number:
            self._opening = tensor  # the first tensor of all
            self.step_totals.begin()
        else:
            grown = self._largest and self._tensors >= 2 * self._largest
            if grown or self._opening not in (None, tensor):
                self.start_up, self.lateness = self.lateness, Lateness()
                self._reset()
            else:
                self._close(time, times)
            self._opening = None
            self._largest = max(self._largest, self._tensors)
            self.number += 1
            self._tensors = 1
        self._start = time
        self._before, self._overlap = list(times), times[COMMUNICATING]
        self._last_ready.clear()

    def submitted(self, communicated: float) -> None:
        """Record that a tensor is ready everywhere; ``communicated``: microseconds until now."""
        self._overlap = communicated

    def negotiated(self, ticks: Ticks, cycle: float | None, *, of_step: bool) -> None:
        """Add the ticks of a negotiation that has ended."""
        self.lateness.add(ticks, cycle)
        if of_step:
            self._last_ready.add(ticks, cycle)

    def _close(self, time: float, times: list[float]) -> None:
        length = time - self._start
        self.lengths.add(length)
        self.step_totals.close()
        self.states = self.states or [Sample() for _ in times]
        for sample, before, now in zip(self.states, self._before, times, strict=True):
            sample.add(now - before)
        self.overlapped.add(self._overlap - self._before[COMMUNICATING])
        self.ticked += len(self._last_ready.ready) > 1
        rank, late, spread = self._last_ready.judge()
        self.spread.add(spread)
        if rank is not None:
            self.late.setdefault(rank, Sample()).add(late)
        if len(self.slowest) < SLOWEST or length > self.slowest[0][0]:
            late_rank = None if rank is None else int(rank)
            slow = SlowStep(self.number, self._start, length * MICRO, late_rank, late * MICRO)
            heapq.heappush(self.slowest, (length, slow))
            if len(self.slowest) > SLOWEST:
                heapq.heappop(self.slowest)

    def facts(self, origin: float) -> StepFacts | None:
        """Return the whole steps; ``origin``: time of the first event; None if there are none."""
        if not self.lengths.count:
            return None
        communicating, overlapped = self.states[COMMUNICATING].total, self.overlapped.total
        count, nbytes, time, small = self.step_totals.operations
        return StepFacts(
            seen=self.number,
            whole=self.lengths.count,
            seconds=self.lengths.times,
            states={
                name: StateTimes(
                    **vars(sample.times), share=sample.total / (self.lengths.total or 1)
                )
                for name, sample in zip(STATES, self.states, strict=True)
            },
            overlap=Overlap(
                overlapped_seconds=overlapped * MICRO,
                exposed_seconds=(communicating - overlapped) * MICRO,
                overlapped_share=overlapped / communicating if communicating else None,
            ),
            operations=StepOperations(int(count), int(nbytes), time * MICRO, small * MICRO),
            slowest=[
                replace(step, start=(step.start - origin) * MICRO)
                for _, step in sorted(self.slowest, reverse=True)
            ],
        )

    def lateness_facts(self, negotiations: int) -> LatenessFacts:
        """Return how late the ranks were; ``negotiations``: number of those in the file."""
        lateness = self.lateness if self.lateness.negotiations else self.start_up
        rows = []
        for rank in sorted(lateness.behind, key=int):
            step, late = self.late.get(rank, Sample()), lateness.late.get(rank, Sample())
            row = RankLateness(
                rank=int(rank),
                late_steps=step.count,
                late_steps_share=step.count / self.ticked if self.ticked else None,
                late_in_step_seconds=step.times,
                cost_seconds=step.total * MICRO,
                late_negotiations=late.count,
                late_negotiations_share=late.count / lateness.negotiations,
                late_in_negotiation_seconds=late.times,
                behind_first_seconds=lateness.behind[rank] / lateness.negotiations * MICRO,
            )
            rows.append(row)
        return LatenessFacts(
            negotiations=negotiations,
            with_ticks=self.lateness.negotiations + self.start_up.negotiations,
            steps_with_ticks=self.ticked,
            # With its response cache on, Horovod records ticks in the first steps only.
            recorded=bool(rows) and self.ticked > 0 and 2 * self.ticked >= self.lengths.count,
            cost_seconds=sum(row.cost_seconds for row in rows),
            spread_seconds=self.spread.times,
            ranks=rows,
        )
