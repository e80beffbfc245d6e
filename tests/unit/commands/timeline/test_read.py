"""Reading of files: complete, cut anywhere, damaged, or no timelines."""

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
from hvdtrain.commands.timeline.read import Reading, timeline
from hvdtrain.errors import UsageError
from tests.timelines import EPOCH, straggling

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
    assert (reading.epoch, reading.first) == (EPOCH, 1_000_000)


def test_a_file_cut_at_any_byte_is_read_up_to_its_last_complete_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK", 700)
    path = tmp_path / "t"
    for size in range(ENDS[0], len(TEXT), 7):
        whole = sum(end <= size for end in ENDS)
        events, reading = events_of(write(path, TEXT[:size]))
        assert events == EVENTS[:whole], size
        assert (reading.skipped, reading.closed) == (0, False)
        rest = TEXT[ENDS[whole - 1] : size]
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
    ],
    ids=["lines", "spaces"],
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
        (gzip.compress(b"[1]", mtime=0)[:11], "is empty"),
        (b"[options]\nname = hvdtrain\n", "is not a timeline"),
        (b"[1, 2, 3]", "is not a timeline"),
        (TEXT.encode() + TEXT[:900].encode(), "contains several timelines"),
        (b'[{"a": {"b": 1}}]', "is not a timeline"),
        (b'[{"ph": "B", "ts": "0", "pid": 1}]', "is not a timeline"),
        (b"\x7fELF" + random.Random(1).randbytes(3000), "is not a timeline"),
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
