"""Tables and paragraphs that fit the terminal: the one module that knows how wide it is.

A table that is too wide is cut into blocks of columns, one below the other, each of which begins
with the names of the rows: no figure is cut, and none is left out.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from hvdtrain.system.runtime import terminal

if TYPE_CHECKING:
    import rich.table

FILE = 100  # columns where the output is no terminal
SUMMARY = 80  # of the table of a training, at most: it may be read from the log of a job
INDENT = 2  # columns before a table
GAPS = 3, 2  # columns between two of a table, and where room is short
BESIDE = 30  # columns that a text needs beside its name; with fewer it begins below it
BELOW = 4  # columns before it then

Column = Sequence[str]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""


def width() -> int:
    """Return how many columns a line may take: those of the terminal, 100 where there is none."""
    return terminal.columns() or FILE


def known(columns: dict[str, list[str]]) -> Table:
    """Return the table without the columns that hold nothing but ``-``."""
    kept = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    return list(kept), list(zip(*kept.values(), strict=True))


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    names: int = 1,
    joined: Collection[str] = (),
) -> str:
    """Return columns under their header, in blocks where they are wider than the output.

    Args:
        header: of the columns.
        rows: their cells.
        names: how many columns name a row: they are to the left and begin each block, the others
            are to the right.
        joined: headings of columns that stay beside the one before them.
    """
    columns: list[Column] = list(zip(header, *rows, strict=True))
    if _fits(whole := _block(columns, names, GAPS[0])):
        return whole
    columns = _folded(columns, names)
    first, groups = columns[:names], [[column] for column in columns[names:]]
    together = [groups[0]]
    for name, group in zip(header[names + 1 :], groups[1:], strict=True):
        together[-1:] = [together[-1] + group] if name in joined else [together[-1], group]
    if all(_fits(_block([*first, *some], names, GAPS[1])) for some in together):
        groups = together
    blocks: list[list[Column]] = []
    for some in groups:
        if blocks and _fits(_block([*blocks[-1], *some], names, GAPS[1])):
            blocks[-1] += some
        else:
            blocks.append([*first, *some])
    return "\n\n".join(_block(block, names, GAPS[1]) for block in blocks)


def _fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= width()


def _folded(columns: Sequence[Column], names: int) -> list[Column]:
    """Return columns each of which has room beside the names; cells are folded between words."""
    room = width() - INDENT - names * GAPS[1]
    sizes = [max(map(len, column)) for column in columns]
    spare = room - min(max(sizes[names:]), room // 2)  # for the names together
    widths = sizes[:names]
    while sum(widths) > max(spare, names):
        widths[widths.index(max(widths))] -= 1
    widths += [room - sum(widths)] * (len(columns) - names)
    return [
        ["\n".join(wrapped(cell, limit, cut=True)) for cell in column]
        for column, limit in zip(columns, widths, strict=True)
    ]


def _block(columns: Sequence[Column], names: int, gap: int) -> str:
    """Return columns side by side; a cell may have several lines."""
    cells = [[cell.splitlines() or [""] for cell in column] for column in columns]
    sizes = [max(len(line) for cell in column for line in cell) for column in cells]
    sides = "<" * names + ">" * (len(columns) - names)
    lines = []
    for row in zip(*cells, strict=True):
        for parts in zip_longest(*row, fillvalue=""):
            shown = [f"{part:{s}{n}}" for part, s, n in zip(parts, sides, sizes, strict=True)]
            lines.append((" " * INDENT + (" " * gap).join(shown)).rstrip())
    return "\n".join(lines)


def wrapped(text: str, room: int, *, hang: str = "", cut: bool | None = None) -> list[str]:
    """Return the lines of ``text``, broken between words.

    Args:
        text: one or more lines.
        room: columns of a line.
        hang: what each further line begins with.
        cut: whether to break a word that is longer than a line. By default where a terminal would
            break it anyway: in a file a path stays whole.
    """
    cut = terminal.columns() is not None if cut is None else cut
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            line,
            max(len(hang) + 1, room),
            subsequent_indent=hang,
            break_long_words=cut,
            break_on_hyphens=False,  # of options
        ) or [""]
    return lines or [""]


def paragraph(text: str, hang: str = "") -> str:
    """Return ``text`` as wide as the output; each further line begins with ``hang``."""
    return "\n".join(wrapped(text, width(), hang=hang))


def message(text: str, hang: str = "") -> str:
    """Return a message as ``paragraph`` does, but in a file as one line, to be searched for."""
    return text if terminal.columns() is None else paragraph(text, hang)


def entry(name: str, text: str) -> str:
    """Return ``text`` beside its name, or below it where there is little room.

    Args:
        name: with the blanks before the text; all blank, it goes on with the entry above.
        text: one or more lines.
    """
    room, margin = width(), len(name)
    if room - margin >= BESIDE:
        lines = wrapped(text, room - margin)
        return "\n".join([name + lines[0], *(" " * margin + line for line in lines[1:])])
    lines = [" " * BELOW + line for line in wrapped(text, room - BELOW)]
    return "\n".join([*([name.rstrip()] if name.strip() else []), *lines])


def coloured(pieces: Sequence[tuple[str, str]]) -> str:
    """Return texts, each given with its style, one after the other; plain where nobody watches."""
    from rich.console import Console
    from rich.text import Text

    watched = terminal.columns() is not None
    console = Console(
        file=io.StringIO(),
        force_terminal=watched,
        highlight=False,
        no_color=None if watched else True,
    )
    with console.capture() as shown:
        console.print(Text.assemble(*pieces), soft_wrap=True, end="")
    return "\n".join(line.rstrip() for line in shown.get().splitlines())


def summary_table(title: str, rows: Sequence[tuple[str, str]]) -> rich.table.Table:
    """Return the table of a training: a label and a value per row."""
    from rich.table import Table as Box

    box = Box(title=title, show_header=False, title_justify="left")
    borders = 7
    room = min(width(), SUMMARY) - borders - max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        box.add_row(label, "\n".join(wrapped(value, room)))
    return box
