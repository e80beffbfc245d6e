"""A row of a table that somebody made: numbers are checked, and told of by file and line."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError

MOST = sys.maxsize  # of anything: sums and squares of more overflow
SHOWN = 20  # characters of a wrong value


@dataclass(frozen=True)
class Cells:
    """A row of a table, by column."""

    path: Path
    line: int
    values: Mapping[str, str]

    def number(self, name: str, kind: Callable[[str], Any]) -> Any:
        """The number in a column; None where it is empty or absent."""
        text = self.values.get(name, "")
        if not text:
            return None
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        least = 0 if name.endswith("_seconds") else 1 if kind is int else 1 / MOST
        if not least <= value <= MOST:
            sort = "a whole number of 1 or more" if kind is int else "a number above 0"
            raise UsageError(
                f"--from {self.path}, line {self.line}: {name} {_short(text)} is not {sort} that "
                "could have been measured"
            )
        return value


def _short(text: str) -> str:
    return repr(text if len(text) <= SHOWN else f"{text[:SHOWN]}...")
