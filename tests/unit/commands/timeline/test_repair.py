"""Repaired files are valid, balanced, and hold all that could be read."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.commands.timeline.facts import analyse
from hvdtrain.commands.timeline.read import repair
from hvdtrain.errors import HvdtrainError
from tests.timelines import Timeline, straggling

TIMELINE = straggling(4)
TEXT = TIMELINE.text


def check(events: list[dict[str, Any]]) -> None:
    """What chrome://tracing and Perfetto need."""
    depth: Counter[int] = Counter()
    last = 0
    for event in events:
        assert isinstance(event["ph"], str)
        assert event["pid"] == event["tid"]
        if event["ph"] == "M":
            continue
        assert event["ts"] >= last
        last = event["ts"]
        depth[event["pid"]] += {"B": 1, "E": -1}.get(event["ph"], 0)
        assert depth[event["pid"]] >= 0
    assert not any(depth.values())


@settings(max_examples=100, deadline=None)
@given(st.integers(1, len(TEXT)))
def test_any_cut_is_mended(tmp_path_factory: pytest.TempPathFactory, size: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    source, target = folder / "cut.json", folder / "whole.json"
    source.write_text(TEXT[:size])
    done = repair(source, target)
    events = json.loads(target.read_text())
    check(events)
    assert len(events) == done.events
    assert done.dropped == 0
    read = analyse(source)[0]["file"]
    assert done.events == read["events"] + read["open_bars"]
    assert done.closed == read["open_bars"]


def test_a_whole_file_stays_as_it_is_but_for_the_threads(tmp_path: Path) -> None:
    source, target = TIMELINE.write(tmp_path), tmp_path / "out.json"
    done = repair(source, target)
    events = json.loads(target.read_text())
    assert [{k: v for k, v in e.items() if k != "tid"} for e in events] == json.loads(TEXT)
    assert (done.closed, done.dropped) == (0, 0)


def test_it_may_replace_its_source(tmp_path: Path) -> None:
    source = tmp_path / "t.json"
    source.write_text(TEXT[:3000])
    repair(source, source)
    check(json.loads(source.read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_a_slice_drops_ends_without_beginning(tmp_path: Path) -> None:
    source, target = TIMELINE.write(tmp_path), tmp_path / "out.json"
    done = repair(source, target, (0.03, 0.16))
    check(json.loads(target.read_text()))
    assert done.dropped == 3
    assert done.closed > 0


def test_several_in_one_file_are_one_afterwards(tmp_path: Path) -> None:
    source, target = tmp_path / "t.json", tmp_path / "out.json"
    source.write_text(TEXT[:3000] + TEXT)
    repair(source, target)
    events = json.loads(target.read_text())
    check(events)
    named = {e["pid"]: e["args"]["name"] for e in events if "name" in e.get("args", {})}
    assert sorted(named.values()) == sorted(2 * ["gradient.0", "gradient.1", "gradient.2"])


@pytest.mark.parametrize("name", ['a "b"', "line\nbreak", "\\", "\ud800 half", "é🔥"])
def test_strange_names_are_written_rightly(name: str, tmp_path: Path) -> None:
    made = Timeline()
    made.negotiate("NAME", 0, {0: 0, 1: 9})
    source, target = tmp_path / "t.json", tmp_path / "out.json"
    half = name.startswith("\ud800")
    source.write_text(made.text.replace("NAME", "\\ud800 half" if half else name))
    repair(source, target)
    events = json.loads(target.read_text())
    assert [e["args"]["name"] for e in events if "name" in e.get("args", {})] == [name]


def test_events_without_time_or_kind_are_left_out(tmp_path: Path) -> None:
    source, target = tmp_path / "t.json", tmp_path / "out.json"
    odd = '{"ph": "B", "pid": 1, "name": "x"},{"ph": 7, "ts": 1},{"ph": "B", "ts": 1, "pid": []},'
    source.write_text(TEXT[:-1] + "," + odd)
    assert repair(source, target).dropped == 3
    check(json.loads(target.read_text()))


def test_an_error_on_the_way_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = TIMELINE.write(tmp_path), tmp_path / "out.json"
    target.write_text("before")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(HvdtrainError, match=r"out\.json cannot be written: No space left"):
        repair(source, target)
    assert target.read_text() == "before"
    assert len(list(tmp_path.iterdir())) == 2
