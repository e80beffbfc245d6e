"""Numbers and tables of a scaling study as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

Table = tuple[Sequence[str], Sequence[Sequence[str]]]
"""Header and rows."""

WIDTH = 100


def known(columns: dict[str, list[str]]) -> Table:
    """The table less the columns of which nothing is known."""
    known = {name: cells for name, cells in columns.items() if set(cells) != {"-"}}
    return list(known), list(zip(*known.values(), strict=True))


def number(value: float) -> str:
    """Images per second, with as many digits as count."""
    return f"{value:,.{0 if abs(value) >= 10_000 else 1 if abs(value) >= 1000 else 2}f}"


def percent(value: float) -> str:
    """Such as ``61.3 %``."""
    return f"{100 * value:.1f} %"
