"""What is open where a file ends: of a job that hung, the tensors and ranks that it hung on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hvdtrain.timeline.analyse import Analysis
from hvdtrain.timeline.bars import NEGOTIATE, Tensor
from hvdtrain.timeline.units import duration, short

MICRO = 1e-6
Facts = dict[str, Any]

MOST = 200  # tensors in the facts
GROUPS, NAMES, RANKS = 3, 3, 8  # in a sentence


def open_facts(analysis: Analysis, origin: float) -> list[Facts]:
    """A row for each tensor with an open bar, the one that is open longest first.

    ``since`` counts from ``origin``. ``ready`` and ``missing`` are the ranks that have handed the
    tensor in and those that have not, of the ranks that are in the file anywhere; both are None
    where it does not tell: the tensor is past its negotiation, or Horovod's cache was on.
    """
    waiting = [tensor for tensor in analysis.tensors.values() if tensor.bars]
    waiting.sort(key=lambda tensor: tensor.bars[-1][1])
    return [_row(tensor, analysis, origin) for tensor in waiting[:MOST]]


def _row(tensor: Tensor, analysis: Analysis, origin: float) -> Facts:
    cell, since = tensor.bars[-1]
    ready = {int(rank) for _, rank in tensor.ticks} if cell.phase.kind == NEGOTIATE else set()
    seen = {int(rank) for rank in analysis.ranks}
    return {
        "tensor": tensor.row.name,
        "phase": cell.phase.name,
        "kind": cell.phase.kind,
        "since": (since - origin) * MICRO,
        "seconds": (analysis.last - since) * MICRO,
        "ready": sorted(ready) if ready else None,
        "missing": sorted(seen - ready) if ready else None,
    }


def sentence(rows: Sequence[Facts], count: int) -> str:
    """What is open, told for ``count`` tensors of which ``rows`` are the first."""
    groups: dict[tuple[str, str], list[Facts]] = {}
    for row in rows:
        groups.setdefault((row["phase"], str(row["missing"])), []).append(row)
    parts = [_group(group) for group in list(groups.values())[:GROUPS]]
    if len(groups) > GROUPS:
        parts.append("and more")
    head = "a tensor is" if count == 1 else f"{count:,} tensors are"
    return f"{head} open where the file ends: {'; '.join(parts)}"


def _group(rows: Sequence[Facts]) -> str:
    """Tensors that are in the same phase and wait for the same ranks."""
    first = rows[0]
    names = ", ".join(short(row["tensor"]) for row in rows[:NAMES])
    more = f" and {len(rows) - NAMES:,} more" if len(rows) > NAMES else ""
    # How long it was open can be told up to the last event alone; one that hangs makes none.
    since = f"since {duration(first['since'])}, {duration(first['seconds'])} before the last event"
    text = f"{names}{more} in {short(first['phase'])} {since}"
    if first["kind"] != NEGOTIATE:
        return text
    if first["ready"] is None:
        return f"{text}, and for which rank the file does not tell"
    if first["missing"]:
        it = "it" if len(rows) == 1 else "them"
        have = "has" if len(first["missing"]) == 1 else "have"
        return f"{text}: {ranks(first['missing'])} {have} not handed {it} in"
    return f"{text}: handed in by {ranks(first['ready'])}, and no other rank is in the file"


def missing(rows: Sequence[Facts]) -> list[int]:
    """The ranks that some tensor waits for."""
    return sorted({rank for row in rows for rank in row["missing"] or ()})


def ranks(numbers: Sequence[int]) -> str:
    """``rank 2``, ``ranks 1, 2``; the first ones of many."""
    shown = ", ".join(map(str, numbers[:RANKS])) + (" ..." if len(numbers) > RANKS else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"
