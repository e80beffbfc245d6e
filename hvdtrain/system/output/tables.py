"""Tables and paragraphs that fit the width of the terminal.

A table that is too wide is split into blocks of columns, one below the other, each beginning with
the row names: no value is cut or omitted.
"""

from __future__ import annotations

import csv
import io
import textwrap
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hvdtrain.system.files import replacing
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

Cells = Sequence[str]  # of a column, with its heading


@dataclass(frozen=True)
class Column:
    """A column of a table: the heading, and the value of a row with its format."""

    title: str
    value: str | Callable[[Any], Any]  # a field of a row, or a function of it
    format: Callable[[Any], str] = str
    help: str = ""
    joined: bool = False  # never separated from the preceding column
    unknown: str = "-"  # shown for None

    def value_of(self, row: Any) -> Any:
        """Return the value of a row."""
        return getattr(row, self.value) if isinstance(self.value, str) else self.value(row)

    def cell(self, row: Any) -> str:
        """Return the text of a row."""
        value = self.value_of(row)
        return self.unknown if value is None else self.format(value)


def width() -> int:
    """Return the maximum width of a line: of the terminal, or 100 without one."""
    return terminal.columns() or FILE


@dataclass(frozen=True)
class Table:
    """A table for the terminal and for a page."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    names: int = 1
    """Number of columns that name a row: left-aligned, and repeated in each block."""
    joined: Collection[str] = ()
    """Headings of columns that are never separated from the preceding one."""
    note: str = ""
    meanings: Sequence[tuple[str, str]] = ()
    """Headings that are explained, with their meaning."""

    @property
    def text(self) -> str:
        """The text of the table below its title."""
        return f"{message(self.title)}\n{self.body}"

    @property
    def body(self) -> str:
        """The text without the title, split into blocks of columns if it is too wide."""
        blocks = "\n\n".join(_drawn(block, self.names, gap) for block, gap in self._blocks())
        return f"{blocks}\n{' ' * INDENT}{self.note}" if self.note else blocks

    def _blocks(self) -> list[tuple[list[Cells], int]]:
        """Return the blocks, and the spaces between their columns."""
        columns: list[Cells] = list(zip(self.header, *self.rows, strict=True))
        if _fits(columns, GAPS[0]):
            return [(columns, GAPS[0])]
        first, others = columns[: self.names], columns[self.names :]
        groups: list[list[Cells]] = []
        for column in others:
            if groups and column[0] in self.joined:
                groups[-1].append(column)
            else:
                groups.append([column])
        if not all(_fits([*first, *group], GAPS[1]) for group in groups):
            groups = [[column] for column in others]
        blocks: list[list[Cells]] = []
        for group in groups:
            if blocks and _fits([*blocks[-1], *group], GAPS[1]):
                blocks[-1] += group
            else:
                blocks.append([*first, *group])
        return [(block, GAPS[1]) for block in blocks]


def tabulate(
    columns: Sequence[Column],
    rows: Sequence[Any],
    title: str = "",
    *,
    names: int = 1,
    known: bool = False,
) -> Table:
    """Return the table of ``rows``, any objects; with ``known`` without empty columns."""
    if known:
        columns = [c for c in columns if any(c.cell(row) != c.unknown for row in rows)]
    cells = [[column.cell(row) for column in columns] for row in rows]
    return Table(
        title,
        [column.title for column in columns],
        cells,
        names,
        {column.title for column in columns if column.joined},
        meanings=[(column.title, column.help) for column in columns if column.help],
    )


def _fits(columns: Sequence[Cells], gap: int) -> bool:
    widths = [max(map(len, column)) for column in columns]
    return INDENT + sum(widths) + gap * (len(columns) - 1) <= width()


def _drawn(columns: Sequence[Cells], names: int, gap: int) -> str:
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


def write_csv(
    path: Path, header: Sequence[str], rows: Iterable[Sequence[Any]], option: str = ""
) -> None:
    """Write a CSV file atomically; None is an empty cell.

    Raises:
        UsageError, HvdtrainError: it cannot be written; the message begins with ``option``.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *rows])
    with replacing(path, option) as file:
        file.write(text.getvalue().encode(errors="replace"))


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
