"""Timelines one after another in one file, on one clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from hvdtrain.timeline import read
from tests.timelines import Timeline
from tests.unit.test_timeline_read import EVENTS, TEXT, events_of, write


@pytest.mark.parametrize("chunk", [100, 1000, read.CHUNK])
def test_names_that_fill_chunks_do_not_turn_the_clock_back(
    chunk: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "CHUNK", chunk)
    other = Timeline()
    other.pieces += [  # as a run names all tensors before its first step
        f'{{"name": "process_name", "ph": "M", "pid": {n}, "args": {{"name": "layer {n}"}}}},\n'
        for n in range(1000, 2000)
    ]
    other.negotiate("gradient", 2_000_000, {0: 0, 1: 50_000})
    events, reading = events_of(write(tmp_path / "t", TEXT + "\n" + other.text))
    assert reading.files == 2
    times = [event["ts"] for event in events if "ts" in event]
    assert times == sorted(times)
    assert times[-1] == EVENTS[-1]["ts"] + 50_000
