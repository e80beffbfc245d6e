"""Read a Horovod timeline, also one that was cut off, as a stream of events.

Horovod (``horovod/common/timeline.cc``) writes one JSON array of trace events. All but the
metadata are on a single long line, and a run that is killed leaves the array unterminated. So a
file may end at any byte or in a comma; other damage costs the events in which it is. Memory is
bounded by the chunk size.

A whole chunk of events is parsed at once, which is fast; only a damaged one is split into events.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Required, TypedDict

import msgspec

from hvdtrain.errors import UsageError
from hvdtrain.system.files import replacing
from hvdtrain.system.output.text import duration

GZIP = b"\x1f\x8b"  # the first bytes of a gzipped file
CHUNK = 1 << 15  # bytes read at once: the events parsed from them fit into the processor's cache
MAX_HEADER = 1 << 20  # bytes without an event, after which a file is no timeline
MAX_EVENT = 1 << 16  # bytes; longer ones are skipped
SEPARATORS = (b"},{", b"},\n{", b"}, {")  # between two events, in Horovod's and others' files
FILLER = b" \t\r\n,[]"  # allowed between events, at the beginning and at the end

PREAMBLE = "start_time_since_epoch_in_micros"


class Event(TypedDict, total=False):
    """An event as Horovod writes it."""

    ph: Required[str]
    name: str
    ts: int | float  # microseconds; metadata have none
    pid: int  # the tensor
    tid: int
    dur: int | float
    s: str
    args: Mapping[str, Any]


_BETWEEN = re.compile(rb"(?<=\})[\s,\[\]]*(?=\{)")  # two events
_END = re.compile(rb"\}[\s,]*\]\s*\Z")
_decoder = msgspec.json.Decoder(list[Event])


@dataclass
class Reading:
    """Properties of a file, set while ``chunks`` runs."""

    path: Path
    size: int = 0  # bytes read, after decompression
    skipped: int = 0  # bytes that belong to no event: damage in the middle of the file
    cut: bool = False  # the file ends within an event or a compressed block
    closed: bool = False  # it ends with a bracket: Horovod was stopped or shut down regularly
    position: int = 0  # bytes of the file itself read so far, for progress messages
    epoch: int | None = None  # microseconds since 1970 at time 0
    first: float | None = None  # time of the first event, in microseconds


def timeline(reading: Reading, window: tuple[float, float] | None = None) -> Iterator[list[Event]]:
    """Yield the events of the file, in file order, in lists of a few thousand.

    Args:
        reading: the file; its properties are set.
        window: time range, in seconds since the first event; metadata outside it is included.

    Raises:
        UsageError: see ``chunks``; or the window begins after the last event.
    """
    last = 0.0
    for events in chunks(reading):
        if reading.first is None:
            reading.first = next((event["ts"] for event in events if "ts" in event), None)
            preamble = events[0].get("args", {})
            reading.epoch = reading.epoch or preamble.get(PREAMBLE)
        if window and reading.first is not None:
            low, high = (reading.first + 1e6 * edge for edge in window)
            last = next((event["ts"] for event in reversed(events) if "ts" in event), last)
            yield [event for event in events if low <= event.get("ts", low) < high]
        else:
            yield events
    if window and reading.first is not None:
        seconds = (last - reading.first) / 1e6
        if seconds < window[0]:
            span = ":".join("" if edge == math.inf else f"{edge:g}" for edge in window)
            raise UsageError(f"--slice {span}: {reading.path} ends after {duration(seconds)}")


def chunks(reading: Reading) -> Iterator[list[Event]]:
    """Yield the events of the file.

    Raises:
        UsageError: the file does not exist, is empty, or contains no trace event, or several
            timelines.
    """
    rest, any_events, timelines = b"", False, 0
    for data, last in blocks(reading):
        buffer = rest + data
        reading.closed = last and _END.search(buffer) is not None
        events, rest = _parse(buffer, reading, last=last)
        any_events = any_events or bool(events)
        if not any_events and (last or reading.size > MAX_HEADER):
            raise UsageError(
                f"{reading.path} is not a timeline: no trace events; set HOROVOD_TIMELINE=FILE, or "
                "--timeline FILE of hvdtrain's trainers, to record one"
            )
        if PREAMBLE.encode() in buffer:
            timelines += sum(PREAMBLE in event.get("args", ()) for event in events)
            if timelines > 1:
                raise UsageError(f"{reading.path} contains several timelines: split it")
        if events:
            yield events


def blocks(reading: Reading) -> Iterator[tuple[bytes, bool]]:
    """Yield non-empty blocks of the file's content, and whether each is the last.

    Raises:
        UsageError: the file cannot be read, or is empty.
    """
    path = reading.path
    try:
        with path.open("rb") as file:
            compressed = file.read(len(GZIP)) == GZIP
            file.seek(0)
            content = (
                _inflated(file, reading) if compressed else iter(lambda: file.read(CHUNK), b"")
            )
            data = next(content, b"")
            if not data:
                raise UsageError(
                    f"{path} is empty: Horovod writes a timeline on rank 0 only, from the first "
                    "collective on"
                )
            while data:
                reading.size += len(data)
                reading.position = file.tell()
                following = next(content, b"")
                yield data, not following
                data = following
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from error


def _inflated(file: IO[bytes], reading: Reading) -> Iterator[bytes]:
    """Yield the decompressed content of a gzipped file, up to any damage."""
    with gzip.open(file) as unpacked:
        try:
            while data := unpacked.read1(CHUNK):
                yield data
        except (EOFError, zlib.error, gzip.BadGzipFile):
            reading.cut = True


def _parse(buffer: bytes, reading: Reading, *, last: bool) -> tuple[list[Event], bytes]:
    """Return the events in ``buffer``, and its last bytes: the beginning of the next event."""
    cut = len(buffer) if last else max(buffer.rfind(mark) for mark in SEPARATORS) + 1
    piece, rest = buffer[:cut].strip(FILLER), buffer[cut:]
    if len(rest) > MAX_EVENT:
        reading.skipped += len(rest)
        rest = b""
    try:
        return _decoder.decode(b"[" + piece + b"]"), rest
    except ValueError:
        return _intact(_BETWEEN.split(piece), reading, last=last), rest


def _intact(pieces: list[bytes], reading: Reading, *, last: bool) -> list[Event]:
    """Return the events that can be parsed, and count the bytes of the others."""
    events: list[Event] = []
    for number, piece in enumerate(pieces, 1):
        try:
            events += _decoder.decode(b"[" + piece + b"]")
        except ValueError:
            if last and number == len(pieces):
                reading.cut = True
            else:
                reading.skipped += len(piece)
    return events


@dataclass
class Repaired:
    """Counts of a repair."""

    events: int = 0  # written
    closed: int = 0  # bars that were open at the end
    dropped: int = 0  # ends without a beginning


def repair(source: Path, target: Path, window: tuple[float, float] | None = None) -> Repaired:
    """Write the events of ``source`` to ``target`` as valid JSON, atomically.

    All readable events are kept, one per line. Bars still open are closed at the last event, ends
    whose beginning is missing are dropped (a viewer would close another bar with them, or reject
    the file), and each tensor gets a thread number, which viewers need.

    Raises:
        UsageError: ``source`` is not a timeline, ``target`` cannot be created.
        HvdtrainError: writing ``target`` failed.
    """
    counts = Repaired()
    with replacing(target) as file:
        file.write(b"[")
        for event in _balanced(timeline(Reading(source), window), counts):
            file.write(b",\n" if counts.events else b"\n")
            file.write(msgspec.json.encode(event))
            counts.events += 1
        file.write(b"\n]\n")
    return counts


def _balanced(chunks: Iterator[list[Event]], counts: Repaired) -> Iterator[Event]:
    """Yield the events such that each bar begins and ends."""
    open_bars: Counter[int] = Counter()  # by tensor
    last: float = 0
    for events in chunks:
        for event in events:
            kind, tensor = event["ph"], event.get("pid", 0)
            if kind == "E" and not open_bars[tensor]:
                counts.dropped += 1
                continue
            open_bars[tensor] += {"B": 1, "E": -1}.get(kind, 0)
            last = event.get("ts", last)
            yield {**event, "pid": tensor, "tid": event.get("tid", tensor)}
    for tensor in open_bars.elements():
        counts.closed += 1
        yield {"ph": "E", "ts": last, "pid": tensor, "tid": tensor}
