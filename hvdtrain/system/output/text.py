"""Numbers and names formatted for users."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

NAME = 44  # characters of a tensor's name
RANKS = 8  # maximum length of a list of ranks
MAX_LISTED = 4  # consecutive ranks that are listed one by one

PACKAGE = Path(__file__).parents[2]
# Relative to lib/python3.11/site-packages; a clone may have fewer parent directories.
INSTALLED = Path(os.path.normpath(PACKAGE.parent / "../../../share/doc/hvdtrain"))


def page(name: str) -> str:
    """Return the path of the documentation page ``name``: in a clone, or as installed."""
    file = f"{name}.md"
    return f"docs/{file}" if (PACKAGE.parent / "docs" / file).is_file() else str(INSTALLED / file)


def duration(seconds: float) -> str:
    """Return a duration with three significant digits, e.g. ``50.1 ms``; below 10 µs with two."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= 0.9995 * factor:
            value = seconds / factor
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    value = seconds * 1e6
    return f"{value:.2g} µs" if abs(value) < 9.95 else f"{value:.0f} µs"


def bandwidth(bytes_per_second: float) -> str:
    """Return a bandwidth with three significant digits, e.g. ``1.25 GB/s``, ``400 MB/s``."""
    for factor, unit in ((1e9, "GB/s"), (1e6, "MB/s")):
        if bytes_per_second >= 0.9995 * factor:
            return f"{bytes_per_second / factor:.3g} {unit}"
    return f"{bytes_per_second / 1e3:.3g} kB/s"


def about(seconds: float) -> str:
    """Return an estimated duration, e.g. ``about 9 min``."""
    value, unit = seconds, "s"
    for factor, larger in ((60.0, "min"), (60.0, "h"), (24.0, "days"), (365.25, "years")):
        if value < 2 * factor:
            break
        value, unit = value / factor, larger
    return f"about {value:,.0f} {unit}"


def size(count: float) -> str:
    """Return a size in bytes with its unit, e.g. ``24.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1023.95 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def percent(share: float) -> str:
    """Return a percentage, e.g. ``94 %``; below 10 % with one decimal."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def number(value: float, like: float | None = None) -> str:
    """Return a throughput with the decimals appropriate for it, or for the mean ``like``."""
    size = abs(value if like is None else like)
    return f"{value:,.{0 if size >= 10_000 else 1 if size >= 1000 else 2}f}"


def plural(count: int, noun: str) -> str:
    """Return a count with its noun, e.g. ``1 rank``, ``1,024 ranks``; plural in s only."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``rank 2``, ``ranks 1, 3`` or ``ranks 0 to 7``; at most ``RANKS`` are listed."""
    ranks = sorted(ranks)
    shown = ", ".join(map(str, ranks[:RANKS])) + (" ..." if len(ranks) > RANKS else "")
    if len(ranks) > MAX_LISTED and ranks[-1] - ranks[0] == len(ranks) - 1:
        shown = f"{ranks[0]} to {ranks[-1]}"
    return f"rank{'' if len(ranks) == 1 else 's'} {shown}"


def printable(name: object) -> str:
    """Return a name with unprintable characters replaced by ``?``."""
    return "".join(c if c.isprintable() else "?" for c in str(name))


def short(name: str, length: int = NAME) -> str:
    """Return ``printable(name)``, shortened in the middle to ``length`` characters."""
    name = printable(name)
    half = (length - 3) // 2
    return name if len(name) <= length else f"{name[: length - 3 - half]}...{name[-half:]}"
