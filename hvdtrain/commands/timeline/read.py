"""Read a Horovod timeline as a stream of events on one clock, whatever happened to the file.

Horovod (``horovod/common/timeline.cc``) writes one JSON array of trace events. All but the
metadata stand on one endless line, names of tensors are written as they are, without escapes, and
a run that is killed leaves the file without its end. So a file may stop at any byte, end in a
comma, hold several arrays one after another, or holes of zeros; all of that is read as far as it
goes. Memory is bounded by the size of a chunk.

orjson parses a whole chunk of events at once, which is fast. Only a damaged chunk is searched event
by event.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import orjson

from hvdtrain.errors import UsageError
from hvdtrain.system.files import replacing

CHUNK = 1 << 15  # bytes read at once: what is made of them stays in the processor's cache
ENOUGH = 1 << 20  # bytes without an event: this is no timeline
LONGEST = 1 << 16  # bytes; an object that has no end after so many is broken, not cut by a chunk
STRANGE = 500  # objects in a row, in one buffer, that are no events: the rest of it holds none
BETWEEN = (b"},{", b"},\n{", b"}, {")  # two events, as Horovod and other writers part them
EARLIEST, LATEST = -(2**63), 2**63  # microseconds; Horovod writes 64 bits
FILLING = " \t\r\n,[]"  # what may stand between events

PREAMBLE = "start_time_since_epoch_in_micros"

_PREAMBLE = PREAMBLE.encode()
Event = dict[str, Any]

TENSORS = 10_000_000  # numbers that the tensors of one timeline may have

# A tensor's name as Horovod writes it: with quotes or backslashes in it the line is no JSON.
_NAMING = re.compile(
    r'\{"name": "process_name", "ph": "M", "pid": (\d+), "args": \{"name": "(.{0,4096}?)"\}\}'
    r"(?=[,\s\]]*(?:\{|$))",
    re.DOTALL,
)
_END = re.compile(rb"\}[\s,]*\]\s*\Z")
_decoder = json.JSONDecoder(strict=False)  # takes control characters in names


@dataclass
class Reading:
    """What a file holds; filled in while ``chunks`` runs."""

    path: Path
    size: int = 0  # bytes read, after decompression
    skipped: int = 0  # bytes that were no event: damage in the middle of the file
    cut: bool = False  # the file ends within an event, or its compression does
    closed: bool = False  # it ends with a bracket: Horovod was stopped or shut down in order
    position: int = 0  # bytes of the file itself read so far, for showing progress
    files: int = 0  # timelines in it, one after another
    epoch: int | None = None  # microseconds since 1970 at time 0 of the first one
    first: float | None = None  # time of the first event, in microseconds


def timeline(reading: Reading, window: tuple[float, float] | None = None) -> Iterator[list[Event]]:
    """Yield the events of the file, in its order and on one clock, in lists of some thousands.

    A file may hold several timelines, one after another. Each begins with a preamble and has its
    own clock and its own numbers for the tensors. The later ones are moved so that each follows the
    one before at once.

    Args:
        reading: the file; what it holds is noted there.
        window: seconds since the first event; what is outside is left out, except metadata.

    Raises:
        UsageError: see ``chunks``.
    """
    clock = _Clock(reading)
    for found, begins in chunks(reading):
        for events in clock.put(found, begins=begins):
            if reading.first is None:
                reading.first = next((event["ts"] for event in events if has_time(event)), None)
            if window and reading.first is not None:
                low, high = (reading.first + 1e6 * edge for edge in window)
                yield [e for e in events if not has_time(e) or low <= e["ts"] < high]
            else:
                yield events


class _Clock:
    """Moves timelines that follow one another onto one clock."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.shift: float | None = 0
        self.last: float = 0  # time of the last event, moved

    def put(self, events: list[Event], *, begins: bool) -> list[list[Event]]:
        """Move ``events`` of a later timeline in place; cut where one ``begins``."""
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


def chunks(reading: Reading) -> Iterator[tuple[list[Event], bool]]:
    """Yield the objects of the file, and whether a preamble may be among them.

    In a damaged file not all of them are events.

    Raises:
        UsageError: there is no such file, it is empty, or it holds no trace event.
    """
    rest, found = b"", False
    for data, last in _blocks(reading):
        buffer = rest + data
        reading.closed = last and _END.search(buffer) is not None
        events, rest = _parse(buffer, reading, last=last)
        if not found and not events and (last or reading.size > ENOUGH):
            if last and _is_beginning(buffer):
                return
            raise UsageError(
                f"{reading.path} is no timeline: it holds no trace events. Horovod writes one to "
                "the file that HOROVOD_TIMELINE names, our trainers to that of --timeline"
            )
        if events:
            found = True
            yield events, _PREAMBLE in buffer


def _is_beginning(buffer: bytes) -> bool:
    """Return whether ``buffer`` is a timeline cut before the end of its first event."""
    text = buffer.lstrip()
    start = b'{"name": "process_name"'
    body = text[1:].lstrip()
    return text[:1] == b"[" and (start.startswith(body) or body.startswith(start))


def _blocks(reading: Reading) -> Iterator[tuple[bytes, bool]]:
    """Yield the file's content in blocks, each with whether it is the last; at least one byte."""
    path = reading.path
    try:
        with path.open("rb") as file:
            compressed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            blocks = _inflated(file, reading) if compressed else iter(lambda: file.read(CHUNK), b"")
            data = next(blocks, b"")
            if not data:
                raise UsageError(
                    f"{path} is empty: Horovod writes its first line with the first "
                    "collective, and only on rank 0"
                )
            while data:
                reading.size += len(data)
                reading.position = file.tell()
                following = next(blocks, b"")
                yield data, not following
                data = following
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def _inflated(file: IO[bytes], reading: Reading) -> Iterator[bytes]:
    """Yield the content of a gzipped file, as far as it goes."""
    unpacker = zlib.decompressobj(wbits=31)
    begun = False
    while packed := file.read(CHUNK):
        while packed:
            try:
                data = unpacker.decompress(packed, CHUNK)
            except zlib.error:
                reading.cut = True
                return
            begun = True
            if data:
                yield data
            packed = unpacker.unconsumed_tail
            if unpacker.eof:  # another one may follow
                packed, begun = unpacker.unused_data, False
                unpacker = zlib.decompressobj(wbits=31)
    reading.cut = reading.cut or begun


def _parse(buffer: bytes, reading: Reading, *, last: bool) -> tuple[list[Event], bytes]:
    """Return the events in ``buffer``, and the bytes that belong to what follows it."""
    cut = len(buffer) if last else max(buffer.rfind(mark) for mark in BETWEEN) + 1
    piece = buffer[:cut].lstrip(b" \t\r\n,[").rstrip(b" \t\r\n,]")
    try:
        events = orjson.loads(b"[" + piece + b"]")
    except orjson.JSONDecodeError:
        events = None
    if events and set(map(type, events)) == {dict} and "ph" in events[0]:
        return events, buffer[cut:]
    return _search(buffer, reading, last=last)


def _search(buffer: bytes, reading: Reading, *, last: bool) -> tuple[list[Event], bytes]:
    """Do what ``_parse`` does object by object, stepping over what is no event."""
    text = buffer.decode("utf-8", "surrogateescape")
    clean = re.sub("[\ud800-\udfff]", "\ufffd", text)  # as long as the text
    events: list[Event] = []
    done, strange = 0, 0  # the end of the last event, and other objects behind it
    start = text.find("{")
    while start >= 0:
        found, end = _object(clean, start)
        if end == start and not last and len(text) - start < LONGEST:
            break  # perhaps only cut by the end of the buffer
        strange += 1
        if found:
            reading.skipped += _odd(text[done:start])
            events += found
            done, strange = end, 0
        start = text.find("{", max(end, start + 1)) if strange < STRANGE else -1
    if start >= 0:
        reading.skipped += _odd(text[done:start])
        return events, text[start:].encode("utf-8", "surrogateescape")
    tail = text[done:]
    if last and "{" in tail and len(tail) < LONGEST:
        reading.cut = True
    else:
        reading.skipped += _odd(tail)
    return events, b""


def _object(text: str, start: int) -> tuple[list[Event], int]:
    """Return the events in the object at ``start``, and its end; ``start`` if it has none."""
    try:
        value, end = _decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        naming = _NAMING.match(text, start)
        if naming is None:
            return [], start
        name = {"name": naming[2]}
        event = {"name": "process_name", "ph": "M", "pid": int(naming[1]), "args": name}
        return [event], naming.end()
    inner = value.get("traceEvents", [value])  # an object around the array is a valid form too
    events = inner if isinstance(inner, list) else []
    return [event for event in events if isinstance(event, dict) and "ph" in event], end


def _odd(text: str) -> int:
    """Count the characters of ``text``, from between two events, that should not be there."""
    return len(text.strip(FILLING))


def has_time(event: Any) -> bool:
    """Return whether the event has a time that a clock can show."""
    time = event.get("ts")
    return isinstance(time, int | float) and EARLIEST < time < LATEST


@dataclass
class Repaired:
    """What was done."""

    events: int = 0  # written
    closed: int = 0  # bars that were open at the end
    dropped: int = 0  # ends without a beginning, and events without time or kind


def repair(source: Path, target: Path, window: tuple[float, float] | None = None) -> Repaired:
    """Write the events of ``source`` to ``target`` as valid JSON, complete or not at all.

    Everything that can be read is kept, one event per line. Bars that were never closed are closed
    at the last event, ends whose beginning is missing are left out (a viewer would close another
    bar with them, or refuse the file), and each tensor gets a thread number, which viewers need.

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
    """Yield the events with all bars closed, and none closed that is not open."""
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
