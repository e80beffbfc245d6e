"""``--html``: a self-contained page: tables, a time breakdown, a trace to zoom and move.

Tensor names are untrusted: Jinja2 escapes them in the markup, and its ``tojson`` writes the data so
that no name can end the script element.
"""

from __future__ import annotations

import math
from pathlib import Path

from markupsafe import Markup

from hvdtrain.commands.timeline import report
from hvdtrain.commands.timeline.analyse import Analysis, Recorder
from hvdtrain.commands.timeline.events import COMMUNICATING, KINDS, STATES, WAITING
from hvdtrain.commands.timeline.facts import TimelineFacts
from hvdtrain.system.output import page
from hvdtrain.system.output.text import printable

WEB = Path(__file__).with_name("web")
SCRIPTS = ("data.js", "draw.js", "page.js")
PICTURE = 512  # columns of the static picture
ROWS = 20  # of the table of tensors
TICKS = 5  # maximum number of intervals on its axis


def render(facts: TimelineFacts, analysis: Analysis, recorder: Recorder) -> str:
    """Return the text of the page."""
    columns = [[round(v) for v in row] for row in analysis.history.columns(analysis.times)]
    width = analysis.history.width
    tables = [report.states(facts)]
    tables += [report.lateness(facts)] if facts.lateness.recorded else []
    tables += [report.phases(facts)]
    tables += [report.operations(facts)] if facts.operations else []
    tables += [report.tensors(facts, ROWS)]
    return page.render(
        WEB / "page.html",
        subject=printable(facts.file.path),
        head=report.head(facts),
        verdict=facts.verdict,
        code=Markup("\n".join((WEB / name).read_text() for name in SCRIPTS)),
        picture=picture(columns, width, facts.seconds),
        ticks=ticks(facts.file.begin, facts.seconds),
        tables=tables,
        slowest=report.slowest(facts),
        cycles=report.cycles(facts),
        unseen=report.UNSEEN,
        data={**data(facts, recorder), "history": {"width": width, "rows": columns}},
    )


def data(facts: TimelineFacts, recorder: Recorder) -> dict[str, object]:
    """Return the data of the interactive view; times are microseconds since the first event."""
    begin = facts.file.begin
    origin = facts.file.first + 1e6 * begin

    def since(times: list[float]) -> list[int]:
        return [round(time - origin) for time in times]

    bar, tick, step = recorder.bars, recorder.ticks, recorder.steps
    starts = since(bar["start"])
    lengths = [round(e - s) for s, e in zip(bar["start"], bar["end"], strict=True)]
    return {
        "begin": round(begin * 1e6),
        "span": round(facts.seconds * 1e6),
        "detail": None if recorder.end is None else round(recorder.end - origin),
        "rows": list(recorder.rows),
        "kinds": KINDS,
        "phases": [[p.name, KINDS.index(p.kind)] for p in recorder.phases],
        "bars": {"row": bar["row"], "phase": bar["phase"], "start": starts, "length": lengths},
        "ticks": {"bar": tick["bar"], "rank": tick["rank"], "time": since(tick["time"])},
        "late": recorder.late,
        "steps": {"number": step["number"], "start": since(step["start"])},
    }


def picture(columns: list[list[int]], width: float, seconds: float) -> list[dict[str, str]]:
    """Return the states over the time of the file as areas of a picture 1000 wide and 100 high.

    Each state except ``neither``, from the bottom up, has a name and the points of a polygon;
    ``columns``: microseconds by state and interval of ``width`` microseconds.
    """
    count = len(columns[0])
    group = -(-count // PICTURE)
    wide = 1e-3 * group * width / seconds if seconds else 0.0
    areas, below = [], [0.0] * -(-count // group)
    for state in (COMMUNICATING, WAITING):
        sums = [sum(columns[state][i : i + group]) for i in range(0, count, group)]
        tops = [b + 100 * s / (group * width) for b, s in zip(below, sums, strict=True)]
        upper = [(x, top) for i, top in enumerate(tops) for x in (i * wide, (i + 1) * wide)]
        lower = [(x, low) for i, low in enumerate(below) for x in (i * wide, (i + 1) * wide)]
        points = [f"{min(x, 1000):.1f},{100 - y:.1f}" for x, y in [*upper, *reversed(lower)]]
        areas.append({"state": STATES[state], "points": " ".join(points)})
        below = tops
    return areas


def ticks(begin: float, seconds: float) -> list[dict[str, object]]:
    """Return the ticks of the axis: round times from ``begin`` on, ``at`` % of its width."""
    if not seconds:
        return []
    power = 10.0 ** math.floor(math.log10(seconds / TICKS))
    step = power * next(f for f in (1, 2, 5, 10) if TICKS * f * power >= 0.999 * seconds)
    factor, unit = (1, "s") if step >= 0.01 else (1e3, "ms") if step >= 1e-5 else (1e6, "µs")
    digits = max(0, -math.floor(math.log10(step * factor) + 1e-9))
    first, last = math.ceil(begin / step - 1e-9), math.floor((begin + seconds) / step + 1e-9)
    return [
        {
            "at": round(100 * (number * step - begin) / seconds, 2),
            "text": f"{number * step * factor:.{digits}f} {unit}",
        }
        for number in range(first, last + 1)
    ]
