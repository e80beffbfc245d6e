"""Tables and paragraphs that fit the width of the terminal.

A table that is too wide is split into blocks of columns, one below the other, each beginning with
the row names: no value is cut or omitted.
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

FILE = 100  # width without a terminal
SUMMARY = 80  # maximum width of the table of a training, as it may be read in a job's log
INDENT = 2  # indentation of a table
GAPS = 3, 2  # spaces between columns: normally, and if space is short
BESIDE = 30  # minimum width of a text next to its name; otherwise it is put below
BELOW = 4  # its indentation then

Column = Sequence[str]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""


def width() -> int:
    """Return the maximum width of a line: of the terminal, or 100 without one."""
    return terminal.columns() or FILE


def known(columns: dict[str, list[str]]) -> Table:
    """Return the table without columns whose cells are all ``-``."""
    kept = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    return list(kept), list(zip(*kept.values(), strict=True))


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    names: int = 1,
    joined: Collection[str] = (),
) -> str:
    """Return the text of a table, split into blocks of columns if it is too wide.

    Args:
        header: headings of the columns.
        rows: cells by row.
        names: number of columns that name a row; they are left-aligned and begin each block, the
            other columns are right-aligned.
        joined: headings of columns that are never separated from the preceding one.
    """
    columns: list[Column] = list(zip(header, *rows, strict=True))
    if _fits(whole := _block(columns, names, GAPS[0])):
        return whole
    columns = _folded(columns, names)
    first, groups = columns[:names], [[column] for column in columns[names:]]
    together = [groups[0]]
    for name, group in zip(header[names + 1 :], groups[1:], strict=True):
        together[-1:] = [together[-1] + group] if name in joined else [together[-1], group]
    if all(_fits(_block([*first, *group], names, GAPS[1])) for group in together):
        groups = together
    blocks: list[list[Column]] = []
    for group in groups:
        if blocks and _fits(_block([*blocks[-1], *group], names, GAPS[1])):
            blocks[-1] += group
        else:
            blocks.append([*first, *group])
    return "\n\n".join(_block(block, names, GAPS[1]) for block in blocks)


def _fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= width()


def _folded(columns: Sequence[Column], names: int) -> list[Column]:
    """Return columns that each fit next to the names; cells are wrapped between words."""
    room = width() - INDENT - names * GAPS[1]
    sizes = [max(map(len, column)) for column in columns]
    spare = room - min(max(sizes[names:]), room // 2)  # for all name columns
    widths = sizes[:names]
    while sum(widths) > max(spare, names):
        widths[widths.index(max(widths))] -= 1
    widths += [room - sum(widths)] * (len(columns) - names)
    return [
        ["\n".join(wrapped(cell, limit, cut=True)) for cell in column]
        for column, limit in zip(columns, widths, strict=True)
    ]


def _block(columns: Sequence[Column], names: int, gap: int) -> str:
    """Return the text of a block of columns; a cell may have several lines."""
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
    """Return the lines of ``text``, wrapped between words.

    Args:
        text: one or more lines.
        room: width of a line.
        hang: prefix of continuation lines.
        cut: whether to break words longer than a line; default: on a terminal, not in a file.
    """
    cut = terminal.columns() is not None if cut is None else cut
    lines = []
    for line in text.splitlines():
        lines += textwrap.wrap(
            line,
            max(len(hang) + 1, room),
            subsequent_indent=hang,
            break_long_words=cut,
            break_on_hyphens=False,  # in options
        ) or [""]
    return lines or [""]


def paragraph(text: str, hang: str = "") -> str:
    """Return ``text`` wrapped to the output's width; continuation lines begin with ``hang``."""
    return "\n".join(wrapped(text, width(), hang=hang))


def message(text: str, hang: str = "") -> str:
    """Return ``paragraph(text, hang)`` on a terminal; in a file one line, to be searchable."""
    return text if terminal.columns() is None else paragraph(text, hang)


def entry(name: str, text: str) -> str:
    """Return ``text`` next to its name, or below it if space is short.

    Args:
        name: name, padded with the spaces before the text; all spaces: continues the entry above.
        text: one or more lines.
    """
    room, margin = width(), len(name)
    if room - margin >= BESIDE:
        lines = wrapped(text, room - margin)
        return "\n".join([name + lines[0], *(" " * margin + line for line in lines[1:])])
    lines = [" " * BELOW + line for line in wrapped(text, room - BELOW)]
    return "\n".join([*([name.rstrip()] if name.strip() else []), *lines])


def coloured(pieces: Sequence[tuple[str, str]]) -> str:
    """Return the pieces (text, style) joined, with colours on a terminal."""
    from rich.console import Console
    from rich.text import Text

    is_terminal = terminal.columns() is not None
    console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        highlight=False,
        no_color=None if is_terminal else True,
    )
    with console.capture() as captured:
        console.print(Text.assemble(*pieces), soft_wrap=True, end="")
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def summary_table(title: str, rows: Sequence[tuple[str, str]]) -> rich.table.Table:
    """Return the summary table of a training: a label and a value per row."""
    from rich.table import Table as Box

    box = Box(title=title, show_header=False, title_justify="left")
    borders = 7
    room = min(width(), SUMMARY) - borders - max((len(label) for label, _ in rows), default=0)
    for label, value in rows:
        box.add_row(label, "\n".join(wrapped(value, room)))
    return box
