"""Numbers, names and tables as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

NAME = 44  # characters of a tensor's name


def duration(seconds: float) -> str:
    """Such as ``50.1 ms``; three digits that count, at most."""
    for factor, unit in ((1.0, "s"), (1e-3, "ms")):
        if abs(seconds) >= 0.9995 * factor:
            value = seconds / factor
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"
    return f"{seconds * 1e6:.0f} µs"


def size(count: float) -> str:
    """Such as ``24.4 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1023.95 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def percent(share: float) -> str:
    """Such as ``94 %``; small ones with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under their header: the first to the left, numbers to the right."""
    columns = list(zip(header, *rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    lines = []
    for row in (header, *rows):
        cells = [f"{row[0]:<{widths[0]}}"]
        cells += [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  " + "   ".join(cells).rstrip())
    return "\n".join(lines)


def printable(name: object) -> str:
    """A name or path without what would move a terminal's cursor, or cannot be encoded."""
    return "".join(c if c.isprintable() else "?" for c in str(name))


def short(name: str, length: int = NAME) -> str:
    """A long name without its middle, and as ``printable`` makes it."""
    name = printable(name)
    half = (length - 3) // 2
    return name if len(name) <= length else f"{name[: length - 3 - half]}...{name[-half:]}"
