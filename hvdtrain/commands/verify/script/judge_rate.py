"""Judge row 4 of a script: the learning rate.

``records`` are by rank; ``single_rank`` is the record of a run of the same script on one rank, to
compare with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from hvdtrain.commands.verify.rows import StepRow, by_rank, not_seen, row
from hvdtrain.commands.verify.script.record import SAME, SCALED, Record, Records
from hvdtrain.system.output.text import plural

RULE = 1e-3  # relative difference to a rule of the learning rate
CONSTANT = 1.1  # growth of a global batch that is divided among the ranks, and rounded up


def learning_rate(
    records: Records, single_rank: Record | None, *, summed: bool, divided: bool
) -> StepRow:
    """Judge step 4: the rates are equal on all ranks, and follow a rule from those of one rank.

    ``summed``: the ranks' gradients are summed, not averaged; ``divided``: they are averaged, and
    1 / size of one rank's.
    """
    size = len(records)
    count = min(len(record.rates) for record in records)
    if not count:
        return not_seen(4, "no update was made")
    for update, values in enumerate(zip(*(record.rates for record in records), strict=False), 1):
        if max(values) - min(values) > SAME * max(map(abs, values)):
            different = by_rank([f"{value:g}" for value in values], ", ")
            return row(4, False, f"at update {update}: {different} by rank")
    rates = records[0].rates[:count]
    applied = f"{rates[0]:g}" if len(set(rates)) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
    evidence = f"{applied} in {plural(count, 'update')} on {plural(size, 'rank')}"
    if rule := _rule(records):
        base, factor = rule
        within = max(rates) <= base * factor * (1 + SAME)
        return row(4, within, f"{evidence}; {SCALED} gives {base:g} x {factor:.3g}")
    if size == 1 or not single_rank:
        return not_seen(4, f"{evidence}; no run on one rank to compare with")
    if not single_rank.rates:
        ended = single_rank.ended or ""
        cause = ended if "Error" in ended else "did it resume from the ranks' checkpoint?"
        return not_seen(4, f"{evidence}; the run on one rank made no update: {cause}")
    evidence = f"{evidence}, {single_rank.rates[0]:g} on one rank"
    if _rises(records[0]) or _rises(single_rank):
        return _warm_up(rates, single_rank.rates, evidence)
    peak = _peak(records, single_rank)
    for name, factor in (("linear", float(size)), ("square root", math.sqrt(size))):
        if _close(peak, factor):
            holds = divided or not _is_constant(records, single_rank)
            end = "" if holds else ", though the global batch is that of one rank"
            return row(4, holds, f"{evidence}: {name} rule, x {factor:.3g}{end}", ratio=factor)
    if peak > size:
        return row(4, False, f"{evidence}: x {peak:.3g}, more than the linear rule's {size}")
    if not _close(peak, 1.0):
        return not_seen(4, f"{evidence}: x {peak:.3g}, no known rule")
    return _unscaled(records, single_rank, evidence, summed=summed)


def _rule(records: Records) -> tuple[float, float] | None:
    """Return base and factor of ``scale_learning_rate``; None unless called on all ranks."""
    scaled = [{(c.base, c.factor) for c in record.calls if c.name == SCALED} for record in records]
    rules = set.union(*scaled)
    return rules.pop() if all(scaled) and len(rules) == 1 else None


def _growth(records: Records, single_rank: Record) -> float | None:
    """Return the global batch size relative to the run on one rank; None if not seen."""
    if not all(record.updates for record in (single_rank, *records)):
        return None
    whole = sum(record.updates[0].samples for record in records)
    base = single_rank.updates[0].samples
    return whole / base if whole and base else None


def _grows(records: Records, growth: float) -> bool:
    """Return whether the global batch grows with the ranks, rather than being divided."""
    return growth >= (1 + len(records)) / 2


def _is_constant(records: Records, single_rank: Record) -> bool:
    """Return whether the global batch is known to be that of one rank, and not for lack of data."""
    growth = _growth(records, single_rank)
    if growth is None or growth > CONSTANT:
        return False
    return not any(
        record.done < 2  # the first update may be an epoch
        or record.seen.epoch == 1
        or (record.loader and record.updates[0].samples >= (record.loader.drawn or math.inf))
        for record in records
    )


def _top(record: Record) -> float:
    """Return the highest rate, used or scaled by a scheduler."""
    return max(record.initial_rate, *record.rates)


def _peak(records: Records, single_rank: Record) -> float:
    """Return the highest rate of the ranks relative to that of the run on one rank."""
    base = _top(single_rank)
    return _top(records[0]) / base if base else math.inf


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=RULE)


def _rises(record: Record) -> bool:
    """Return whether the rates still rise in the last update, so that their peak is unknown."""
    rates = record.rates
    return len(rates) > 1 and rates[-1] > rates[-2] * (1 + SAME) and rates[-1] >= _top(record)


def _warm_up(rates: list[float], base: list[float], evidence: str) -> StepRow:
    """Return the row of rates that still rise, on the ranks or on one rank."""
    if max(base) > base[0] * (1 + RULE):  # one rank's peak is unknown, too
        return not_seen(4, f"{evidence}: still rising; use --updates all to see the peak")
    first, last = (rate / base[0] if base[0] else 0.0 for rate in (rates[0], rates[-1]))
    return row(4, True, f"{evidence}: a warm-up, from x {first:.3g} to x {last:.3g}", ratio=first)


def _unscaled(records: Records, single_rank: Record, evidence: str, *, summed: bool) -> StepRow:
    """Return the row if the rate is that of one rank."""
    growth = _growth(records, single_rank)
    if growth is None:
        return not_seen(4, f"{evidence}; the batch size was not seen")
    if not _grows(records, growth):
        return row(4, True, f"{evidence}: unchanged, like the global batch", ratio=1.0)
    if records[0].distributed:
        rule = f"a choice; the linear rule would be x {len(records)}"
        return row(4, True, f"{evidence}: not multiplied by the ranks, {rule}", ratio=1.0)
    if summed:
        rule = f"gradients are summed, equivalent to their mean at x {len(records)}: linear rule"
        return row(4, True, f"{evidence}; {rule}", ratio=1.0)
    evidence = f"{evidence}, though the global batch is {growth:.3g} times larger"
    if any(record.seen.epoch is None for record in records):
        evidence += "; use --updates all to see a warm-up by epochs"
    return row(4, False, evidence)


def compensation(records: Records, single_rank: Record | None, facts: Mapping[str, Any]) -> str:
    """Return the rate that compensates for the factor of the gradients; empty if it does not."""
    if not single_rank or not all(record.rates for record in (single_rank, *records)):
        return ""
    peak, growth = _peak(records, single_rank), _growth(records, single_rank)
    grows = growth is not None and _grows(records, growth)
    # In a script of torch.distributed the rate of one rank is a usual choice, with the mean too.
    if facts.get("summed") and grows and _close(peak, 1.0) and not records[0].distributed:
        return "the rate of one rank, equivalent to the linear rule"
    size = len(records)
    if facts.get("divided") and _close(peak, size) and _is_constant(records, single_rank):
        return f"{size} times the rate of one rank, equivalent to it"
    return ""
