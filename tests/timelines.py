"""Timelines with known numbers, in the form of Horovod (``horovod/common/timeline.cc``)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hvdtrain.commands.timeline.verdict import analyse

EPOCH = 1_700_000_000_000_000


class Timeline:
    """Collects the text of a timeline; times are microseconds, in ascending order."""

    def __init__(self) -> None:
        self.pieces = [
            '{"name": "process_name", "ph": "M", "pid": 0, "args": '
            f'{{"start_time_since_epoch_in_micros":{EPOCH}}}}},\n',
            '{"name": "process_sort_index", "ph": "M", "pid": 0, "args": {"sort_index": 0}},\n',
        ]
        self.numbers: dict[str, int] = {}
        self.closed = True  # not killed

    def _number(self, tensor: str) -> int:
        if tensor not in self.numbers:
            number = self.numbers[tensor] = len(self.numbers) + 1
            self.pieces.append(
                f'{{"name": "process_name", "ph": "M", "pid": {number}, "args": '
                f'{{"name": {json.dumps(tensor)}}}}},\n'
            )
            self.pieces.append(
                f'{{"name": "process_sort_index", "ph": "M", "pid": {number}, "args": '
                f'{{"sort_index": {number}}}}},\n'
            )
        return self.numbers[tensor]

    def begin(self, tensor: str, name: str, time: int) -> None:
        """Begin a bar."""
        number = self._number(tensor)
        self.pieces.append(f'{{"ph": "B", "name": "{name}", "ts": {time}, "pid": {number}}},')

    def tick(self, tensor: str, rank: int, time: int) -> None:
        """Record that a rank is ready."""
        number = self._number(tensor)
        self.pieces.append(
            f'{{"ph": "X", "name": "{rank}", "ts": {time}, "pid": {number}, "dur": 0}},'
        )

    def end(self, tensor: str, time: int, shape: Sequence[int] | None = None) -> None:
        """End the innermost bar; ``shape``: for the outermost bar of an operation."""
        number = self._number(tensor)
        args = ""
        if shape is not None:
            args = f', "args": {{"dtype": "float32", "shape": "{list(shape)}"}}'
        self.pieces.append(f'{{"ph": "E", "ts": {time}, "pid": {number}{args}}},')

    def cycle(self, time: int) -> None:
        """Begin a cycle."""
        self.pieces.append(f'{{"ph": "i", "name": "CYCLE_START", "ts": {time}, "s": "g"}},')

    def negotiate(self, tensor: str, start: int, ready: dict[int, int]) -> None:
        """Add a negotiation; ``ready``: microseconds after ``start`` by rank, ascending."""
        self.begin(tensor, "NEGOTIATE_ALLREDUCE", start)
        for rank, after in ready.items():
            self.tick(tensor, rank, start + after)
        self.end(tensor, start + max(ready.values()))

    def allreduce(
        self, tensors: Sequence[str], start: int, length: int, shape: Sequence[int], copy: int = 0
    ) -> None:
        """Add an operation on ``tensors``; ``copy``: length of the copies before and after it."""
        for tensor in tensors:
            self.begin(tensor, "ALLREDUCE", start)
        activities = [("MPI_ALLREDUCE", length)]
        if copy:
            activities = [
                ("MEMCPY_IN_FUSION_BUFFER", copy),
                *activities,
                ("MEMCPY_OUT_FUSION_BUFFER", copy),
            ]
        for name, duration in activities:
            for tensor in tensors:
                self.begin(tensor, name, start)
            start += duration
            for tensor in tensors:
                self.end(tensor, start)
        for tensor in tensors:
            self.end(tensor, start, shape)

    @property
    def text(self) -> str:
        """Return the content of the file, unterminated if not ``closed``."""
        pieces = "[\n" + "".join(self.pieces)
        return pieces.rstrip(",\n") + "]" if self.closed else pieces

    def write(self, folder: Path, name: str = "timeline.json") -> Path:
        """Write the file and return its path."""
        path = folder / name
        path.write_text(self.text)
        return path


def facts_of(content: Timeline | str, folder: Path, **options: Any) -> dict[str, Any]:
    """Write a timeline, or the text of one, and return its facts as in ``--json``."""
    path = folder / "timeline.json"
    path.write_text(content if isinstance(content, str) else content.text)
    return asdict(analyse(path, **options)[0])


def straggling(steps: int, *, late: int = 50_000, tensors: int = 3, ranks: int = 3) -> Timeline:
    """Return steps of 70 ms in which the last rank is ``late`` microseconds behind the others.

    In each step the tensors are negotiated one after another, 100 us apart, in ``late`` + 10 us;
    then reduced as one operation of 2,000 us with copies of 100 us before and after.
    """
    timeline = Timeline()
    names = [f"gradient.{number}" for number in range(tensors)]
    for step in range(steps):
        start = 1_000_000 + 70_000 * step
        events = []
        for index, name in enumerate(names):
            begin = start + 100 * index
            events.append((begin, 0, name))
            for rank in range(ranks):
                behind = rank if rank < ranks - 1 else late + 10
                events.append((begin + behind, 1 + rank, name))
            events.append((begin + late + 10, 1 + ranks, name))
        for time, kind, name in sorted(events):
            if kind == 0:
                timeline.begin(name, "NEGOTIATE_ALLREDUCE", time)
            elif kind <= ranks:
                timeline.tick(name, kind - 1, time)
            else:
                timeline.end(name, time)
        after = start + 100 * (tensors - 1) + late + 10
        timeline.allreduce(names, after + 90, 2_000, (100, 100), copy=100)
    return timeline


HOSTILE = [
    '</script><img src=x onerror="window.hacked=1">',
    "<marquee>moving</marquee>",
    '"quoted"',
    "back\\slash",
    "new\nline",
    "{{ 7 * 7 }}",
    "<!-- comment",
    "]]><script>window.hacked=1</script>",
    "'; window.hacked=1; //",
    "\u2028separator",
    "a" * 300,
]


def hostile(steps: int = 4) -> Timeline:
    """Return steps of tensors with names that attack a page; rank 1 is 5 ms late."""
    timeline = Timeline()
    time = 1_000
    for _ in range(steps):
        for name in HOSTILE:
            timeline.negotiate(name, time, {0: 0, 1: 5_000})
            timeline.allreduce([name], time + 5_100, 700, (10,))
            time += 6_000
        time += 2_000
    return timeline
