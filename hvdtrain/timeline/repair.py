"""``--repair``: the events of a timeline as valid JSON, for chrome://tracing and Perfetto.

Everything that can be read is kept, one event a line. Bars that were never closed are closed at the
last event, ends whose beginning is missing are left out (viewers would close another bar with them,
or refuse the file), and each tensor gets a thread number, which both viewers want.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from hvdtrain.files import replacing
from hvdtrain.timeline.read import PREAMBLE, Event, Reading, has_time
from hvdtrain.timeline.sequence import timeline


@dataclass
class Repaired:
    """What was done."""

    events: int = 0
    """Events written."""
    closed: int = 0
    """Bars that were open at the end."""
    dropped: int = 0
    """Ends without a beginning, and events without time or kind."""


def repair(source: Path, target: Path, window: tuple[float, float] | None = None) -> Repaired:
    """Write the events of ``source`` to ``target``, complete or not at all.

    Raises:
        UsageError: ``source`` is no timeline, ``target`` cannot be made.
        HvdtrainError: ``target`` cannot be written to its end.
    """
    done = Repaired()
    with replacing(target) as file:
        file.write(b"[")
        for event in _mended(timeline(Reading(source), window), done):
            file.write(b",\n" if done.events else b"\n")
            file.write(_encode(event))
            done.events += 1
        file.write(b"\n]\n")
    return done


def _mended(chunks: Iterator[list[Event]], done: Repaired) -> Iterator[Event]:
    """The events with all bars closed, and none closed that is not open."""
    open_bars: dict[Any, int] = {}  # by tensor
    last: float = 0
    for events in chunks:
        for event in events:
            kind, tensor = event.get("ph"), event.get("pid", 0)
            timed = has_time(event)
            whole = isinstance(kind, str) and isinstance(tensor, int | str)
            if not whole or not (timed or kind == "M"):
                done.dropped += 1
                continue
            if kind == "M" and PREAMBLE in str(event.get("args")):
                yield from _ends(open_bars, last, done)  # another timeline begins
            elif kind == "B":
                open_bars[tensor] = open_bars.get(tensor, 0) + 1
            elif kind == "E":
                if not open_bars.get(tensor):
                    done.dropped += 1
                    continue
                open_bars[tensor] -= 1
            if timed:
                last = event["ts"]
            yield {**event, "pid": tensor, "tid": event.get("tid", tensor)}
    yield from _ends(open_bars, last, done)


def _ends(open_bars: dict[Any, int], time: float, done: Repaired) -> Iterator[Event]:
    for tensor, count in open_bars.items():
        for _ in range(count):
            done.closed += 1
            yield {"ph": "E", "ts": time, "pid": tensor, "tid": tensor}
    open_bars.clear()


def _encode(event: Event) -> bytes:
    try:
        return orjson.dumps(event)
    except TypeError:  # half of a surrogate pair in a name, or a number of more than 64 bits
        return json.dumps(event).encode()
