"""Statistics of streams too long to keep: values, and time by state."""

from __future__ import annotations

import itertools
import statistics

KEPT = 1 << 15  # values of a sample
BINS = 1 << 10


class Sample:
    """Count, sum and maximum of all values; the median of all of them up to 32,768.

    Beyond that every second one of those kept is dropped, and from then on only each second value
    is kept, and so on: an even selection over the whole stream, the same from run to run.
    """

    __slots__ = ("_every", "_kept", "count", "maximum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.maximum = 0.0
        self._kept: list[float] = []
        self._every = 1

    def add(self, value: float) -> None:
        """Take one value, 0 or more."""
        if self._every == 1 or self.count % self._every == 0:
            self._kept.append(value)
            if len(self._kept) > KEPT:
                self._kept = self._kept[::2]
                self._every *= 2
        self.count += 1
        self.total += value
        if value > self.maximum:
            self.maximum = value

    @property
    def mean(self) -> float:
        """The mean of all values; 0 of none."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, fraction: float) -> float:
        """The value below which ``fraction`` of the values lie; 0 of none."""
        ordered = sorted(self._kept)
        return ordered[int(fraction * (len(ordered) - 1))] if ordered else 0.0

    @property
    def median(self) -> float:
        """The median; 0 of none."""
        return statistics.median(self._kept) if self._kept else 0.0


class Course:
    """How much of each stretch of time was spent in each of a few states.

    The stretches are equal; when there are too many, two neighbours become one. Times count from 0.
    """

    def __init__(self, states: int) -> None:
        self.width = 10.0  # of a stretch, in the unit of the times given (microseconds)
        self.border = self.width  # end of the stretch that is going on
        self._sums: list[list[float]] = []  # time by state up to the end of each stretch
        self._states = states

    def cross(self, sums: list[float], state: int, since: float, time: float) -> None:
        """Take the borders up to ``time``; to be called when it is at ``border`` or past it.

        Args:
            sums: time by state up to ``since``.
            state: what it was from then on.
        """
        while self.border <= time:
            self._sums.append(list(sums))
            self._sums[-1][state] += self.border - since
            if len(self._sums) > BINS:
                self._sums = self._sums[1::2]
                self.width *= 2
            self.border = (len(self._sums) + 1) * self.width

    def columns(self, sums: list[float]) -> list[list[float]]:
        """Time by state and stretch; ``sums`` are those up to the end."""
        edges = [[0.0] * self._states, *self._sums, sums]
        pairs = list(itertools.pairwise(edges))
        return [[after[s] - before[s] for before, after in pairs] for s in range(self._states)]
