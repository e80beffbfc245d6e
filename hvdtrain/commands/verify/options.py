"""The options of ``hvdtrain verify``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.declare import option, optional, switch
from hvdtrain.config.strategies import PACKAGES
from hvdtrain.config.values import above_zero, positive

TIMEOUT = 300.0  # seconds; importing TensorFlow from a cold shared disk takes up to 30 s
UPDATES = 5
ALL = "all"  # updates: until the script ends


def update_limit(value: str) -> int | str:
    """Read a number of updates, or ``all``."""
    try:
        return value if value == ALL else positive(value)
    except ValueError as error:
        raise ValueError(f"{error}, nor all") from None


@dataclass(frozen=True)
class Options:
    """Options and arguments of ``hvdtrain verify``."""

    ranks: int | None = optional("number of ranks to start", positive, name="-n")
    framework: str | None = optional(
        "framework (default: pytorch if installed)",
        choices=tuple(PACKAGES),
        metavar=f"{{{','.join(PACKAGES)}}}",
    )
    strategy: str | None = optional("strategy, as for the trainers (default: horovod)")
    script: Path | None = optional("Horovod script to verify instead", Path, metavar="FILE")
    updates: int | str | None = optional(
        f"with --script: number of updates before it is ended, or `all` (default: {UPDATES})",
        update_limit,
        metavar="K",
    )
    timeout: float = option(
        TIMEOUT,
        f"time limit for the ranks, in seconds (default: {TIMEOUT:g})",
        above_zero,
        metavar="SECONDS",
    )
    strict: bool = switch("with --script: exit with code 1 also if a step was not seen")
    json: bool = switch("print the rows as one JSON object")
    dry_run: bool = switch("print the command without starting it")
    arguments: tuple[str, ...] = option(
        (), "arguments of the --script", metavar="-- ARGUMENT", number="*"
    )
