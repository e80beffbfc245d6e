"""Reading of files: complete, cut anywhere, damaged, with several timelines, or with none."""

from __future__ import annotations

import gzip
import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.commands.timeline import read
from hvdtrain.commands.timeline.read import TENSORS, Reading, timeline
from hvdtrain.errors import UsageError
from tests.timelines import EPOCH, Timeline, straggling

TEXT = straggling(3).text
EVENTS: list[dict[str, Any]] = json.loads(TEXT)

# Where each event of TEXT ends.
ENDS = [match.end() for match in re.finditer(r"\}(?=,\{|,\n\{|\])", TEXT)]
assert len(ENDS) == len(EVENTS)


def events_of(path: Path, **options: Any) -> tuple[list[dict[str, Any]], Reading]:
    reading = Reading(path)
    return [event for events in timeline(reading, **options) for event in events], reading


def write(path: Path, content: bytes | str) -> Path:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize("chunk", [17, 100, 1000, read.CHUNK])
def test_all_events_are_read_in_order_for_any_chunk_size(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK", chunk)
    events, reading = events_of(write(tmp_path / "t", TEXT))
    assert events == EVENTS
    assert (reading.size, reading.skipped, reading.cut) == (len(TEXT), 0, False)
    assert (reading.files, reading.epoch, reading.first) == (1, EPOCH, 1_000_000)


def test_a_file_cut_at_any_byte_is_read_up_to_its_last_complete_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK", 700)
    path = tmp_path / "t"
    for size in range(1, len(TEXT), 7):
        whole = sum(end <= size for end in ENDS)
        events, reading = events_of(write(path, TEXT[:size]))
        assert events == EVENTS[:whole], size
        assert (reading.skipped, reading.closed) == (0, False)
        rest = TEXT[ENDS[whole - 1] if whole else 0 : size]
        assert reading.cut == ("{" in rest)


@pytest.mark.parametrize("end", [",", "]", "]\n", ",\n", "", ",]", "\n]\n\n"])
def test_any_end_of_file_is_accepted(end: str, tmp_path: Path) -> None:
    events, reading = events_of(write(tmp_path / "t", TEXT[:-1] + end))
    assert events == EVENTS
    assert (reading.cut, reading.skipped, reading.closed) == (False, 0, "]" in end)


@pytest.mark.parametrize(
    "text",
    [
        "[\n" + ",\n".join(map(json.dumps, EVENTS)) + "\n]\n",
        json.dumps(EVENTS),
        json.dumps(EVENTS, indent=1),
        "[\r\n" + " ,\r\n".join(map(json.dumps, EVENTS)) + "\r\n]\r\n",
        "\ufeff" + json.dumps(EVENTS),
        json.dumps({"traceEvents": EVENTS}),
        json.dumps({"displayTimeUnit": "ms", "traceEvents": EVENTS, "otherData": {}}, indent=1),
    ],
    ids=["line", "spaces", "indented", "returns", "byte order mark", "object", "indented object"],
)
def test_other_json_forms_are_accepted(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK", 700)
    monkeypatch.setattr(read, "MAX_EVENT", 1400)
    events, reading = events_of(write(tmp_path / "t", text))
    assert events == EVENTS
    assert not reading.cut


def test_gzipped_files_are_read_up_to_a_cut(tmp_path: Path) -> None:
    packed = gzip.compress(TEXT.encode(), 1)
    events, reading = events_of(write(tmp_path / "t", packed))
    assert events == EVENTS
    assert not reading.cut
    events, reading = events_of(write(tmp_path / "t", packed[: len(packed) // 2]))
    assert 0 < len(events) < len(EVENTS)
    assert events == EVENTS[: len(events)]
    assert reading.cut


def test_several_timelines_are_on_one_clock(tmp_path: Path) -> None:
    later = straggling(2)
    events, reading = events_of(write(tmp_path / "t", TEXT + "\n" + later.text + later.text[:-1]))
    assert reading.files == 3
    assert not reading.skipped
    count = len(json.loads(later.text))
    assert len(events) == len(EVENTS) + 2 * count
    assert events[: len(EVENTS)] == EVENTS
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    last = EVENTS[-1]["ts"]
    second = [e for e in events[len(EVENTS) : len(EVENTS) + count] if "ts" in e]
    assert second[0]["ts"] == last  # the time between the two does not count
    original = [event for event in json.loads(later.text) if "ts" in event]
    assert [e["ts"] - last for e in second] == [e["ts"] - original[0]["ts"] for e in original]
    assert {event["pid"] // TENSORS for event in events} == {0, 1, 2}


def test_a_slice_keeps_the_names(tmp_path: Path) -> None:
    path = write(tmp_path / "t", TEXT)
    events, _ = events_of(path, window=(0.07, 0.14))
    assert [e for e in events if e["ph"] == "M"] == [e for e in EVENTS if e["ph"] == "M"]
    inside = [e for e in EVENTS if 1_070_000 <= e.get("ts", 0) < 1_140_000]
    assert [e for e in events if e["ph"] != "M"] == inside
    assert inside


def test_a_block_of_zeros_loses_only_its_events(tmp_path: Path) -> None:
    start, end = ENDS[20] - 5, ENDS[24] + 9
    holed = TEXT[:start] + "\0" * (end - start) + TEXT[end:]
    events, reading = events_of(write(tmp_path / "t", holed))
    assert events == EVENTS[:20] + EVENTS[26:]
    assert reading.skipped > 0
    assert not reading.cut


NAMES = [
    'a "quoted" name',
    "back\\slash",
    "new\nline",
    "</script><img src=x onerror=alert(1)>",
    "}]",
    "Ünïcode 🔥 \u2028",
    "\udcff\udcfe",  # invalid UTF-8
    '{"name": "process_name"',
    "",
]


@pytest.mark.parametrize("chunk", [64, read.CHUNK])
@pytest.mark.parametrize("name", NAMES)
def test_names_that_break_the_json_are_read(
    name: str, chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK", chunk)
    recorded = Timeline()
    recorded.negotiate("before", 10, {0: 0, 1: 5})
    recorded.negotiate(name, 20, {0: 0, 1: 5})
    recorded.negotiate("after", 30, {0: 0, 1: 5})
    content = recorded.text.encode("utf-8", "surrogateescape")
    events, reading = events_of(write(tmp_path / "t", content))
    named = {e["pid"]: e["args"]["name"] for e in events if "name" in e.get("args", {})}
    shown = name.encode("utf-8", "surrogateescape").decode(errors="replace")
    assert named == {1: "before", 2: shown, 3: "after"}
    assert sum(e["ph"] == "B" for e in events) == 3
    assert not reading.skipped


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(TEXT)), st.integers(0, 400), st.binary(max_size=60), st.integers(30, 900))
def test_no_damage_is_fatal(
    tmp_path_factory: pytest.TempPathFactory, offset: int, removed: int, added: bytes, chunk: int
) -> None:
    content = TEXT.encode()
    content = content[:offset] + added + content[offset + removed :]
    path = write(tmp_path_factory.mktemp("damaged") / "t", content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(read, "CHUNK", chunk)
        try:
            events, _ = events_of(path)
        except UsageError:
            assert offset < 150  # the file is no longer recognizable
            return
    untouched = [event for event, end in zip(EVENTS, ENDS, strict=True) if end + 2 < offset]
    assert events[: len(untouched)] == untouched
    assert all(isinstance(event, dict) for event in events)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (gzip.compress(b"[1]", mtime=0)[:5], "is cut or damaged before its first event"),
        (gzip.compress(b"[1]", mtime=0)[:11], "is cut or damaged before its first event"),
        (b"[options]\nname = hvdtrain\n", "is not a timeline"),
        (b"[1, 2, 3]", "is not a timeline"),
        (b'{"a": {"b": 1}}', "is not a timeline"),
        (b'{"traceEvents": 7}', "is not a timeline"),
        (b"\x7fELF" + random.Random(1).randbytes(3000), "is not a timeline"),
        (b"{" * 100_000, "is not a timeline"),
        (b"[\nsome other text", "is not a timeline"),
    ],
)
def test_other_files_are_rejected_in_one_line(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message) as error:
        events_of(write(tmp_path / "t", content))
    assert len(str(error.value).splitlines()) == 1
    assert str(tmp_path / "t") in str(error.value)


def test_a_large_file_of_another_kind_is_not_read_to_its_end(tmp_path: Path) -> None:
    path = write(tmp_path / "t", b"x" * 5_000_000)
    reading = Reading(path)
    with pytest.raises(UsageError):
        list(timeline(reading))
    assert reading.size <= 2_000_000


@pytest.mark.parametrize(("name", "message"), [("missing", "No such file"), (".", "directory")])
def test_an_unreadable_file_is_reported(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        events_of(tmp_path / name)


@pytest.mark.parametrize("chunk", [100, 1000, read.CHUNK])
def test_names_that_fill_chunks_do_not_turn_the_clock_back(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK", chunk)
    later = Timeline()
    later.pieces += [  # a run names all tensors before its first step
        f'{{"name": "process_name", "ph": "M", "pid": {n}, "args": {{"name": "layer {n}"}}}},\n'
        for n in range(1000, 2000)
    ]
    later.negotiate("gradient", 2_000_000, {0: 0, 1: 50_000})
    events, reading = events_of(write(tmp_path / "t", TEXT + "\n" + later.text))
    assert reading.files == 2
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    assert times[-1] == EVENTS[-1]["ts"] + 50_000
