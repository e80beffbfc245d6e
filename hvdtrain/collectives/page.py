"""``--html``: one file, without network, with pictures of the collectives, plots and tables."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from hvdtrain import __version__
from hvdtrain.collectives.lesson import Cells, Collective, Outcome
from hvdtrain.system.files import replacing
from hvdtrain.system.output import plots
from hvdtrain.system.output.tables import Table
from hvdtrain.system.output.text import plural

# Of a picture, in pixels.
WIDE, HIGH = 34, 24  # a cell
ROW = 32  # from one rank to the next
LEFT, TOP = 52, 26  # of the first cell
GAP = 110  # between before and after, for the lines
DIGIT = 9  # that a digit more than two takes

HOW_TO_READ = (
    "Each rank is a row and has a colour. A number keeps the colour of the rank that it comes "
    "from; a sum, which comes from all ranks, is grey. Lines show which ranks get what one gives."
)


@dataclass(frozen=True)
class Section:
    """A part of the page: what is said, then pictures, a plot, tables, as far as there are any."""

    title: str
    notes: Sequence[str] = ()
    figure: Any = None  # of matplotlib
    tables: Sequence[tuple[str, Table]] = ()
    pictures: Sequence[tuple[Collective, dict[str, Any]]] = ()


def lesson_section(outcomes: Sequence[Outcome]) -> Section:
    """Return the lesson with pictures of the collectives, plots and tables."""
    pictures = [(one.collective, picture(one)) for one in outcomes]
    return Section("What each one does", (HOW_TO_READ,), pictures=pictures)


def write(target: Path, ranks: int, sections: Sequence[Section]) -> None:
    """Write the page, complete or not at all.

    Raises:
        UsageError, HvdtrainError: see ``replacing``.
    """
    with replacing(target) as file:
        file.write(render(ranks, sections).encode())


def render(ranks: int, sections: Sequence[Section]) -> str:
    """Return the text of the page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string((files("hvdtrain.collectives") / "page.html").read_text())
    return template.render(
        ranks=plural(ranks, "rank"),
        sections=[(one, plots.inline(one.figure) if one.figure else "") for one in sections],
        made=time.strftime("%d %B %Y, %H:%M"),
        version=__version__,
    )


def picture(outcome: Outcome) -> dict[str, Any]:
    """Return cells and lines of a picture: each rank a row, before on the left, after right.

    A line leads from each rank to those that get a number of it. Its colour, and that of a cell, is
    the rank's that the number comes from; a sum, which comes from all, has none.
    """
    ranks = len(outcome.before)
    longest = max(len(str(v)) for rows in (outcome.before, outcome.after) for r in rows for v in r)
    wide = WIDE + DIGIT * max(0, longest - 2)
    right = LEFT + wide * _columns(outcome.before) + GAP
    cells, ways = [], set()
    for side, rows in ((LEFT, outcome.before), (right, outcome.after)):
        for rank, place, value in _numbered(rows):
            sources = outcome.origins(value)
            hue = _hue(sources[0][0], ranks) if len(sources) == 1 else None
            x, y = side + wide * place, TOP + ROW * rank
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
    """Return (rank, place, number) of all numbers."""
    return [(rank, place, v) for rank, row in enumerate(rows) for place, v in enumerate(row)]


def _hue(rank: int, ranks: int) -> int:
    """Return the colour of a rank, in degrees of the colour circle."""
    return (210 + 360 * rank // ranks) % 360
