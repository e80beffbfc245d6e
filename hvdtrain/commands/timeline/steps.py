"""Steps of the training, recognized by the recurrence of tensors, and which rank was late in them.

A step begins when a tensor is to be reduced that was already reduced in the step before. Tensors
without a name of their own do not count, nor do broadcasts and gathers. So a step lasts from the
beginning of its first negotiation to that of the next step, and ends with the data and the forward
pass of the next.

A metric that is reduced again and again between the steps must not pass for a step: a step has at
least half as many tensors as the largest one so far. When one with twice as many comes, everything
before it was the start-up.

Rank 0 notes a *tick* for each rank that has submitted a tensor. It does so once per cycle, in the
order of the ranks, so ticks of one cycle have no order: a negotiation whose last two ticks lie in
one cycle (or, in a file without marks of the cycles, less than 1 ms apart, the default length of a
cycle) is a *tie*, and no rank was late in it. Otherwise the rank of the last tick was *late*, by
that tick minus the second-to-last: how much earlier all could have gone on, had this one rank been
as early as the next-to-last. So two slow ranks of three do not hide behind the fast one, and no
rank is blamed for what another one costs too.

A step is *whole* when the next one has begun. The last one never is, nor is the first one if
another tensor came before the one that recurred. Only whole steps are in the statistics.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from hvdtrain.commands.timeline.model import COMMUNICATING, Phase, Tensor
from hvdtrain.commands.timeline.streaming_stats import Sample

SLOWEST = 5  # steps that are listed one by one
UNRESOLVED = 1000.0  # microseconds; HOROVOD_CYCLE_TIME is 1 ms where nobody has set it

Ticks = list[tuple[float, str]]
"""Microseconds and rank, in order of time."""


def is_tie(earlier: float, later: float, cycle: float | None) -> bool:
    """Return whether two ticks have no order; ``cycle``: when the cycle of the later one began."""
    return later - earlier < UNRESOLVED if cycle is None else cycle <= earlier


class Lateness:
    """Lateness per rank over many negotiations, in microseconds."""

    def __init__(self) -> None:
        self.negotiations = 0  # that had ticks of two ranks or more
        self.late: defaultdict[str, Sample] = defaultdict(Sample)  # by rank, where it was late
        self.behind: defaultdict[str, float] = defaultdict(float)  # the first tick, in all

    def add(self, ticks: Ticks, cycle: float | None) -> None:
        """Take the ticks of an ended negotiation; ``cycle``: when the cycle that ended it began."""
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
    """When each rank was ready with its last tensor of a step.

    A step can end when the last rank has submitted its last tensor. So what a late rank costs is
    the latest of these times minus the second-latest; what several tensors wait for at once counts
    once.
    """

    def __init__(self) -> None:
        self.ready: defaultdict[str, float] = defaultdict(float)
        self._cycle: float | None = None

    def clear(self) -> None:
        """Begin a step."""
        self.ready.clear()

    def add(self, ticks: Ticks, cycle: float | None) -> None:
        """Take the ticks of an ended negotiation; ``cycle``: when the cycle that ended it began."""
        ready = self.ready
        for time, rank in ticks:
            if time > ready[rank]:
                ready[rank] = time
        self._cycle = cycle

    def judge(self) -> tuple[str | None, float, float]:
        """Return the straggler of this step (None: a tie), its lateness, and the spread; in µs.

        The spread is from the first rank that was ready to the last.
        """
        if len(self.ready) < 2:
            return None, 0.0, 0.0
        times = sorted(self.ready.values())
        spread = times[-1] - times[0]
        if is_tie(times[-2], times[-1], self._cycle):
            return None, 0.0, spread
        rank = max(self.ready, key=lambda rank: self.ready[rank])
        return rank, times[-1] - times[-2], spread


@dataclass(frozen=True, order=True)
class Step:
    """A whole step; times in microseconds."""

    length: float  # from its beginning to that of the next
    number: int  # the first of the file is 1
    start: float  # on the clock of the file
    late_rank: str | None
    late: float  # by how much


class StepTotals:
    """The part of the running totals that falls into whole steps: operations, and time per phase.

    A file holds more than steps, such as the broadcasts of the start, which can be larger than all
    that the steps do. A bar or an operation counts in the step in which it ends. All it costs is a
    copy of the totals as each step ends. ``totals`` of operations (see ``model``) only grow, to the
    ``phases`` of the whole file new ones are appended.
    """

    def __init__(self, totals: Sequence[float], phases: Mapping[Any, Phase]) -> None:
        self._totals, self._phases = totals, phases
        self.forget()

    def forget(self) -> None:
        """Drop all steps so far: they were the start-up."""
        self._sums: list[float] = []  # of the steps before the last ``begin``
        self._start: list[float] = []
        self._end: list[float] = []

    def begin(self) -> None:
        """Begin a step that follows no other."""
        self._sums = self._all()
        self._start = self._end = self._now()

    def close(self) -> None:
        """End a step and begin the next."""
        self._end = self._now()

    @property
    def operations(self) -> list[float]:
        """Return the totals of the operations in whole steps."""
        return (self._all() or [0.0] * len(self._totals))[: len(self._totals)]

    @property
    def walls(self) -> dict[Phase, float]:
        """Return microseconds of whole steps in which a bar of the phase was open, by phase."""
        return dict(zip(self._phases.values(), self._all()[len(self._totals) :], strict=False))

    def _now(self) -> list[float]:
        return [*self._totals, *[phase.wall for phase in self._phases.values()]]

    def _all(self) -> list[float]:
        columns = zip_longest(self._sums, self._start, self._end, fillvalue=0.0)
        return [before + end - start for before, start, end in columns]


class Steps:
    """Takes the negotiations in the order of the file, and splits them into steps."""

    def __init__(self, step_totals: StepTotals) -> None:
        self.step_totals = step_totals
        self.number = 1  # of the current step
        self.lateness = Lateness()  # of the whole steps, and of the last one
        self.start_up = Lateness()  # of what came before them
        self._last_ready = LastReady()
        self._tensors, self._largest = 0, 0  # of this step, of the largest one
        self._opening: Tensor | None = None  # the first tensor, until the first whole step begins
        self._start = 0.0
        self._before: list[float] = []  # times by state when the step began
        self._overlap = 0.0  # time of communication when the last tensor was ready on all ranks
        self._forget()

    def _forget(self) -> None:
        self.step_totals.forget()
        self.lengths = Sample()
        self.states: list[Sample] = []  # by state, one value per step
        self.overlapped = Sample()  # communicating while some rank still had a tensor to submit
        self.late: dict[str, Sample] = {}  # by rank, over the steps in which it was late
        self.spread = Sample()  # from the first rank that was ready to the last one
        self.ticked = 0  # whole steps whose ticks tell who was late
        self.slowest: list[Step] = []

    def is_next(self, tensor: Tensor) -> bool:
        """Return whether the negotiation of ``tensor``, which begins now, begins a step."""
        if tensor.step != self.number:
            self._tensors += 1
            return self._tensors == 1
        return 2 * self._tensors >= self._largest

    def next(self, tensor: Tensor, time: float, times: list[float]) -> None:
        """Begin a step with ``tensor``; ``times`` are those of the states up to now."""
        if tensor.step != self.number:
            self._opening = tensor  # nothing was before
            self.step_totals.begin()
        else:
            grown = self._largest and self._tensors >= 2 * self._largest
            if grown or self._opening not in (None, tensor):
                self.start_up, self.lateness = self.lateness, Lateness()
                self._forget()
                self.step_totals.begin()
            else:
                self._close(time, times)
            self._opening = None
            self._largest = max(self._largest, self._tensors)
            self.number += 1
            self._tensors = 1
        self._start, self._before, self._overlap = time, list(times), times[COMMUNICATING]
        self._last_ready.clear()

    def break_off(self) -> None:
        """End the current step, which is not whole: another file follows."""
        self.number += self._tensors > 0
        self._tensors = 0

    def handed_in(self, communicated: float) -> None:
        """Note that a tensor is ready on all ranks; ``communicated``: microseconds until now."""
        self._overlap = communicated

    def negotiated(self, ticks: Ticks, cycle: float | None, *, of_step: bool) -> None:
        """Take the ticks of a negotiation that has ended."""
        self.lateness.add(ticks, cycle)
        if of_step:
            self._last_ready.add(ticks, cycle)

    def _close(self, time: float, times: list[float]) -> None:
        length = time - self._start
        if length <= 0:  # the clock of an odd file stands still, or goes back
            return
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
        if len(self.slowest) < SLOWEST or length > self.slowest[0].length:
            heapq.heappush(self.slowest, Step(length, self.number, self._start, rank, late))
            if len(self.slowest) > SLOWEST:
                heapq.heappop(self.slowest)
