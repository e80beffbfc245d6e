"""Step 4 of a script: its learning rates against those that it has on one rank alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.environment.verification.rows import NOT_SEEN, Row, by_rank, row, several

Record = dict[str, Any]

SAME = 1e-6  # relative difference of learning rates that are the same
RULE = 1e-3  # relative difference to a rule


def learning_rate(everyone: Sequence[Record], alone: Record | None, *, summed: bool) -> Row:
    """Step 4: the same on all ranks, and against what one rank alone uses.

    Args:
        everyone: what the ranks noted.
        alone: what one rank alone noted.
        summed: whether the ranks' gradients are added up and not divided.
    """
    size = len(everyone)
    rates: list[list[float]] = [record["rates"] for record in everyone]
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
    if size == 1 or not alone:
        return Row(4, NOT_SEEN, f"{told}; nothing to compare with")
    if not alone["rates"]:
        resumed = "did it go on from what the ranks had saved?"
        return Row(4, NOT_SEEN, f"{told}; one rank alone made no update: {resumed}")
    told = f"{told}, {alone['rates'][0]:g} on one alone"
    return _scaled(everyone, alone, told) or _unscaled(everyone, alone, told, summed=summed)


def is_unscaled(everyone: Sequence[Record], alone: Record | None) -> bool:
    """Whether the rate is that of one rank alone, though the global batch is larger."""
    if not alone or not alone["rates"] or not all(record["rates"] for record in everyone):
        return False
    growth = _growth(everyone, alone)
    return _like(_peak(everyone, alone), 1.0) and growth is not None and _grows(everyone, growth)


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
    if not alone or not alone["updates"] or not all(record["updates"] for record in everyone):
        return None
    whole = sum(record["updates"][0]["rows"] for record in everyone)
    one = alone["updates"][0]["rows"]
    return whole / one if whole and one else None


def _grows(everyone: Sequence[Record], growth: float) -> bool:
    """Whether the global batch grows with the ranks, rather than being shared out."""
    return growth >= (1 + len(everyone)) / 2


def _top(record: Record) -> float:
    """The highest rate: one that was used, or one that a scheduler makes the others from."""
    return float(max(record["initial_rate"], *record["rates"]))


def _peak(everyone: Sequence[Record], alone: Record) -> float:
    """The highest rate of the ranks over that of one rank alone."""
    base = _top(alone)
    return _top(everyone[0]) / base if base else math.inf


def _like(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=RULE)


def _climbs(record: Record) -> bool:
    """Whether the rates still rise at their end, to a height that nothing tells."""
    rates = record["rates"]
    return len(rates) > 1 and rates[-1] > rates[-2] * (1 + SAME) and rates[-1] >= _top(record)


def _scaled(everyone: Sequence[Record], alone: Record, told: str) -> Row | None:
    """The row where the rates follow a rule, or rise above it; None where they do neither."""
    size = len(everyone)
    rates, base = everyone[0]["rates"], alone["rates"]
    early, late = _ratios(rates, base, _growth(everyone, alone) or 1.0)
    peak = _peak(everyone, alone)
    climbs = _climbs(everyone[0]) or _climbs(alone)
    for name, factor in (("linear", float(size)), ("square root", math.sqrt(size))):
        places = any(
            ratios and all(_like(one, factor) for one in ratios) for ratios in (early, late)
        )
        if places if climbs else _like(peak, factor):
            return row(4, True, f"{told}: {name} rule, x {factor:.3g}", ratio=factor)
    if peak > size and not climbs:
        return row(4, False, f"{told}: x {peak:.3g}, more than the linear rule's {size}")
    if max(base) <= base[0] * (1 + RULE) and max(rates) > rates[0] * (1 + RULE):
        start = rates[0] / base[0] if base[0] else 0.0
        return row(4, True, f"{told}: a warm-up, from x {start:.3g} to x {peak:.3g}", ratio=start)
    if climbs or not _like(peak, 1.0):
        return Row(4, NOT_SEEN, f"{told}: x {peak:.3g}, which is no rule that is known here")
    return None


def _unscaled(everyone: Sequence[Record], alone: Record, told: str, *, summed: bool) -> Row:
    """The row where the rate of one rank is kept."""
    growth = _growth(everyone, alone)
    if growth is None:
        return Row(4, NOT_SEEN, f"{told}; the size of the batches was not seen")
    if not _grows(everyone, growth):
        return row(4, True, f"{told}: as the global batch, which stays the same", ratio=1.0)
    if summed:
        equal = f"gradients are summed, which is their mean at x {len(everyone)}: linear rule"
        return row(4, True, f"{told}; {equal}", ratio=1.0)
    told = f"{told}, though the global batch is {growth:.3g} times larger"
    if not all(record["again"] for record in everyone):
        told += "; a warm-up that rises once an epoch would show with --updates all"
    return row(4, False, told)


def _ratios(
    rates: list[float], base: list[float], growth: float
) -> tuple[list[float], list[float]]:
    """The rates over those of one rank alone at the same epoch.

    One rank makes ``growth`` updates for each of theirs. A schedule may look at the place where an
    update begins, or where it ends: the ratios at both.
    """
    early, late = [], []
    for update, rate in enumerate(rates):
        begin, end = round(update * growth), round((update + 1) * growth) - 1
        if begin < len(base) and base[begin]:
            early.append(rate / base[begin])
        if 0 <= end < len(base) and base[end]:
            late.append(rate / base[end])
    return early, late
