"""Communication options: how gradients are exchanged between ranks, for any task.

A strategy's record (``config/strategies.py``) lists the compressions that it supports.
"""

from __future__ import annotations

from dataclasses import dataclass

from hvdtrain.config.declare import option
from hvdtrain.config.strategies import STRATEGIES, Strategy
from hvdtrain.errors import UsageError

NONE = "none"
COMPRESSIONS = (NONE, "fp16", "bf16")


@dataclass(frozen=True)
class CommOptions:
    """Communication options; each attribute is the command-line option of that name."""

    compression: str = option(
        NONE,
        "numeric type in which gradients are sent and summed",
        choices=COMPRESSIONS,
        group="distribution",
    )


def check_comm_options(options: CommOptions, record: Strategy, framework: str) -> None:
    """Raise if the strategy lacks an option.

    Raises:
        UsageError: naming the option and the alternative.
    """
    compression = options.compression
    if compression not in COMPRESSIONS:
        raise UsageError(f"--compression {compression}: choose one of {', '.join(COMPRESSIONS)}")
    if compression in (NONE, *record.compressions):
        return
    if record.compressions:
        raise UsageError(
            f"--compression {compression}: {record.library} cannot sum in that type; give "
            f"--compression {' or '.join(record.compressions)}"
        )
    others = " or ".join(
        strategy.name
        for strategy in STRATEGIES.values()
        if framework in strategy.adapters and compression in strategy.compressions
    )
    raise UsageError(
        f"--compression {compression} is not for --strategy {record.name}: omit it, or use "
        f"--strategy {others}"
    )
