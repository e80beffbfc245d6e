"""Communication options: how gradients are exchanged between ranks, for any task.

A strategy's record (``config/strategies.py``) lists the compressions that it supports.
"""

from __future__ import annotations

from dataclasses import dataclass

NONE = "none"
COMPRESSIONS = (NONE, "fp16", "bf16")


@dataclass(frozen=True)
class CommOptions:
    """Communication options; each attribute is the command-line option of that name."""

    compression: str = NONE
