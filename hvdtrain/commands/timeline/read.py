"""Read a Horovod timeline, even a damaged one, as a stream of events on one clock.

Horovod (``horovod/common/timeline.cc``) writes one JSON array of trace events. All but the
metadata are on a single long line, tensor names are not escaped, and a run that is killed leaves
the array unterminated. So a file may end at any byte or in a comma, and contain several arrays;
other damage costs the events in which it is. Memory is bounded by the chunk size.

A whole chunk of events is parsed at once, which is fast; only a damaged one is split into events.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from hvdtrain.errors import UsageError
from hvdtrain.system.files import replacing
from hvdtrain.system.output.text import duration

GZIP = b"\x1f\x8b"  # the first bytes of a gzipped file
CHUNK = 1 << 15  # bytes read at once: the events parsed from them fit into the processor's cache
MAX_HEADER = 1 << 20  # bytes without an event, after which a file is no timeline
MAX_EVENT = 1 << 16  # bytes; longer ones are skipped
MAX_OPEN = 100_000  # tensors with open bars, of a repair
SEPARATORS = (b"},{", b"},\n{", b"}, {")  # between two events, in Horovod's and others' files
EARLIEST, LATEST = -(2**63), 2**63  # microseconds; Horovod writes 64 bits
FILLER = b" \t\r\n,[]"  # allowed between events, at the beginning and at the end

PREAMBLE = "start_time_since_epoch_in_micros"

Event = dict[str, Any]

TENSORS = 10_000_000  # tensor numbers reserved for each timeline of a file

# Between two events, or where another array begins in the middle of one.
_BETWEEN = re.compile(rb"(?<=\})[\s,\[\]]*(?=\{)|\[\s*(?=\{)")
_SEPARATOR = re.compile(rb"\}\s*,\s*\{")  # in files with other white space, e.g. indented ones
# A tensor's name as Horovod writes it: unescaped quotes or backslashes make it invalid JSON.
_NAMING = re.compile(
    rb'\{"name": "process_name", "ph": "M", "pid": (\d+), "args": \{"name": "(.*)"\}\}', re.DOTALL
)
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
    files: int = 0  # consecutive timelines in it
    epoch: int | None = None  # microseconds since 1970 at time 0 of the first timeline
    first: float | None = None  # time of the first event, in microseconds


def timeline(reading: Reading, window: tuple[float, float] | None = None) -> Iterator[list[Event]]:
    """Yield the events of the file, in file order and on one clock, in lists of a few thousand.

    A file may contain several timelines. Each begins with a preamble and has a separate clock and
    separate tensor numbers. Later timelines are shifted so that each begins when the previous one
    ends.

    Args:
        reading: the file; its properties are set.
        window: time range, in seconds since the first event; metadata outside it is included.

    Raises:
        UsageError: see ``chunks``; or the window begins after the last event.
    """
    clock = _CommonClock(reading)
    for chunk, has_preamble in chunks(reading):
        for events in clock.shift_events(chunk, has_preamble=has_preamble):
            if reading.first is None:
                reading.first = next((event["ts"] for event in events if has_time(event)), None)
            if window and reading.first is not None:
                low, high = (reading.first + 1e6 * edge for edge in window)
                yield [e for e in events if not has_time(e) or low <= e["ts"] < high]
            else:
                yield events
    if window and reading.first is not None:
        seconds = (clock.last - reading.first) / 1e6
        if seconds < window[0]:
            span = ":".join("" if edge == math.inf else f"{edge:g}" for edge in window)
            raise UsageError(f"--slice {span}: {reading.path} ends after {duration(seconds)}")


class _CommonClock:
    """Shifts consecutive timelines onto one clock."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.shift: float | None = 0
        self.last: float = 0  # time of the last event, shifted

    def shift_events(self, events: list[Event], *, has_preamble: bool) -> list[list[Event]]:
        """Shift ``events`` of a later timeline in place; split them at preambles."""
        pieces = self._shift(events) if has_preamble or self.reading.files > 1 else [events]
        self.last = next((e["ts"] for e in reversed(events) if has_time(e)), self.last)
        return pieces

    def _shift(self, events: list[Event]) -> list[list[Event]]:
        reading = self.reading
        pieces: list[list[Event]] = [[]]
        last = self.last
        for event in events:
            args = event.get("args")
            if isinstance(args, dict) and isinstance(args.get(PREAMBLE), int):
                reading.files += 1
                reading.epoch = reading.epoch or args[PREAMBLE]
                self.shift = None if reading.files > 1 else 0
                pieces.append([])
            if reading.files > 1 and isinstance(event.get("pid"), int):
                event["pid"] += (reading.files - 1) * TENSORS
            if has_time(event):
                if self.shift is None:  # the time between two timelines does not count
                    self.shift = last - event["ts"]
                event["ts"] += self.shift
                last = event["ts"]
            pieces[-1].append(event)
        return pieces


def chunks(reading: Reading) -> Iterator[tuple[list[Event], bool]]:
    """Yield the objects of the file, and whether a preamble may be among them.

    In a damaged file, some of them may be no events.

    Raises:
        UsageError: the file does not exist, is empty, or contains no trace event.
    """
    rest, any_events = b"", False
    for data, last in blocks(reading):
        buffer = rest + data
        reading.closed = last and _END.search(buffer) is not None
        events, rest = _parse(buffer, reading, last=last)
        any_events = any_events or any("ph" in event for event in events)
        if not any_events and (last or reading.size > MAX_HEADER):
            if last and _is_beginning(buffer):
                return
            raise UsageError(
                f"{reading.path} is not a timeline: no trace events; set HOROVOD_TIMELINE=FILE, or "
                "--timeline FILE of hvdtrain's trainers, to record one"
            )
        if events:
            yield events, PREAMBLE.encode() in buffer


def _is_beginning(buffer: bytes) -> bool:
    """Return whether ``buffer`` is a timeline cut before the end of its first event."""
    text = buffer.lstrip()
    start = b'{"name": "process_name"'
    body = text[1:].lstrip()
    return text[:1] == b"[" and (start.startswith(body) or body.startswith(start))


def blocks(reading: Reading) -> Iterator[tuple[bytes, bool]]:
    """Yield non-empty blocks of the file's content, and whether each is the last.

    Raises:
        UsageError: the file cannot be read, is empty, or is cut before its first block.
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
            if reading.cut and not data:
                raise UsageError(
                    f"{path} is cut or damaged before its first event: copy it again, or record "
                    "another one"
                )
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
    if not cut:
        cut = max((match.start() + 1 for match in _SEPARATOR.finditer(buffer)), default=0)
    piece, rest = buffer[:cut].strip(FILLER), buffer[cut:]
    if len(rest) > MAX_EVENT:
        reading.skipped += len(rest)
        rest = b""
    try:
        return _decoder.decode(b"[" + piece + b"]"), rest
    except (ValueError, RecursionError):
        array, _, end = piece.rpartition(b"]")
        if last and array.rstrip().endswith(b"}") and b"[" not in end:
            piece = array  # of an object, {"traceEvents": [...]}
        return _intact(_BETWEEN.split(piece), reading, last=last), rest


def _intact(pieces: list[bytes], reading: Reading, *, last: bool) -> list[Event]:
    """Return the events that can be parsed, and count the bytes of the others."""
    events: list[Event] = []
    for number, piece in enumerate(pieces, 1):
        try:
            events += _decoder.decode(b"[" + piece + b"]")
        except (ValueError, RecursionError):
            if naming := _NAMING.fullmatch(piece):
                name = {"name": naming[2].decode(errors="replace")}
                event = {"name": "process_name", "ph": "M", "pid": int(naming[1]), "args": name}
                events.append(event)
            elif last and number == len(pieces):
                reading.cut = True
            else:
                reading.skipped += len(piece)
    return events


def has_time(event: Any) -> bool:
    """Return whether the event has a valid time."""
    time = event.get("ts")
    return isinstance(time, int | float) and EARLIEST < time < LATEST


@dataclass
class Repaired:
    """Counts of a repair."""

    events: int = 0  # written
    closed: int = 0  # bars that were open at the end
    dropped: int = 0  # ends without a beginning, events without time or kind, or beyond a limit


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
            try:
                file.write(msgspec.json.encode(event))
            except OverflowError:  # a number of more than 64 bits
                file.write(json.dumps(event).encode())
            counts.events += 1
        file.write(b"\n]\n")
    return counts


def _balanced(chunks: Iterator[list[Event]], counts: Repaired) -> Iterator[Event]:
    """Yield the events such that each bar begins and ends."""
    open_bars: dict[Any, int] = {}  # by tensor
    last: float = 0
    for events in chunks:
        for event in events:
            kind, tensor = event.get("ph"), event.get("pid", 0)
            timed = has_time(event)
            valid = isinstance(kind, str) and isinstance(tensor, int | str)
            if not valid or not (timed or kind == "M"):
                counts.dropped += 1
                continue
            if kind == "M" and PREAMBLE in str(event.get("args")):
                yield from _ends(open_bars, last, counts)  # another timeline begins
            elif kind == "B":
                if tensor not in open_bars and len(open_bars) >= MAX_OPEN:
                    counts.dropped += 1
                    continue
                open_bars[tensor] = open_bars.get(tensor, 0) + 1
            elif kind == "E":
                if not open_bars.get(tensor):
                    counts.dropped += 1
                    continue
                open_bars[tensor] -= 1
                if not open_bars[tensor]:
                    del open_bars[tensor]
            if timed:
                last = event["ts"]
            yield {**event, "pid": tensor, "tid": event.get("tid", tensor)}
    yield from _ends(open_bars, last, counts)


def _ends(open_bars: dict[Any, int], time: float, counts: Repaired) -> Iterator[Event]:
    for tensor, count in open_bars.items():
        for _ in range(count):
            counts.closed += 1
            yield {"ph": "E", "ts": time, "pid": tensor, "tid": tensor}
    open_bars.clear()
