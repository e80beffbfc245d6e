"""The levers: how gradients travel between the ranks, whatever is trained.

Which strategy has which, its record says (``config/strategies.py``).
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.strategies import STRATEGIES, Strategy
from hvdtrain.errors import UsageError

NONE = "none"
COMPRESSIONS = (NONE, "fp16", "bf16")


@dataclass(frozen=True)
class Levers:
    """What a user can say about it; each attribute is the option of that name."""

    compression: str = NONE
    """The type in which gradients are sent and summed; ``none``: their own."""


def check_levers(levers: Levers, record: Strategy, framework: str) -> None:
    """Refuse what the strategy does not have.

    Raises:
        UsageError: naming the option, and what to give instead.
    """
    asked = levers.compression
    if asked not in COMPRESSIONS:
        raise UsageError(f"--compression {asked}: choose one of {', '.join(COMPRESSIONS)}")
    if asked == NONE or asked in record.compressions:
        return
    if record.compressions:
        raise UsageError(
            f"--compression {asked}: {record.library} has no sum of that type; give --compression "
            f"{' or '.join(record.compressions)}"
        )
    others = [
        one.name
        for one in STRATEGIES.values()
        if asked in one.compressions and framework in one.adapters
    ]
    raise UsageError(
        f"--compression {asked} is not for --strategy {record.name}: leave it out, or give "
        f"--strategy {' or '.join(others)}"
    )
