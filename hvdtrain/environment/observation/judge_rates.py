"""Step 4 of a script: its learning rates against those that it has on one rank alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.environment.verification.rows import NOT_SEEN, Row, by_rank, row, several

Record = dict[str, Any]

SAME = 1e-6  # relative difference of learning rates that are the same


def learning_rate(everyone: Sequence[Record], alone: Record | None) -> Row:
    """Step 4: the same on all ranks, and against what one rank alone uses."""
    size = len(everyone)
    rates = [[update["rates"][0] for update in record["updates"]] for record in everyone]
    count = min(map(len, rates))
    if not count:
        return Row(4, NOT_SEEN, "no update was made")
    for update, values in enumerate(zip(*(one[:count] for one in rates), strict=True)):
        if max(values) - min(values) > SAME * max(map(abs, values)):
            told = by_rank([f"{value:g}" for value in values], ", ")
            return row(4, False, f"at update {update + 1}: {told} by rank")
    first = rates[0][:count]
    told = f"{first[0]:g}" if len(set(first)) == 1 else f"{first[0]:g} to {first[-1]:g}"
    told = f"{told} in {several(count, 'update')} on {several(size, 'rank')}"
    if rule := _rule(everyone):
        within = max(first) <= rule[0] * rule[1] * (1 + SAME)
        return row(4, within, f"{told}; scale_learning_rate gives {rule[0]:g} x {rule[1]:.3g}")
    base = [update["rates"][0] for update in alone["updates"]] if alone else []
    if size == 1 or not base:
        return Row(4, NOT_SEEN, f"{told}; nothing to compare with")
    return _against_one(size, first, base, told, _growth(everyone, alone))


def _rule(everyone: Sequence[Record]) -> tuple[float, float] | None:
    """Base and factor that ``scale_learning_rate`` gave; None unless it did so on all ranks."""
    found = {
        (call["base"], call["factor"])
        for record in everyone
        for call in record["calls"]
        if call["name"] == "scale_learning_rate" and call["base"] is not None
    }
    called = all(any("factor" in call for call in record["calls"]) for record in everyone)
    return found.pop() if called and len(found) == 1 else None


def _growth(everyone: Sequence[Record], alone: Record | None) -> float | None:
    """How many times larger the global batch is than that of one rank; None where not seen."""
    whole = sum(record["updates"][0]["rows"] for record in everyone)
    one = alone["updates"][0]["rows"] if alone else 0
    return whole / one if whole and one else None


def _against_one(
    size: int, rates: list[float], base: list[float], told: str, growth: float | None
) -> Row:
    """The rule that the rates follow: linear, square root, a warm-up, or none."""
    ratios = [a / b for a, b in zip(rates, base, strict=False) if b]
    told = f"{told}, {base[0]:g} on one alone"
    if not ratios:
        return Row(4, NOT_SEEN, told)
    for name, factor in (("linear", float(size)), ("square root", math.sqrt(size))):
        if math.isclose(ratios[0], factor, rel_tol=1e-3):
            return row(4, True, f"{told}: {name} rule, x {factor:.3g}", ratio=ratios[0])
    if ratios[-1] > ratios[0] * (1 + SAME):
        return row(4, True, f"{told}: a warm-up, from x {ratios[0]:.3g}", ratio=ratios[0])
    if math.isclose(ratios[0], 1.0, rel_tol=1e-3) and growth is not None:
        if growth < (1 + size) / 2:
            return row(4, True, f"{told}: as the global batch, which stays the same", ratio=1.0)
        return row(4, False, f"{told}, though the global batch is {growth:.3g} times larger")
    return Row(4, NOT_SEEN, f"{told}: x {ratios[0]:.3g}, which is no rule that is known here")
