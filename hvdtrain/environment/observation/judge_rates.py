"""Step 4 of a script: its learning rates against those that it has on one rank alone."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from hvdtrain.environment.verification.rows import NOT_SEEN, Row, by_rank, row, several

Record = dict[str, Any]

SAME = 1e-6  # relative difference of learning rates that are the same
RULE = 1e-3  # relative difference to a rule


def learning_rate(everyone: Sequence[Record], alone: Record | None) -> Row:
    """Step 4: the same on all ranks, and against what one rank alone uses."""
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
    base = alone["rates"] if alone else []
    if size == 1 or not base:
        return Row(4, NOT_SEEN, f"{told}; nothing to compare with")
    epochs = all(record["again"] for record in everyone)
    return _against_one(size, first, base, told, _growth(everyone, alone), epochs)


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


def _against_one(
    size: int,
    rates: list[float],
    base: list[float],
    told: str,
    growth: float | None,
    epochs: bool,
) -> Row:
    """The rule that the rates follow: linear, square root, a warm-up, or none.

    Args:
        size: how many ranks there are.
        rates: those of each update on all ranks.
        base: those of each update of one rank alone.
        told: the evidence so far.
        growth: how many times larger the global batch is; None where not seen.
        epochs: whether more than one epoch was seen.
    """
    told = f"{told}, {base[0]:g} on one alone"
    early, late = _ratios(rates, base, growth or 1.0)
    if not early:
        return Row(4, NOT_SEEN, told)
    peak = max(rates) / max(base)
    climbs = _climbs(rates) or _climbs(base)  # then the peak is still to come

    def fits(factor: float) -> bool:
        same = functools.partial(math.isclose, factor, rel_tol=RULE)
        if climbs:
            return all(map(same, early)) or (bool(late) and all(map(same, late)))
        return same(peak)

    for name, factor in (("linear", float(size)), ("square root", math.sqrt(size))):
        if fits(factor):
            return row(4, True, f"{told}: {name} rule, x {factor:.3g}", ratio=factor)
    if max(base) <= base[0] * (1 + RULE) and max(rates) > rates[0] * (1 + RULE):
        told += f": a warm-up, from x {early[0]:.3g} to x {peak:.3g}"
        return row(4, True, told, ratio=early[0])
    if climbs or not fits(1.0) or growth is None:
        return Row(4, NOT_SEEN, f"{told}: x {peak:.3g}, which is no rule that is known here")
    if growth < (1 + size) / 2:
        return row(4, True, f"{told}: as the global batch, which stays the same", ratio=1.0)
    told = f"{told}, though the global batch is {growth:.3g} times larger"
    if epochs:
        return row(4, False, told)
    return Row(4, NOT_SEEN, f"{told}; a warm-up by epochs would show in the second one only")


def _climbs(rates: list[float]) -> bool:
    """Whether they still rise at their end."""
    return len(rates) > 1 and rates[-1] > rates[-2] * (1 + SAME)


def _ratios(
    rates: list[float], base: list[float], growth: float
) -> tuple[list[float], list[float]]:
    """The rates over those of one rank alone at the same place in the training.

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
