"""``--html``: a self-contained page with diagrams of the collectives, plots and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from hvdtrain import __version__
from hvdtrain.commands.collectives.lesson import Cells, Collective, Outcome
from hvdtrain.system.files import replacing
from hvdtrain.system.output import plots
from hvdtrain.system.output.tables import Table
from hvdtrain.system.output.text import plural

# Dimensions of a diagram in pixels.
WIDE, HIGH = 34, 24  # of a cell
ROW = 32  # distance of rows
LEFT, TOP = 52, 26  # of the first cell
GAP = 110  # between the columns before and after
DIGIT = 9  # additional width per digit beyond two

HOW_TO_READ = (
    "Each rank has a row and a colour. A number has the colour of the rank from which it "
    "originates; a sum over all ranks is grey. Lines show which ranks receive data of a rank."
)


@dataclass(frozen=True)
class Section:
    """A section of the page: notes, and optionally diagrams, a plot and tables."""

    title: str
    notes: Sequence[str] = ()
    figure: Any = None  # of matplotlib
    tables: Sequence[tuple[str, Table]] = ()
    pictures: Sequence[tuple[Collective, dict[str, Any]]] = ()


def lesson_section(outcomes: Sequence[Outcome]) -> Section:
    """Return the section with a diagram per collective."""
    pictures = [(outcome.collective, picture(outcome)) for outcome in outcomes]
    return Section("Effect of each collective", (HOW_TO_READ,), pictures=pictures)


def write(target: Path, ranks: int, sections: Sequence[Section]) -> None:
    """Write the page atomically.

    Raises:
        UsageError, HvdtrainError: see ``replacing``.
    """
    with replacing(target) as file:
        file.write(render(ranks, sections).encode())


def render(ranks: int, sections: Sequence[Section]) -> str:
    """Return the text of the page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(
        (files("hvdtrain.commands.collectives") / "page.html").read_text()
    )
    return template.render(
        ranks=plural(ranks, "rank"),
        sections=[(part, plots.inline(part.figure) if part.figure else "") for part in sections],
        created=time.strftime("%d %B %Y, %H:%M"),
        version=__version__,
    )


def picture(outcome: Outcome) -> dict[str, Any]:
    """Return cells and lines of a diagram: a row per rank, before on the left, after on the right.

    A line leads from each rank to those that receive a number of it. Line and cell have the colour
    of the rank from which the number originates; a sum has none.
    """
    ranks = len(outcome.before)
    longest = max(len(str(v)) for rows in (outcome.before, outcome.after) for r in rows for v in r)
    wide = WIDE + DIGIT * max(0, longest - 2)
    right = LEFT + wide * _columns(outcome.before) + GAP
    cells, ways = [], set()
    for side, rows in ((LEFT, outcome.before), (right, outcome.after)):
        for rank, column, value in _numbered(rows):
            sources = outcome.origins(value)
            hue = _hue(sources[0][0], ranks) if len(sources) == 1 else None
            x, y = side + wide * column, TOP + ROW * rank
            cells.append({"x": x, "y": y, "value": value, "hue": hue})
            ways |= {(source, rank) for source, _ in sources if side == right}
    rows_at = [TOP + ROW * rank + HIGH // 2 for rank in range(ranks)]
    lines = [
        {
            "from": (LEFT + wide * len(outcome.before[source]), rows_at[source]),
            "to": (right, rows_at[rank]),
            "hue": _hue(source, ranks),
        }
        for source, rank in sorted(ways)
    ]
    return {
        "cells": cells,
        "lines": lines,
        "cell": (wide, HIGH),
        "size": (right + wide * _columns(outcome.after) + 4, TOP + ROW * ranks),
        "rows": list(enumerate(rows_at)),
        "heads": ((LEFT, "before"), (right, "after")),
    }


def _columns(rows: list[Cells]) -> int:
    return max(map(len, rows))


def _numbered(rows: list[Cells]) -> list[tuple[int, int, int]]:
    """Return (rank, column, number) of all numbers."""
    return [(rank, column, v) for rank, row in enumerate(rows) for column, v in enumerate(row)]


def _hue(rank: int, ranks: int) -> int:
    """Return the hue of a rank in degrees."""
    return (210 + 360 * rank // ranks) % 360
