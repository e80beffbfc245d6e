"""The page of a timeline in a browser: mouse, keys, touch, print, dark theme."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain import cli
from tests.browser.conftest import Browser
from tests.timelines import HOSTILE, Timeline, hostile, straggling

DESKTOP, PHONE = (1280, 900), (375, 812)


def page_of(timeline: Timeline, folder: Path) -> Path:
    page = folder / "page.html"
    assert cli.main(["timeline", str(timeline.write(folder)), "--html", str(page)]) == 0
    return page


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return page_of(straggling(12, tensors=8), tmp_path_factory.mktemp("page"))


def view(browser: Browser) -> dict[str, float]:
    """Return the canvas's range in microseconds, and its numbers of lanes and rectangles."""
    browser.settle()
    return {k: float(v) for k, v in browser.run("return {...canvas.dataset}").items()}


def position(browser: Browser, time: float, lane: int) -> tuple[float, float]:
    """Return the point of the window of a lane and a time."""
    x, y = browser.run(
        "canvas.scrollIntoView(); const box = canvas.getBoundingClientRect();"
        "return [box.left + pixelOf(arguments[0]),"
        "  box.top + TOP + (arguments[1] + 0.5) * LANE - view.scroll];",
        time,
        lane,
    )
    return x, y


def mouse(browser: Browser, kind: str, x: float, y: float, **more: Any) -> None:
    browser.command("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)


def click(browser: Browser, x: float, y: float) -> None:
    for kind in ("mousePressed", "mouseReleased"):
        mouse(browser, kind, x, y, button="left", clickCount=1)
    browser.settle()


def touch(browser: Browser, kind: str, *points: tuple[float, float]) -> None:
    shown = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
    browser.command("Input.dispatchTouchEvent", type=kind, touchPoints=shown)


def details(browser: Browser) -> list[str]:
    return str(browser.run("return details.textContent")).splitlines()


@pytest.mark.parametrize("size", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_the_page_has_no_errors_and_no_horizontal_scrolling(
    size: tuple[int, int], dark: bool, browser: Browser, page: Path, tmp_path: Path
) -> None:
    browser.open(page, *size, dark=dark)
    assert view(browser)["lanes"] == 3 + 8
    pixels = browser.screenshot(tmp_path / "page.png")
    assert browser.complaints == []
    assert browser.run("return document.documentElement.scrollWidth") <= size[0]
    assert "rank 2 was ready last in 11 of 11 steps" in browser.run(
        "return document.body.innerText"
    )
    # Names are broken into some lines at most, not letter by letter.
    heights = "return [...document.querySelectorAll('tbody th')].map(th => th.offsetHeight)"
    assert max(browser.run(heights)) < 100
    # The axes of breakdown and trace have ticks that do not overlap.
    assert browser.run("return Number(canvas.dataset.ticks)") >= 3
    edges = browser.run(
        "return [...document.querySelectorAll('.times span')]"
        "  .map(s => s.getBoundingClientRect()).flatMap(b => [b.left, b.right])"
    )
    assert len(edges) >= 6 and edges == sorted(edges)
    assert edges[0] >= 0 and edges[-1] <= size[0]
    paper = pixels[2, 2].mean()
    assert (paper < 60) if dark else (paper > 240)
    # The canvas has the colours of bars.
    box = browser.run("const b = canvas.getBoundingClientRect(); return [b.left, b.top, b.width]")
    left, top, width = (round(value) for value in box)
    lanes = pixels[top + 60 : top + 220, left + width // 2 : left + width - 5].reshape(-1, 3)
    assert len(np.unique(lanes, axis=0)) > 5


def test_buttons_and_keys(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    start = view(browser)
    browser.find("#all").click()
    whole = view(browser)
    span = browser.run("return data.span")
    assert (whole["from"], whole["to"]) == (0, span)
    assert start["to"] - start["from"] < span / 8  # it opens at one step
    browser.find("#in").click()
    closer = view(browser)
    assert closer["to"] - closer["from"] == pytest.approx(span / 2)
    browser.find("#next").click()
    first = view(browser)
    browser.find("#next").click()
    second = view(browser)
    assert second["from"] - first["from"] == pytest.approx(70_000)
    browser.find("#previous").click()
    assert view(browser) == pytest.approx(first, rel=1e-9, abs=20)
    canvas = browser.find("#canvas")
    for key, factor in (("+", 0.5), ("-", 2.0)):
        before = view(browser)
        canvas.send_keys(key)
        after = view(browser)
        assert (after["to"] - after["from"]) / (before["to"] - before["from"]) == pytest.approx(
            factor
        )
    before = view(browser)
    canvas.send_keys("\ue014")  # right
    assert view(browser)["from"] > before["from"]
    canvas.send_keys("0")
    assert view(browser)["to"] == span
    assert browser.complaints == []


def test_a_click_shows_the_tensor_and_the_late_rank(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    view(browser)
    click(browser, *position(browser, 70_000 + 20_000, 3))  # the first tensor, second step
    lines = details(browser)
    assert lines[0] == "gradient.0"
    assert lines[1] == "NEGOTIATE_ALLREDUCE (negotiate), 50.0 ms from 0.070000 s"
    assert lines[2] == "ready: rank 0 +0 µs, rank 1 +1 µs, rank 2 +50.0 ms"
    assert lines[3] == "rank 2 was late by 50.0 ms"
    click(browser, *position(browser, 70_000 + 20_000, 2))
    assert details(browser)[0] == "Rank 2 is late with"
    click(browser, *position(browser, 70_000 + 20_000, 0))
    assert details(browser)[0] == "Rank 0 waits for others with"
    mouse(browser, "mouseMoved", *position(browser, 70_000 + 51_900, 5))
    assert details(browser)[1].startswith("MPI_ALLREDUCE (collective), 2.00 ms")


def test_wheel_and_drag(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    browser.find("#all").click()
    x, y = position(browser, 400_000, 4)
    mouse(browser, "mouseWheel", x, y, deltaX=0, deltaY=-400)
    zoomed = view(browser)
    whole = browser.run("return data.span")
    assert zoomed["to"] - zoomed["from"] == pytest.approx(whole / np.e, rel=0.01)
    here = browser.run("return timeAt(arguments[0] - canvas.getBoundingClientRect().left)", x)
    assert here == pytest.approx(400_000, rel=0.01)  # what was under the pointer stays there
    mouse(browser, "mousePressed", x, y, button="left", clickCount=1)
    mouse(browser, "mouseMoved", x - 100, y, button="left", buttons=1)
    mouse(browser, "mouseReleased", x - 100, y, button="left", clickCount=1)
    moved = view(browser)
    assert moved["from"] > zoomed["from"]
    assert moved["to"] - moved["from"] == pytest.approx(zoomed["to"] - zoomed["from"])
    x, y = browser.run(
        "const b = canvas.getBoundingClientRect(); return [b.right - 10, b.top + 10]"
    )
    click(browser, x, y)  # the overview goes there
    assert view(browser)["to"] == pytest.approx(whole)


def test_search_and_filter(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    view(browser)
    search = browser.find("#search")
    search.send_keys("Gradient.3")
    assert view(browser)["lanes"] == 3 + 1
    assert browser.run("return note.textContent") == "1 of 8 tensors"
    search.send_keys("x")
    assert view(browser)["lanes"] == 3
    assert browser.run("return note.textContent") == "0 of 8 tensors"
    browser.run("search.value = ''; search.dispatchEvent(new Event('input'))")
    everything = view(browser)
    assert everything["lanes"] == 11
    names = browser.run(
        "return [...document.querySelectorAll('#filter label')].map(l => l.innerText)"
    )
    assert [name.strip() for name in names] == [
        "negotiate",
        "operation",
        "memcpy in",
        "collective",
        "memcpy out",
        "rank waits for others",
        "rank is late",
    ]
    browser.find("#filter label input").click()
    assert view(browser)["rectangles"] <= everything["rectangles"] - 8
    click(browser, *position(browser, 70_000 + 20_000, 3))
    assert details(browser)[0].startswith("Point at a bar")  # what is hidden cannot be hit


def test_fingers(browser: Browser, page: Path) -> None:
    browser.open(page, *PHONE)
    view(browser)
    x, y = position(browser, 70_000 + 20_000, 3)
    touch(browser, "touchStart", (x, y))
    touch(browser, "touchEnd")
    browser.settle()
    assert details(browser)[0] == "gradient.0"
    before = view(browser)
    touch(browser, "touchStart", (x, y), (x + 40, y))
    touch(browser, "touchMove", (x - 40, y), (x + 80, y))
    touch(browser, "touchEnd")
    pinched = view(browser)
    assert pinched["to"] - pinched["from"] < 0.7 * (before["to"] - before["from"])
    touch(browser, "touchStart", (x, y))
    touch(browser, "touchMove", (x - 60, y))
    touch(browser, "touchEnd")
    dragged = view(browser)
    assert dragged["from"] > pinched["from"]
    assert browser.run("return window.scrollX") == 0
    assert browser.complaints == []


def test_a_slow_step_of_the_table_is_shown(browser: Browser, page: Path) -> None:
    browser.open(page, *DESKTOP)
    button = browser.find("button.step")
    number = int(button.text.split()[1])
    button.click()
    shown = view(browser)
    assert shown["from"] < (number - 1) * 70_000 < number * 70_000 < shown["to"]


def test_hostile_names_are_escaped(browser: Browser, tmp_path: Path) -> None:
    browser.open(page_of(hostile(), tmp_path), *DESKTOP)
    assert view(browser)["lanes"] == 2 + len(HOSTILE)
    for lane in range(2, 2 + len(HOSTILE)):
        start = 1_000 + 6_000 * (lane - 2) - 1_000
        browser.run("show(arguments[0] - 500, arguments[0] + 6000)", start)
        view(browser)
        click(browser, *position(browser, start + 1_000, lane))
        text = browser.run("return details.textContent")
        assert text.startswith(HOSTILE[lane - 2])
    assert browser.run("return window.hacked === undefined")
    assert browser.run("return document.querySelectorAll('img, marquee, main script').length") == 0
    assert browser.complaints == []


def test_a_script_that_got_into_the_page_is_not_executed(browser: Browser, tmp_path: Path) -> None:
    page = page_of(straggling(5), tmp_path)
    evil = "<script>window.hacked = 1</script><img src=x: onerror='window.hacked = 2'>"
    page.write_text(page.read_text().replace("<main>", f"<main>{evil}"))
    browser.open(page, *DESKTOP)
    assert view(browser)["lanes"] > 0  # the page's own script
    assert browser.run("return window.hacked === undefined")
    assert len([line for line in browser.complaints if "Content Security Policy" in line]) >= 2


def test_the_printed_page_has_the_tables_and_the_picture(
    browser: Browser, page: Path, tmp_path: Path
) -> None:
    browser.open(page, 1280, 900, dark=True)
    view(browser)
    browser.command("Emulation.setEmulatedMedia", media="print", features=[])
    assert not browser.find("#canvas").is_displayed()
    assert browser.find(".picture").is_displayed()
    assert browser.find("table").is_displayed()
    pixels = browser.screenshot(tmp_path / "paper.png")
    assert pixels[2, 2].mean() > 240
    printed = base64.b64decode(browser.command("Page.printToPDF")["data"])
    assert printed.startswith(b"%PDF")
    browser.command("Emulation.setEmulatedMedia", media="", features=[])


def test_a_hundred_thousand_events_are_drawn(browser: Browser, tmp_path: Path) -> None:
    timeline = straggling(450, tensors=24)  # 11 events and 3 ticks per tensor and step
    browser.open(page_of(timeline, tmp_path), *DESKTOP)
    assert browser.run("return 2 * data.bars.row.length + data.ticks.bar.length") > 100_000
    browser.find("#all").click()
    shown = view(browser)
    assert shown["lanes"] == 27
    # The number of rectangles is limited by the width, not by the number of bars.
    width = browser.run("return size.width")
    assert 0 < shown["rectangles"] < 27 * 3 * width
    browser.find("#next").click()
    assert 0 < view(browser)["rectangles"] < 27 * 12
    assert browser.complaints == []


def test_the_end_of_the_details_is_reported(
    browser: Browser, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hvdtrain.commands.timeline.analyse.MAX_RECORDED", 1000)
    browser.open(page_of(straggling(100), tmp_path), *DESKTOP)
    view(browser)
    note = browser.run("return note.textContent")
    assert note.startswith("Bars up to ")
    assert "--slice" in note
    browser.run("document.querySelector('button.step').dataset.step = 99")
    browser.find("button.step").click()
    assert "Step 99 is after" in browser.run("return note.textContent")
