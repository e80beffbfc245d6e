"""Reading a Horovod timeline as a stream of events, whatever has happened to the file.

Horovod (``horovod/common/timeline.cc``) writes one JSON array of trace events. All but the
metadata stand on one endless line, names of tensors are written as they are, without escapes, and
a run that is killed leaves the file without its end. So a file may stop at any byte, end in a
comma, hold several arrays one after another, or holes of zeros; all of that is read as far as it
goes. Memory is bounded by the size of a chunk.

The way to be fast is to let orjson parse a whole chunk of events at once. Only a chunk that is not
clean is looked through event by event.
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

CHUNK = 1 << 15  # bytes read at once: what is made of them stays in the processor's cache
ENOUGH = 1 << 20  # bytes without an event tell that this is no timeline
LONGEST = 1 << 16  # bytes; an object that has no end after so many is broken, not cut by a chunk
STRANGE = 500  # objects in a row, in one buffer, that are no events: the rest of it holds none
BETWEEN = (b"},{", b"},\n{", b"}, {")  # two events, as Horovod and other writers part them
EARLIEST, LATEST = -(2**63), 2**63  # microseconds; Horovod writes 64 bits
FILLING = " \t\r\n,[]"  # what may stand between events

PREAMBLE = "start_time_since_epoch_in_micros"

_PREAMBLE = PREAMBLE.encode()
Event = dict[str, Any]

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
    """What was met in a file; filled while ``chunks`` runs."""

    path: Path
    """The file."""
    size: int = 0
    """Bytes read, after decompression."""
    skipped: int = 0
    """Bytes that were no event: damage in the middle of the file."""
    cut: bool = False
    """The file ends within an event, or its compression does."""
    closed: bool = False
    """It ends with a bracket, as Horovod leaves it that was stopped or shut down in order."""
    position: int = 0
    """Bytes of the file itself read so far, for showing progress."""
    files: int = 0
    """Timelines in it, one after another."""
    epoch: int | None = None
    """Microseconds since 1970 at time 0 of the first one."""
    first: float | None = None
    """Time of the first event, in microseconds."""


def chunks(reading: Reading) -> Iterator[tuple[list[Event], bool]]:
    """The objects as they stand in the file, and whether a preamble may be among them.

    Nearly all are events, in a damaged file perhaps not all.

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
    """Whether ``buffer`` is a timeline so short that it was cut before its first event ended."""
    text = buffer.lstrip()
    start = b'{"name": "process_name"'
    body = text[1:].lstrip()
    return text[:1] == b"[" and (start.startswith(body) or body.startswith(start))


def _blocks(reading: Reading) -> Iterator[tuple[bytes, bool]]:
    """Blocks of the file's content, each with whether it is the last; at least one byte in all."""
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
    """The content of a gzipped file, as far as it goes."""
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
    """The events in ``buffer``, and the bytes that belong to what follows it."""
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
    """What ``_parse`` does, object by object, stepping over what is no event."""
    text = buffer.decode("utf-8", "surrogateescape")
    clean = re.sub("[\ud800-\udfff]", "\ufffd", text)  # as long as the text
    events: list[Event] = []
    done, strange = 0, 0  # the end of the last event, and other objects behind it
    place = text.find("{")
    while place >= 0:
        found, end = _object(clean, place)
        if end == place and not last and len(text) - place < LONGEST:
            break  # perhaps only cut by the end of the buffer
        strange += 1
        if found:
            reading.skipped += _odd(text[done:place])
            events += found
            done, strange = end, 0
        place = text.find("{", max(end, place + 1)) if strange < STRANGE else -1
    if place >= 0:
        reading.skipped += _odd(text[done:place])
        return events, text[place:].encode("utf-8", "surrogateescape")
    tail = text[done:]
    if last and "{" in tail and len(tail) < LONGEST:
        reading.cut = True
    else:
        reading.skipped += _odd(tail)
    return events, b""


def _object(text: str, place: int) -> tuple[list[Event], int]:
    """The events in the object that begins at ``place``, and its end; ``place`` if it has none."""
    try:
        value, end = _decoder.raw_decode(text, place)
    except (ValueError, RecursionError):
        naming = _NAMING.match(text, place)
        if naming is None:
            return [], place
        name = {"name": naming[2]}
        event = {"name": "process_name", "ph": "M", "pid": int(naming[1]), "args": name}
        return [event], naming.end()
    inner = value.get("traceEvents", [value])  # an object around the array is a valid form too
    events = inner if isinstance(inner, list) else []
    return [event for event in events if isinstance(event, dict) and "ph" in event], end


def _odd(text: str) -> int:
    """How much of ``text``, which stood between two events, should not have been there."""
    return len(text.strip(FILLING))


def has_time(event: Any) -> bool:
    """Whether the event is one that happens at a time, and at one that a clock can show."""
    time = event.get("ts")
    return isinstance(time, int | float) and EARLIEST < time < LATEST
