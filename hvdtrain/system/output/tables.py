"""Tables and paragraphs that fit the width of the terminal.

A table that is too wide is split into blocks of columns, one below the other, each beginning with
the row names: no value is cut or omitted.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hvdtrain.system.runtime import terminal

if TYPE_CHECKING:
    import rich.console
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
    if _fits(columns, GAPS[0]):
        return _drawn(columns, names, GAPS[0])
    first = columns[:names]
    groups: list[list[Column]] = []
    for name, column in zip(header[names:], columns[names:], strict=True):
        if groups and name in joined:
            groups[-1].append(column)
        else:
            groups.append([column])
    if not all(_fits([*first, *group], GAPS[1]) for group in groups):
        groups = [[column] for column in columns[names:]]
    blocks: list[list[Column]] = []
    for group in groups:
        if blocks and _fits([*blocks[-1], *group], GAPS[1]):
            blocks[-1] += group
        else:
            blocks.append([*first, *group])
    return "\n\n".join(_drawn(block, names, GAPS[1]) for block in blocks)


def _fits(columns: Sequence[Column], gap: int) -> bool:
    widths = [max(map(len, column)) for column in columns]
    return INDENT + sum(widths) + gap * (len(columns) - 1) <= width()


def _drawn(columns: Sequence[Column], names: int, gap: int) -> str:
    """Return the text of a block of columns; cells are wrapped if it is wider than the output."""
    from rich.table import Table as Grid
    from rich.text import Text

    grid = Grid.grid(padding=(0, gap, 0, 0))
    for index in range(len(columns)):
        grid.add_column(justify="left" if index < names else "right", overflow="fold")
    for cells in zip(*columns, strict=True):
        grid.add_row(*map(Text, cells))
    console = _console(width=width() - INDENT)
    with console.capture() as captured:
        console.print(grid)
    lines = captured.get().splitlines()
    return "\n".join((" " * INDENT + line).rstrip() for line in lines)


def _console(**settings: Any) -> rich.console.Console:
    from rich.console import Console

    return Console(file=io.StringIO(), highlight=False, **settings)


@dataclass(frozen=True)
class TitledTable:
    """A table with its title, for the terminal and for a page.

    ``names`` and ``joined``: see ``table``.
    """

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    joined: Collection[str] = ()
    note: str = ""

    @property
    def text(self) -> str:
        """Return the text of the table, below its title."""
        lines = table(self.header, self.rows, names=self.names, joined=self.joined)
        note = f"\n{' ' * INDENT}{self.note}" if self.note else ""
        return f"{message(self.title)}\n{lines}{note}"


def wrapped(text: str, room: int, *, hang: str = "") -> list[str]:
    """Return the lines of ``text``, wrapped between words to a width of ``room``.

    Continuation lines begin with ``hang``. Longer words are broken on a terminal, not in a file.
    """
    is_terminal, lines = terminal.columns() is not None, []
    for line in text.splitlines():
        lines += textwrap.wrap(
            line,
            max(len(hang) + 1, room),
            subsequent_indent=hang,
            break_long_words=is_terminal,
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
    from rich.text import Text

    is_terminal = terminal.columns() is not None
    console = _console(force_terminal=is_terminal, no_color=None if is_terminal else True)
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
