"""Statistics of streams too long to store: of values, and of time by state."""

from __future__ import annotations

import itertools
import statistics
from array import array

KEPT = 1 << 13  # number of values kept of a sample
BINS = 1 << 10


class Sample:
    """Count, sum and maximum of a stream of values, and its quantiles.

    Quantiles are exact up to 8,192 values. Beyond, every second value is dropped, repeatedly: an
    even, deterministic selection of the whole stream.
    """

    __slots__ = ("_count", "_every", "_kept", "_maximum", "_new", "_total")

    def __init__(self) -> None:
        self._count = 0
        self._total = 0.0
        self._maximum = 0.0
        self._every = 1
        self._kept = array("d")
        self._new = array("d")  # values that are not in the other fields yet

    def add(self, value: float) -> None:
        """Add a value, 0 or more."""
        self._new.append(value)
        if len(self._new) > KEPT:
            self._settle()

    def _settle(self) -> None:
        if not self._new:
            return
        self._kept.extend(self._new[-self._count % self._every :: self._every])
        self._count += len(self._new)
        self._total += sum(self._new)
        self._maximum = max(self._maximum, max(self._new))
        self._new = array("d")
        while len(self._kept) > KEPT:
            self._kept = self._kept[::2]
            self._every *= 2

    @property
    def count(self) -> int:
        """Return the number of values."""
        return self._count + len(self._new)

    @property
    def total(self) -> float:
        """Return the sum of the values."""
        self._settle()
        return self._total

    @property
    def maximum(self) -> float:
        """Return the largest value; 0 if there are none."""
        self._settle()
        return self._maximum

    @property
    def mean(self) -> float:
        """Return the mean; 0 if there are no values."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, fraction: float) -> float:
        """Return the quantile for ``fraction``; 0 if there are no values."""
        self._settle()
        ordered = sorted(self._kept)
        return ordered[int(fraction * (len(ordered) - 1))] if ordered else 0.0

    @property
    def median(self) -> float:
        """Return the median; 0 if there are no values."""
        self._settle()
        return statistics.median(self._kept) if self._kept else 0.0


class StateHistory:
    """Time by state, in equal intervals of the time of a file.

    Beyond ``BINS`` intervals, neighbours are merged in pairs. Times count from 0.
    """

    def __init__(self, states: int) -> None:
        self.width = 10.0  # of an interval, in the unit of the times (microseconds)
        self.border = self.width  # end of the current interval
        self._sums: list[list[float]] = []  # time by state up to the end of each interval
        self._states = states

    def extend(self, sums: list[float], state: int, since: float, time: float) -> None:
        """Complete the intervals that end by ``time``; call when ``time >= border``.

        ``sums`` is the time by state up to ``since``, when ``state`` began.
        """
        while self.border <= time:
            self._sums.append(list(sums))
            self._sums[-1][state] += self.border - since
            if len(self._sums) > BINS:
                self._sums = self._sums[1::2]
                self.width *= 2
            self.border = (len(self._sums) + 1) * self.width

    def columns(self, sums: list[float]) -> list[list[float]]:
        """Return the time by state and interval; ``sums``: time by state up to the end."""
        edges = [[0.0] * self._states, *self._sums, sums]
        pairs = list(itertools.pairwise(edges))
        return [[after[s] - before[s] for before, after in pairs] for s in range(self._states)]
