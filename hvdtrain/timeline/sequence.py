"""The events of a file on one clock: several timelines one after another, and slices of time.

Each timeline begins with a preamble and has its own clock and its own numbers for the tensors. The
later ones are moved so that they follow the first at once.
"""

from __future__ import annotations

from collections.abc import Iterator

from hvdtrain.timeline.read import PREAMBLE, Event, Reading, chunks, has_time

TENSORS = 10_000_000  # numbers that the tensors of one timeline may have


def timeline(reading: Reading, window: tuple[float, float] | None = None) -> Iterator[list[Event]]:
    """The events of the file, in its order, in lists of some thousands.

    Args:
        reading: names the file, and is told what is met in it.
        window: seconds since the first event; what is outside is left out, but for metadata.

    Raises:
        UsageError: see ``chunks``.
    """
    line = _Line(reading)
    for found, begins in chunks(reading):
        for events in line.put(found, begins=begins):
            if reading.first is None:
                reading.first = next((event["ts"] for event in events if has_time(event)), None)
            if window and reading.first is not None:
                low, high = (reading.first + 1e6 * edge for edge in window)
                yield [e for e in events if not has_time(e) or low <= e["ts"] < high]
            else:
                yield events


class _Line:
    """Puts timelines that stand one after another in line."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.shift: float | None = 0
        self.last: float = 0  # time of the last event, moved

    def put(self, events: list[Event], *, begins: bool) -> list[list[Event]]:
        """Move ``events`` of a later timeline; cut before each preamble.

        Args:
            events: they are changed in place.
            begins: a preamble may be among them.
        """
        pieces = self._move(events) if begins or self.reading.files > 1 else [events]
        self.last = next((e["ts"] for e in reversed(events) if has_time(e)), self.last)
        return pieces

    def _move(self, events: list[Event]) -> list[list[Event]]:
        reading = self.reading
        pieces: list[list[Event]] = [[]]
        last = self.last
        for event in events:
            if _is_preamble(event):
                reading.files += 1
                reading.epoch = reading.epoch or event["args"][PREAMBLE]
                self.shift = None if reading.files > 1 else 0
                pieces.append([])
            if reading.files > 1 and isinstance(event.get("pid"), int):
                event["pid"] += (reading.files - 1) * TENSORS
            if has_time(event):
                if self.shift is None:  # the time between the two does not count
                    self.shift = last - event["ts"]
                event["ts"] += self.shift
                last = event["ts"]
            pieces[-1].append(event)
        return pieces


def _is_preamble(event: Event) -> bool:
    args = event.get("args")
    return isinstance(args, dict) and isinstance(args.get(PREAMBLE), int)
