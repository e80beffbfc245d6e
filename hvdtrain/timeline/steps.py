"""Steps of the training, told by the recurrence of tensors.

A step begins when a tensor is to be summed that was already summed in the step before. Tensors
without a name of their own do not count, nor do broadcasts and gathers. So a step goes from the
beginning of its first negotiation to that of the next step: forward pass, data and everything else
between are the end of it.

A metric that is summed again and again between the steps must not be taken for them: a step has at
least half as many tensors as the largest one so far. Where one comes that has twice as many, all
before it was no step but the start-up.

A step is *whole* when the next one has begun. The last one never is, nor is the first one if
another tensor came before the one that came back. Only whole steps are in the statistics.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from hvdtrain.timeline.account import Account
from hvdtrain.timeline.bars import COMMUNICATING, Tensor
from hvdtrain.timeline.lateness import LastReady, Lateness, Ticks
from hvdtrain.timeline.samples import Sample

SLOWEST = 5  # steps that are told one by one


@dataclass(frozen=True, order=True)
class Step:
    """A whole step; times in microseconds."""

    length: float
    """From its beginning to that of the next."""
    number: int
    """The first of the file is 1."""
    start: float
    """When it began, on the clock of the file."""
    late_rank: str | None
    """Who was late in it, see ``lateness``."""
    late: float
    """By how much."""


class Steps:
    """Takes the negotiations in the order of the file; ``account`` is told of the whole steps."""

    def __init__(self, account: Account) -> None:
        self.account = account
        self.number = 1  # of the step that is going on
        self.lateness = Lateness()  # of the whole steps, and of the last one
        self.start_up = Lateness()  # of what came before them
        self._last_ready = LastReady()
        self._tensors, self._largest = 0, 0  # of this step, of the largest one
        self._opening: Tensor | None = None  # the first tensor, until the first whole step begins
        self._start = 0.0
        self._before: list[float] = []  # times by state when the step began
        self._overlap = 0.0  # time of communication when the last tensor was handed in
        self._forget()

    def _forget(self) -> None:
        self.account.forget()
        self.lengths = Sample()
        self.states: list[Sample] = []  # by state, a value a step
        self.overlapped = Sample()  # communicating while some rank still had a tensor to come
        self.late: dict[str, Sample] = {}  # by rank, over the steps in which it was late
        self.spread = Sample()  # from the first rank that was ready to the last one
        self.ticked = 0  # whole steps whose ticks tell who was late
        self.slowest: list[Step] = []

    def is_next(self, tensor: Tensor) -> bool:
        """Whether the negotiation of ``tensor``, which begins now, begins a step."""
        if tensor.step != self.number:
            self._tensors += 1
            return self._tensors == 1
        return 2 * self._tensors >= self._largest

    def next(self, tensor: Tensor, time: float, times: list[float]) -> None:
        """``tensor`` begins a step; ``times`` are those of the states up to now."""
        if tensor.step != self.number:
            self._opening = tensor  # nothing was before
            self.account.begin()
        else:
            grown = self._largest and self._tensors >= 2 * self._largest
            if grown or self._opening not in (None, tensor):
                self.start_up, self.lateness = self.lateness, Lateness()
                self._forget()
                self.account.begin()
            else:
                self._close(time, times)
            self._opening = None
            self._largest = max(self._largest, self._tensors)
            self.number += 1
            self._tensors = 1
        self._start, self._before, self._overlap = time, list(times), times[COMMUNICATING]
        self._last_ready.clear()

    def break_off(self) -> None:
        """Another file follows; the step that was going on is not whole."""
        self.number += self._tensors > 0
        self._tensors = 0

    def handed_in(self, communicated: float) -> None:
        """The last rank has handed a tensor in; so long has been communicated until now."""
        self._overlap = communicated

    def negotiated(self, ticks: Ticks, cycle: float | None, *, of_step: bool) -> None:
        """A negotiation has ended; see ``lateness``."""
        self.lateness.add(ticks, cycle)
        if of_step:
            self._last_ready.add(ticks, cycle)

    def _close(self, time: float, times: list[float]) -> None:
        length = time - self._start
        if length <= 0:  # the clock of an odd file stands still, or goes back
            return
        self.lengths.add(length)
        self.account.close()
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
