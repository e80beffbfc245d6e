"""The page: self-contained, its data true to the file, names of tensors nothing but text."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.timeline import bars, recorder
from hvdtrain.timeline.page import picture, render
from hvdtrain.timeline.recorder import Recorder
from hvdtrain.timeline.verb import analyse
from tests.timelines import HOSTILE, Timeline, hostile, straggling


class Reader(HTMLParser):
    """Collects elements, their attributes, and the text of each script."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data
        else:
            self.text += data


def page_of(timeline: Timeline, folder: Path, **options: Any) -> tuple[str, Recorder]:
    recording = Recorder()
    facts, analysis = analyse(timeline.write(folder), recorder=recording, **options)
    return render(facts, analysis, recording), recording


def data_of(page: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(Reader(page).scripts[0])
    return data


def test_it_needs_nothing_else(tmp_path: Path) -> None:
    page, _ = page_of(straggling(5), tmp_path)
    reader = Reader(page)
    for tag, attributes in reader.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed")
        assert not attributes.keys() & {"src", "href", "action", "onload", "onclick", "onerror"}
    assert not re.search(r"https?:|@import|url\((?!#)|fetch\(|XMLHttp|import\(", page)
    assert "default-src 'none'" in page
    assert "Bound by a straggler" in page


def test_the_data_are_those_of_the_file(tmp_path: Path) -> None:
    data = data_of(page_of(straggling(5), tmp_path)[0])
    columns = data["bars"]
    assert {len(column) for column in columns.values()} == {5 * 3 * 5}
    assert data["rows"] == ["gradient.0", "gradient.1", "gradient.2"]
    negotiations = [
        i
        for i, number in enumerate(columns["phase"])
        if data["phases"][number] == ["NEGOTIATE_ALLREDUCE", bars.KINDS.index("negotiate")]
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
    waiting = data["course"]["rows"][bars.WAITING]
    assert sum(waiting) == pytest.approx(5 * 50_210, abs=len(waiting))


def test_a_slice_keeps_the_clock_of_the_file(tmp_path: Path) -> None:
    data = data_of(page_of(straggling(5), tmp_path, span=(0.139, 0.3))[0])
    assert data["begin"] == 140_000
    assert data["steps"]["start"][0] == 0


def test_a_long_file_is_shown_in_detail_as_far_as_a_browser_can_bear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST", 100)
    page, recording = page_of(straggling(50), tmp_path)
    data = data_of(page)
    assert len(recording.bars["row"]) + len(recording.ticks["bar"]) <= 100
    assert 0 < data["detail"] < data["span"]
    assert len(data["course"]["rows"][0]) > 100  # the whole file, in little


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    page, _ = page_of(hostile(), tmp_path)
    reader = Reader(page)
    assert len(reader.scripts) == 2
    assert data_of(page)["rows"] == HOSTILE
    assert not {tag for tag, _ in reader.tags} & {"img", "b2", "marquee"}
    for name in HOSTILE:
        if "<" in name:
            assert name not in page


def test_without_a_single_tensor_there_is_a_page_too(tmp_path: Path) -> None:
    page, _ = page_of(Timeline(), tmp_path)
    assert "Too little to judge" in page


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
