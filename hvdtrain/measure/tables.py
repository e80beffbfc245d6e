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


def number(value: float, like: float | None = None) -> str:
    """Show images per second with the decimals that count, or those of the mean they belong to."""
    size = abs(value if like is None else like)
    return f"{value:,.{0 if size >= 10_000 else 1 if size >= 1000 else 2}f}"


def percent(value: float) -> str:
    """Such as ``61.3 %``."""
    return f"{100 * value:.1f} %"
