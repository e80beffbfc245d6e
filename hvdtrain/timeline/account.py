"""What of the running totals falls into whole steps: operations, and the time of each phase.

A file holds more than steps, the broadcasts of the start for one, and these can be larger than all
that the steps do: what is said of the steps must not count them. A bar or an operation counts in
the step in which it ends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

from hvdtrain.timeline.bars import Phase


class Account:
    """Adds up what whole steps add to totals that others keep.

    A look at all totals as each step ends is all that it costs: the next one begins there.

    Args:
        totals: of operations, see ``fusion``; they only grow.
        phases: all of them; more may come, at the end.
    """

    def __init__(self, totals: Sequence[float], phases: Mapping[Any, Phase]) -> None:
        self._totals, self._phases = totals, phases
        self.forget()

    def forget(self) -> None:
        """What was taken for steps was none."""
        self._sums: list[float] = []  # of the steps before those that are going on
        self._start: list[float] = []
        self._end: list[float] = []

    def begin(self) -> None:
        """A step begins where none ends."""
        self._sums = self._all()
        self._start = self._end = self._now()

    def close(self) -> None:
        """A step ends, and another one begins."""
        self._end = self._now()

    @property
    def operations(self) -> list[float]:
        """What of the totals of operations is of whole steps."""
        return (self._all() or [0.0] * len(self._totals))[: len(self._totals)]

    @property
    def walls(self) -> dict[Phase, float]:
        """By phase, microseconds of whole steps in which one of its bars was open."""
        return dict(zip(self._phases.values(), self._all()[len(self._totals) :], strict=False))

    def _now(self) -> list[float]:
        return [*self._totals, *[phase.wall for phase in self._phases.values()]]

    def _all(self) -> list[float]:
        columns = zip_longest(self._sums, self._start, self._end, fillvalue=0.0)
        return [before + end - start for before, start, end in columns]
