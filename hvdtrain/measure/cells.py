"""A row of a table that somebody made: numbers are checked, and told of by file and line."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import UsageError


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
            value = -1
        least = 0 if name.endswith("_seconds") else 1 if kind is int else math.ulp(0.0)
        if not (math.isfinite(value) and value >= least):
            sort = "a whole number of 1 or more" if kind is int else "a number above 0"
            raise UsageError(f"--from {self.path}, line {self.line}: {name} {text!r} is not {sort}")
        return value
