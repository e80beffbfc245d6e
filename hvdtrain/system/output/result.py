"""What a verb of the command line hands back: a text for people and the same facts for programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.errors import EXIT_OK


@dataclass(frozen=True)
class Report:
    """The outcome of one verb."""

    text: str  # for people, on standard output unless ``--json`` was given
    data: Mapping[str, Any] = field(default_factory=dict)  # what ``--json`` prints
    exit_code: int = EXIT_OK  # exit code of the process
