"""What the page shows in detail: the single bars of the first part of a timeline."""

from __future__ import annotations

from hvdtrain.timeline.bars import NEGOTIATE, Phase, Tensor
from hvdtrain.timeline.lateness import is_tie

MOST = 150_000  # bars and ticks; a browser draws so many smoothly


class Recorder:
    """Keeps bars and ticks, in the order of their ends, until there are ``MOST``.

    All columns of a table are lists of one length; times are microseconds.
    """

    def __init__(self) -> None:
        self.rows: dict[str, int] = {}  # tensors
        self.phases: dict[Phase, int] = {}
        self.bars: dict[str, list[float]] = {k: [] for k in ("row", "phase", "start", "end")}
        self.ticks: dict[str, list[float]] = {k: [] for k in ("bar", "rank", "time")}
        self.late: list[int] = []  # bars of negotiations in which the last rank was late
        self.steps: dict[str, list[float]] = {k: [] for k in ("number", "start")}
        self.end: float | None = None
        """Up to where there is everything, None: to the end of the file."""

    def step(self, number: int, start: float) -> None:
        """A step has begun."""
        if self.end is None:
            self.steps["number"].append(number)
            self.steps["start"].append(start)

    def bar(
        self, tensor: Tensor, phase: Phase, start: float, end: float, cycle: float | None
    ) -> None:
        """A bar has ended, in the cycle that began at ``cycle``; ``tensor`` has its ticks still."""
        if self.end is not None:
            return
        ticks = tensor.ticks if phase.kind == NEGOTIATE else []
        number = len(self.bars["row"])
        if number + len(self.ticks["bar"]) + len(ticks) >= MOST:
            self.end = end
            return
        row = self.rows.setdefault(tensor.row.name, len(self.rows))
        values = (row, self.phases.setdefault(phase, len(self.phases)), start, end)
        for column, value in zip(self.bars.values(), values, strict=True):
            column.append(value)
        for time, rank in ticks:
            self.ticks["bar"].append(number)
            self.ticks["rank"].append(int(rank))
            self.ticks["time"].append(time)
        if len(ticks) > 1 and not is_tie(ticks[-2][0], ticks[-1][0], cycle):
            self.late.append(number)
