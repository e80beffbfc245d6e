"""Repaired files are valid, balanced, and contain all readable events."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.commands.timeline.read import repair
from hvdtrain.commands.timeline.verdict import analyse
from hvdtrain.errors import HvdtrainError
from tests.timelines import Timeline, straggling

TIMELINE = straggling(4)
TEXT = TIMELINE.text


def check(events: list[dict[str, Any]]) -> None:
    """Check the requirements of chrome://tracing and Perfetto."""
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
@given(st.integers(TEXT.index("\n", 2), len(TEXT)))
def test_a_file_cut_anywhere_is_repaired(
    tmp_path_factory: pytest.TempPathFactory, size: int
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    source, target = folder / "cut.json", folder / "whole.json"
    source.write_text(TEXT[:size])
    counts = repair(source, target)
    events = json.loads(target.read_text())
    check(events)
    assert len(events) == counts.events
    assert counts.dropped == 0
    file = analyse(source)[0].file
    assert counts.events == file.events + file.open_bars
    assert counts.closed == file.open_bars


def test_a_complete_file_gains_only_thread_numbers(tmp_path: Path) -> None:
    source, target = TIMELINE.write(tmp_path), tmp_path / "out.json"
    counts = repair(source, target)
    events = json.loads(target.read_text())
    assert [{k: v for k, v in e.items() if k != "tid"} for e in events] == json.loads(TEXT)
    assert (counts.closed, counts.dropped) == (0, 0)


def test_a_repaired_file_may_replace_its_source(tmp_path: Path) -> None:
    source = tmp_path / "t.json"
    source.write_text(TEXT[:3000])
    repair(source, source)
    check(json.loads(source.read_text()))
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_ends_without_a_beginning_are_dropped_from_a_slice(tmp_path: Path) -> None:
    source, target = TIMELINE.write(tmp_path), tmp_path / "out.json"
    counts = repair(source, target, (0.03, 0.16))
    check(json.loads(target.read_text()))
    assert counts.dropped == 3
    assert counts.closed > 0


@pytest.mark.parametrize("name", ['a "b"', "line\nbreak", "\\", "é🔥"])
def test_special_characters_in_names_are_escaped(name: str, tmp_path: Path) -> None:
    timeline, target = Timeline(), tmp_path / "out.json"
    timeline.negotiate(name, 0, {0: 0, 1: 9})
    repair(timeline.write(tmp_path), target)
    events = json.loads(target.read_text())
    assert [e["args"]["name"] for e in events if "name" in e.get("args", {})] == [name]


def test_a_failed_write_keeps_the_existing_file(
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
