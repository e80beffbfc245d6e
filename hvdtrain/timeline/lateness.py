"""Who was late: the ranks' ticks in the negotiations.

When a rank has handed a tensor in, rank 0 notes a tick. It does so once a cycle, for all that came
since the last one and in the order of the ranks, so ticks of one cycle tell no order: a negotiation
whose last two ticks lie in one cycle (or, in a file without marks of the cycles, less than 1 ms
apart, the length of a cycle unless told otherwise) is a *tie*, and nobody was late in it.

Else the rank of the last tick was late, by that tick minus the second-to-last: how much earlier all
could have gone on, had this one rank been as early as the next-to-last. So two slow ranks of
three do not hide behind the fast one, and a rank is never blamed for what another one costs too.
"""

from __future__ import annotations

from collections import defaultdict

from hvdtrain.timeline.samples import Sample

Ticks = list[tuple[float, str]]
"""Microseconds and rank, in order of time."""

UNRESOLVED = 1000.0  # microseconds; HOROVOD_CYCLE_TIME is 1 ms where nobody has set it


def is_tie(earlier: float, later: float, cycle: float | None) -> bool:
    """Whether two ticks tell no order; ``cycle`` began last before the later one."""
    return later - earlier < UNRESOLVED if cycle is None else cycle <= earlier


class Lateness:
    """Lateness by rank over many negotiations.

    Attributes:
        negotiations: those with ticks of two ranks or more.
        late: by rank, by how much it was late where it was (microseconds).
        behind: by rank, the sum over all negotiations of its tick minus the first one.
    """

    def __init__(self) -> None:
        self.negotiations = 0
        self.late: defaultdict[str, Sample] = defaultdict(Sample)
        self.behind: defaultdict[str, float] = defaultdict(float)

    def add(self, ticks: Ticks, cycle: float | None) -> None:
        """Take the ticks of a negotiation that has ended; ``cycle`` is when the last one began."""
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

    A step can end when the last rank has handed in its last tensor, so this tells, without counting
    twice what several tensors wait for at once, what a late rank costs: the latest of these times
    minus the latest but one.
    """

    def __init__(self) -> None:
        self.ready: defaultdict[str, float] = defaultdict(float)
        self._cycle: float | None = None

    def clear(self) -> None:
        """A step begins."""
        self.ready.clear()

    def add(self, ticks: Ticks, cycle: float | None) -> None:
        """Take the ticks of a negotiation that has ended; ``cycle`` is when the last one began."""
        ready = self.ready
        for time, rank in ticks:
            if time > ready[rank]:
                ready[rank] = time
        self._cycle = cycle

    def judge(self) -> tuple[str | None, float, float]:
        """Who was late in this step, None if nobody was; by how much; first to last rank.

        Both times in microseconds.
        """
        if len(self.ready) < 2:
            return None, 0.0, 0.0
        times = sorted(self.ready.values())
        spread = times[-1] - times[0]
        if is_tie(times[-2], times[-1], self._cycle):
            return None, 0.0, spread
        rank = max(self.ready, key=lambda rank: self.ready[rank])
        return rank, times[-1] - times[-2], spread
