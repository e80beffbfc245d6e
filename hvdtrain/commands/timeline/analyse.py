"""Analysis of a timeline, event by event: bars, operations, cycles, states.

``events`` has the definitions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

from hvdtrain.commands.timeline.events import (
    COLLECTIVE,
    COMMUNICATING,
    NEGOTIATE,
    NEITHER,
    OPERATION,
    WAITING,
    Fusion,
    Phase,
    Rows,
    Sample,
    Tensor,
)
from hvdtrain.commands.timeline.read import Event
from hvdtrain.commands.timeline.steps import Steps, StepTotals, is_tie

# Errors caused by events that are not Horovod's, or whose beginning or name is not in the file.
_MALFORMED = (KeyError, IndexError, ValueError)
MAX_RECORDED = 150_000  # bars and ticks; a browser draws this number smoothly


BINS = 1 << 10  # number of intervals of a history


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


class Recorder:
    """Keeps the details of the page: the first ``MAX_RECORDED`` bars and ticks, in order of end.

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
        """Time up to which events are recorded; None: to the end of the file."""

    def step(self, number: int, start: float) -> None:
        """Record the beginning of a step."""
        if self.end is None and len(self.steps["number"]) < MAX_RECORDED:
            self.steps["number"].append(number)
            self.steps["start"].append(start)

    def bar(
        self, tensor: Tensor, phase: Phase, start: float, end: float, cycle: float | None
    ) -> None:
        """Record a bar, which ended in the cycle that began at ``cycle``, and its ticks."""
        if self.end is not None:
            return
        ticks = tensor.ticks if phase.kind == NEGOTIATE else []
        number = len(self.bars["row"])
        if number + len(self.ticks["bar"]) + len(ticks) >= MAX_RECORDED:
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


class Analysis:
    """Processes all events of a file, in order, and keeps the numbers of the report.

    All times are microseconds on the clock of the file. ``recorder`` receives every bar and step.
    """

    def __init__(self, recorder: Recorder | None = None) -> None:
        self.recorder = recorder
        self.events = 0
        self.unfamiliar: Counter[str] = Counter()
        self.headless = 0  # ends and ticks of bars that began before the file or the slice
        self.first: float | None = None
        self.last = 0.0
        self.ranks: set[str] = set()
        self.rows = Rows()
        self.tensors = self.rows.tensors
        self.negotiating = self.working = 0  # bars open now, over all tensors
        self.state, self.since = NEITHER, 0.0
        self.times = [0.0, 0.0, 0.0]  # by state, up to ``since``
        self.history = StateHistory(len(self.times))
        self.fusion = Fusion()
        self.cycle: float | None = None  # start of the current cycle
        self.cycles = Sample()  # lengths of the cycles
        self.steps = Steps(StepTotals(self.fusion.operations, self.rows.phases))
        self.handlers: dict[str, Callable[[Event], None]] = {
            "B": self._begin,
            "E": self._end,
            "X": self._tick,
            "i": self._mark,
            "M": self._metadata,
        }

    def feed(self, events: list[Event]) -> None:
        """Process the next events of the file."""
        if self.first is None:
            self.first = next((event["ts"] for event in events if "ts" in event), None)
            self.since = self.last = self.first or 0
        self.events += len(events)
        handlers = self.handlers
        for event in events:
            try:
                handlers[event["ph"]](event)
            except _MALFORMED:
                self._retry(event)
        self.last = next((e["ts"] for e in reversed(events) if "ts" in e), self.last)

    def finish(self) -> None:
        """Count the time up to the last event."""
        self._switch(self.last)

    # Handlers, one per kind of event

    def _begin(self, event: Event) -> None:
        tensor, name, time = self.tensors[event["pid"]], event["name"], event["ts"]
        cell = tensor.cells.get(name)
        if cell is None:
            cell = self.rows.cell(tensor, name)
        phase = cell.phase
        if not phase.open:
            phase.since = time
        phase.open += 1
        kind = phase.kind
        if kind == COLLECTIVE:
            self.fusion.begin(tensor, phase, time)
        else:
            self.fusion.run = None
            if kind == NEGOTIATE:
                self._begin_negotiation(tensor, phase, time)
            elif kind == OPERATION:
                self._begin_operation(tensor, time)
        tensor.bars.append((cell, time))

    def _begin_negotiation(self, tensor: Tensor, phase: Phase, time: float) -> None:
        if tensor.bars:
            self._abandon(tensor)
        tensor.ticks.clear()
        if tensor.lasting and phase.of_step:
            if self.steps.is_next(tensor):
                self._switch(time)
                self.steps.next(tensor, time, self.times)
                if self.recorder:
                    self.recorder.step(self.steps.number, time)
            tensor.step = self.steps.number
        self.negotiating += 1
        if self.state == NEITHER:
            self._switch(time)

    def _begin_operation(self, tensor: Tensor, time: float) -> None:
        if tensor.bars:
            self._abandon(tensor)
        tensor.operation = None
        self.working += 1
        if self.state != COMMUNICATING:
            self._switch(time)

    def _end(self, event: Event) -> None:
        tensor, time = self.tensors[event["pid"]], event["ts"]
        cell, start = tensor.bars.pop()
        phase = cell.phase
        cell.count += 1
        cell.total += time - start
        phase.open -= 1
        if not phase.open:
            phase.wall += time - phase.since
        kind = phase.kind
        if kind == COLLECTIVE:
            operation = tensor.operation
            if operation:
                operation.end, operation.ended = time, True
        elif kind == NEGOTIATE:
            self._end_negotiation(tensor, phase, time)
        elif kind == OPERATION:
            self._end_operation(tensor, event, time)
        if self.recorder:
            self.recorder.bar(tensor, phase, start, time, self.cycle)
        if kind == NEGOTIATE:
            tensor.ticks.clear()

    def _end_negotiation(self, tensor: Tensor, phase: Phase, time: float) -> None:
        self.negotiating -= 1
        if not self.negotiating and not self.working:
            self._switch(time)
        of_step = tensor.lasting and phase.of_step
        if of_step:
            now = time - self.since if self.working else 0
            self.steps.submitted(self.times[COMMUNICATING] + now)
        if tensor.ticks:
            self.steps.negotiated(tensor.ticks, self.cycle, of_step=of_step)

    def _end_operation(self, tensor: Tensor, event: Event, time: float) -> None:
        self.working -= 1
        if not self.working:
            self._switch(time)
        if tensor.once:
            del self.tensors[event["pid"]]
        if tensor.operation:
            self.fusion.end(tensor, event.get("args"))

    def _tick(self, event: Event) -> None:
        rank, time = event["name"], event["ts"]
        if not rank.isdecimal():
            raise ValueError("not a tick")
        self.ranks.add(rank)
        self.tensors[event["pid"]].ticks.append((time, rank))

    def _mark(self, event: Event) -> None:
        if event["name"] != "CYCLE_START":
            raise ValueError("not a Horovod mark")
        time = event["ts"]
        if self.cycle is not None:
            self.cycles.add(time - self.cycle)
        self.cycle, self.fusion.idle = time, True

    def _metadata(self, event: Event) -> None:
        kind, values = event["name"], event["args"]
        if kind == "process_name" and "name" in values:
            self.rows.add(event["pid"], str(values["name"]))
        elif kind not in ("process_name", "process_sort_index"):
            raise ValueError("not Horovod metadata")

    def _retry(self, event: Event) -> None:
        """Process an event whose tensor's name was lost; count any other as unfamiliar."""
        kind, number = event["ph"], event.get("pid")
        if kind in ("B", "E", "X") and number is not None and number not in self.tensors:
            try:
                self.rows.add_unknown(number)
                return self.handlers[kind](event)
            except _MALFORMED:
                pass
        if kind in ("E", "X"):
            self.headless += 1
        else:
            self.unfamiliar[kind] += 1

    def _switch(self, time: float) -> None:
        """Add the time up to now to the old state, and set the new one."""
        if time > self.since:
            origin = self.first or 0
            if time - origin >= self.history.border:
                self.history.extend(self.times, self.state, self.since - origin, time - origin)
            self.times[self.state] += time - self.since
            self.since = time
        self.state = COMMUNICATING if self.working else WAITING if self.negotiating else NEITHER

    def _abandon(self, tensor: Tensor) -> None:
        """Drop the open bars of ``tensor``: their ends are not in the file."""
        for cell, _ in tensor.bars:
            cell.phase.open -= 1
            self.negotiating -= cell.phase.kind == NEGOTIATE
            self.working -= cell.phase.kind == OPERATION
        tensor.bars.clear()
