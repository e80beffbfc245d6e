"""The largest batch that fits: search, extrapolation, and records."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.compare import largest
from hvdtrain.commands.compare.largest import FINE, predict, read_largest, search
from hvdtrain.commands.compare.table import figures, make_rows
from hvdtrain.errors import UsageError
from tests.unit.commands.compare.trials import DDP, SINGLE, trial

SIZES = st.integers(1, 10_000)


@given(threshold=st.integers(0, 10_000), start=SIZES, most=SIZES)
def test_the_search_returns_a_batch_that_fits(threshold: int, start: int, most: int) -> None:
    tried = []

    def fits(batch: int) -> bool:
        tried.append(batch)
        return batch <= threshold

    batch = search(fits, start, most)
    assert batch <= min(threshold, most)
    assert max(tried) <= most
    assert batch + max(1, batch // FINE) >= min(threshold, most)
    assert len(tried) == len(set(tried)) <= 30


@pytest.mark.parametrize(
    ("points", "budget", "batch"),
    [
        ([(8, 1080), (16, 1160), (32, 1320)], 2000, 100),  # 1000 bytes plus 10 per sample
        ([(8, 1080), (16, 1160), (32, 1320)], 13_990, 1200),
        ([(8, 1080), (16, 1160)], 500, 0),
        ([(8, 1080), (16, 1000)], 2000, None),  # noise
        ([(8, 1080)], 2000, None),
    ],
)
def test_the_line_through_the_peaks(
    points: list[tuple[int, int]], budget: int, batch: int | None
) -> None:
    assert predict(points, budget) == batch


def test_the_largest_batches_are_in_the_rows(tmp_path: Path) -> None:
    lines = [
        {"method": vars(SINGLE), "batch": 4096, "predicted": True},
        {"method": vars(DDP), "batch": None, "predicted": False},
    ]
    (tmp_path / largest.LINES).write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = make_rows([trial(SINGLE), trial(DDP)], folder=tmp_path)
    assert [row.largest_batch for row in rows] == [4096, None]
    header, cells = figures(rows)
    assert [row[header.index("largest")] for row in cells] == ["~4,096", "-"]
    (tmp_path / largest.LINES).write_text('{"method": {}, "batch": 1, "predicted": true}\n')
    with pytest.raises(UsageError, match=r"largest.jsonl, line 1: not a run of a search"):
        read_largest(tmp_path)
