"""The page is self-contained, its data equal those of the file, tensor names are escaped."""

from __future__ import annotations

import itertools
import json
import math
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.commands.timeline import events
from hvdtrain.commands.timeline.analyse import Recorder
from hvdtrain.commands.timeline.trace_page import picture, render, ticks
from hvdtrain.commands.timeline.verdict import analyse
from tests.html import Page
from tests.timelines import HOSTILE, Timeline, hostile, straggling


def page_of(timeline: Timeline, folder: Path, **options: Any) -> tuple[str, Recorder]:
    recording = Recorder()
    facts, analysis = analyse(timeline.write(folder), recorder=recording, **options)
    return render(facts, analysis, recording), recording


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Page(page).scripts[0])
    return data


def test_the_page_loads_no_other_resource(tmp_path: Path) -> None:
    page, _ = page_of(straggling(5), tmp_path)
    Page(page).check_self_contained()
    assert not re.search(r"https?:|@import|url\((?!#)|fetch\(|XMLHttp|import\(", page)
    assert "Bound by a straggler" in page


def test_the_data_equal_those_of_the_file(tmp_path: Path) -> None:
    data = data_of(page_of(straggling(5), tmp_path)[0])
    columns = data["bars"]
    assert {len(column) for column in columns.values()} == {5 * 3 * 5}
    assert data["rows"] == ["gradient.0", "gradient.1", "gradient.2"]
    negotiations = [
        i
        for i, number in enumerate(columns["phase"])
        if data["phases"][number] == ["NEGOTIATE_ALLREDUCE", events.KINDS.index("negotiate")]
    ]
    assert len(negotiations) == 15
    assert columns["start"][negotiations[0]] == 0
    assert columns["length"][negotiations[0]] == 50_010
    assert data["ticks"]["bar"][:3] == [negotiations[0]] * 3
    assert data["ticks"]["rank"][:3] == [0, 1, 2]
    assert data["ticks"]["time"][:3] == [0, 1, 50_010]
    assert data["late"] == negotiations
    assert data["steps"] == {
        "number": [1, 2, 3, 4, 5],
        "start": [0, 70_000, 140_000, 210_000, 280_000],
    }
    assert data["detail"] is None
    waiting = data["history"]["rows"][events.WAITING]
    assert sum(waiting) == pytest.approx(5 * 50_210, abs=len(waiting))


def test_a_slice_keeps_the_clock_of_the_file(tmp_path: Path) -> None:
    data = data_of(page_of(straggling(5), tmp_path, span=(0.139, 0.3))[0])
    assert data["begin"] == 140_000
    assert data["steps"]["start"][0] == 0


def test_the_details_of_a_long_file_are_limited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdtrain.commands.timeline.analyse.MAX_RECORDED", 100)
    page, recording = page_of(straggling(50), tmp_path)
    data = data_of(page)
    assert len(recording.bars["row"]) + len(recording.ticks["bar"]) <= 100
    assert 0 < data["detail"] < data["span"]
    assert len(data["history"]["rows"][0]) > 100  # an overview of the whole file


def test_hostile_names_are_escaped(tmp_path: Path) -> None:
    page, _ = page_of(hostile(), tmp_path)
    reader = Page(page)
    assert len(reader.scripts) == 2
    assert data_of(page)["rows"] == HOSTILE
    assert not reader.tags & {"img", "b2", "marquee"}
    assert not any(name in page for name in HOSTILE if "<" in name)


def test_a_page_is_written_without_any_tensor(tmp_path: Path) -> None:
    page, _ = page_of(Timeline(), tmp_path)
    assert "Too little to judge" in page


@pytest.mark.parametrize(
    ("begin", "seconds", "expected"),
    [
        (0.0, 1.0, {0: "0.0 s", 20: "0.2 s", 40: "0.4 s", 60: "0.6 s", 80: "0.8 s", 100: "1.0 s"}),
        (10.7, 4.0, {7.5: "11 s", 32.5: "12 s", 57.5: "13 s", 82.5: "14 s"}),
        (0.0, 0.012, {0: "0 ms", 41.67: "5 ms", 83.33: "10 ms"}),
        (0.0, 3e-5, {0: "0 µs", 33.33: "10 µs", 66.67: "20 µs", 100: "30 µs"}),
        (5.0, 0.0, {}),
    ],
)
def test_the_axis_has_round_times(begin: float, seconds: float, expected: dict[float, str]) -> None:
    assert {tick["at"]: tick["text"] for tick in ticks(begin, seconds)} == expected


@given(st.floats(0, 1e5), st.floats(1e-5, 1e5))
def test_the_axis_is_never_empty_nor_crowded(begin: float, seconds: float) -> None:
    axis = ticks(begin, seconds)
    assert 2 <= len(axis) <= 6
    assert all(-0.01 <= tick["at"] <= 100.01 for tick in axis)


def lightness_and_hue(colour: str) -> tuple[float, float, float]:
    """Return the colour in CIE 1976 L*a*b* (D65), a perceptually uniform space."""

    def linear(value: int) -> float:
        share = value / 255
        return share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(int(colour[i : i + 2], 16)) for i in (1, 3, 5))
    sums = (
        (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.9505,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.089,
    )
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in sums)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_all_kinds_of_bars_have_distinct_colours() -> None:
    """Check both themes; a distance of 2.3 is just noticeable."""
    css = (files("hvdtrain.commands.timeline") / "web" / "page.css").read_text()
    light, dark = (
        dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", part)) for part in css.split("@media")[:2]
    )
    for theme in (light, {**light, **dark}):
        kinds = {kind: lightness_and_hue(theme[kind.replace(" ", "-")]) for kind in events.KINDS}
        for pair in itertools.combinations(kinds, 2):
            assert math.dist(*(kinds[kind] for kind in pair)) > 20, pair


def test_the_picture_stacks_the_states() -> None:
    columns = [[0, 5, 10, 0], [5, 5, 0, 0], [5, 0, 0, 10]]  # neither, waiting, communicating
    below, above = picture(columns, 10.0, 40e-6)
    assert below["state"] == "communicating"
    assert below["points"].split()[:8] == [
        "0.0,50.0",
        "250.0,50.0",
        "250.0,100.0",
        "500.0,100.0",
        "500.0,100.0",
        "750.0,100.0",
        "750.0,0.0",
        "1000.0,0.0",
    ]
    assert above["state"] == "waiting"
    assert above["points"].split()[:4] == ["0.0,0.0", "250.0,0.0", "250.0,50.0", "500.0,50.0"]
    assert above["points"].split()[8:10] == ["1000.0,0.0", "750.0,0.0"]
