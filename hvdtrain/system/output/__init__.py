"""Output for users and programs: results, texts, tables, plots, pages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import EXIT_OK


@dataclass(frozen=True)
class Report:
    """Result of a verb."""

    text: str  # printed on standard output without ``--json``
    data: Mapping[str, Any] = field(default_factory=dict)  # printed with ``--json``
    exit_code: int = EXIT_OK  # exit code of the process
