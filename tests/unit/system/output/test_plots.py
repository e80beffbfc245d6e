"""The plot style: equal in the homework, legible in grey; PDF and PNG are reproducible."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import matplotlib
import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_rgb

from hvdtrain.system.output import plots
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def _restore() -> Iterator[None]:
    with matplotlib.rc_context():
        yield


def test_the_homework_has_the_same_style() -> None:
    homework = runpy.run_path(str(ROOT / "homework" / "plot_accuracy.py"))
    for name in ("COLOURS", "LINES", "MARKERS", "GREY", "SETTINGS"):
        assert homework[name] == getattr(plots, name), name
    for number in range(2 * len(plots.COLOURS)):
        assert homework["series"](number) == plots.series(number)


def test_style_sets_its_settings() -> None:
    plots.style()
    for name, value in plots.SETTINGS.items():
        assert matplotlib.rcParams[name] == (list(value) if "figsize" in name else value)
    assert matplotlib.rcParams["axes.prop_cycle"].by_key() == {"color": list(plots.COLOURS)}
    assert matplotlib.get_backend().lower() == "agg"


def test_every_series_has_a_distinct_line_and_marker() -> None:
    assert len(plots.COLOURS) == len(plots.LINES) == len(plots.MARKERS)
    for each in (plots.COLOURS, plots.LINES, plots.MARKERS):
        assert len(set(each)) == len(each)


def test_neighbours_differ_in_grey_and_all_differ_from_paper() -> None:
    def luminance(colour: str) -> float:
        red, green, blue = to_rgb(colour)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    grey = [luminance(colour) for colour in plots.COLOURS]
    assert all(abs(first - second) > 0.1 for first, second in pairwise(grey)), grey
    assert max(grey) < 0.75


def test_save_writes_pdf_with_its_fonts_and_png(tmp_path: Path) -> None:
    contents = []
    for folder in ("one", "two"):
        plots.style()
        figure, axes = plt.subplots()
        axes.plot([1, 2], [3, 4], **plots.series(1))
        axes.set_xlabel("ranks")
        files = plots.save(figure, tmp_path / folder / "a.b")
        assert files == [tmp_path / folder / "a.b.pdf", tmp_path / folder / "a.b.png"]
        contents.append([file.read_bytes() for file in files])
        assert not plt.fignum_exists(figure.number)
    pdf, png = contents[0]
    assert pdf.startswith(b"%PDF-") and b"/FontFile2" in pdf  # an embedded TrueType font
    assert b"/Type3" not in pdf and b"CreationDate" not in pdf
    assert png.startswith(b"\x89PNG")
    assert contents[0] == contents[1]


@pytest.mark.parametrize("name", ["study", "study.png", "study.pdf"])
def test_the_name_of_a_plot_may_have_a_suffix(tmp_path: Path, name: str) -> None:
    plots.style()
    figure, _ = plt.subplots()
    assert plots.save(figure, tmp_path / name) == [tmp_path / "study.pdf", tmp_path / "study.png"]
    assert len(list(tmp_path.iterdir())) == 2
