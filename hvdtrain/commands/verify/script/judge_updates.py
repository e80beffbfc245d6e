"""Judge how a script trains: learning rate (4), gradients (5) and equal start (6).

``records`` are by rank (see ``record.py``); ``single_rank`` is the record of a run of the same
script on one rank, to compare with.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, Row, by_rank, number, row
from hvdtrain.commands.verify.script.record import SAME, RankRecord, Records
from hvdtrain.system.output.text import plural, rank_list

Vector = NDArray[np.float64]

BETWEEN = 1e-6  # relative difference between ranks that counts as equal
REDUCED = 5e-3  # relative difference to the mean: compression to fp16 stays below it
RULE = 1e-3  # relative difference to a rule of the learning rate
IDLE = 1e-2  # relative weight below which the gradients of a rank are not used
NO_BROADCAST = "no broadcast was executed"
STATE = "broadcast_optimizer_state"
WHOLE = {"broadcast_global_variables", "broadcast_state"}  # all parameters, whatever the arguments


def learning_rate(records: Records, single_rank: RankRecord | None, *, summed: bool) -> Row:
    """Judge step 4: the rates are equal on all ranks, and follow a rule from those of one rank.

    ``summed``: the ranks' gradients are summed, not averaged.
    """
    size = len(records)
    rates: list[list[float]] = [record["rates"] for record in records]
    count = min(map(len, rates))
    if not count:
        return Row(4, NOT_SEEN, "no update was made")
    for update, values in enumerate(zip(*(values[:count] for values in rates), strict=True)):
        if max(values) - min(values) > SAME * max(map(abs, values)):
            different = by_rank([f"{value:g}" for value in values], ", ")
            return row(4, False, f"at update {update + 1}: {different} by rank")
    first = rates[0][:count]
    applied = f"{first[0]:g}" if len(set(first)) == 1 else f"{first[0]:g} to {first[-1]:g}"
    evidence = f"{applied} in {plural(count, 'update')} on {plural(size, 'rank')}"
    if rule := _rule(records):
        within = max(first) <= rule[0] * rule[1] * (1 + SAME)
        return row(4, within, f"{evidence}; scale_learning_rate gives {rule[0]:g} x {rule[1]:.3g}")
    if size == 1 or not single_rank:
        return Row(4, NOT_SEEN, f"{evidence}; no run on one rank to compare with")
    if not single_rank["rates"]:
        cause = "did it resume from the ranks' checkpoint?"
        return Row(4, NOT_SEEN, f"{evidence}; the run on one rank made no update: {cause}")
    evidence = f"{evidence}, {single_rank['rates'][0]:g} on one rank"
    scaled = _scaled(records, single_rank, evidence)
    return scaled or _unscaled(records, single_rank, evidence, summed=summed)


def is_unscaled(records: Records, single_rank: RankRecord | None) -> bool:
    """Return whether the rate is that of one rank, although the global batch is larger."""
    if not single_rank or not single_rank["rates"] or not all(r["rates"] for r in records):
        return False
    growth = _growth(records, single_rank)
    grows = growth is not None and _grows(records, growth)
    return grows and _close(_peak(records, single_rank), 1.0)


def _rule(records: Records) -> tuple[float, float] | None:
    """Return base and factor of ``scale_learning_rate``; None unless called on all ranks."""
    rules = {
        (call["base"], call["factor"])
        for record in records
        for call in record["calls"]
        if call["name"] == "scale_learning_rate" and call["base"] is not None
    }
    called = all(any("factor" in call for call in record["calls"]) for record in records)
    return rules.pop() if called and len(rules) == 1 else None


def _growth(records: Records, single_rank: RankRecord | None) -> float | None:
    """Return the global batch size relative to the run on one rank; None if not seen."""
    if not single_rank or not all(record["updates"] for record in (single_rank, *records)):
        return None
    whole = sum(record["updates"][0]["rows"] for record in records)
    base = single_rank["updates"][0]["rows"]
    return whole / base if whole and base else None


def _grows(records: Records, growth: float) -> bool:
    """Return whether the global batch grows with the ranks, rather than being divided."""
    return growth >= (1 + len(records)) / 2


def _top(record: RankRecord) -> float:
    """Return the highest rate, used or scaled by a scheduler."""
    return float(max(record["initial_rate"], *record["rates"]))


def _peak(records: Records, single_rank: RankRecord) -> float:
    """Return the highest rate of the ranks relative to that of the run on one rank."""
    base = _top(single_rank)
    return _top(records[0]) / base if base else math.inf


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=RULE)


def _rises(record: RankRecord) -> bool:
    """Return whether the rates still rise in the last update, so that their peak is unknown."""
    rates = record["rates"]
    return len(rates) > 1 and rates[-1] > rates[-2] * (1 + SAME) and rates[-1] >= _top(record)


def _scaled(records: Records, single_rank: RankRecord, evidence: str) -> Row | None:
    """Return the row if the rates follow or exceed a rule; None if they do neither."""
    size = len(records)
    rates, base = records[0]["rates"], single_rank["rates"]
    # One rank makes ``growth`` updates for each of theirs. A schedule may use the epoch at the
    # beginning or at the end of an update.
    growth, updates = _growth(records, single_rank) or 1.0, range(len(rates))
    early = _ratios(rates, base, [round(i * growth) for i in updates])
    late = _ratios(rates, base, [round((i + 1) * growth) - 1 for i in updates])
    peak = _peak(records, single_rank)
    rises = _rises(records[0]) or _rises(single_rank)
    for name, factor in (("linear", float(size)), ("square root", math.sqrt(size))):
        follows = any(
            ratios and all(_close(ratio, factor) for ratio in ratios) for ratios in (early, late)
        )
        matches = follows if rises else _close(peak, factor)
        if matches:
            return row(4, True, f"{evidence}: {name} rule, x {factor:.3g}", ratio=factor)
    if peak > size and not rises:
        return row(4, False, f"{evidence}: x {peak:.3g}, more than the linear rule's {size}")
    if max(base) <= base[0] * (1 + RULE) and max(rates) > rates[0] * (1 + RULE):
        ratio = rates[0] / base[0] if base[0] else 0.0
        evidence += f": a warm-up, from x {ratio:.3g} to x {peak:.3g}"
        return row(4, True, evidence, ratio=ratio)
    if rises or not _close(peak, 1.0):
        return Row(4, NOT_SEEN, f"{evidence}: x {peak:.3g}, no known rule")
    return None


def _unscaled(records: Records, single_rank: RankRecord, evidence: str, *, summed: bool) -> Row:
    """Return the row if the rate is that of one rank."""
    growth = _growth(records, single_rank)
    if growth is None:
        return Row(4, NOT_SEEN, f"{evidence}; the batch size was not seen")
    if not _grows(records, growth):
        return row(4, True, f"{evidence}: unchanged, like the global batch", ratio=1.0)
    if summed:
        rule = f"gradients are summed, equivalent to their mean at x {len(records)}: linear rule"
        return row(4, True, f"{evidence}; {rule}", ratio=1.0)
    evidence = f"{evidence}, though the global batch is {growth:.3g} times larger"
    if any(record["epoch"] is None for record in records):
        evidence += "; use --updates all to see a warm-up by epochs"
    return row(4, False, evidence)


def _ratios(rates: list[float], base: list[float], updates: list[int]) -> list[float]:
    """Return the rates relative to those of one rank at ``updates``, as far as it made them."""
    pairs = zip(rates, updates, strict=True)
    return [rate / base[i] for rate, i in pairs if 0 <= i < len(base) and base[i]]


def mean_gradient(records: Records, single_rank: RankRecord | None, *, unscaled: bool) -> Row:
    """Judge step 5: the gradients applied are equal on all ranks, and combine all local gradients.

    ``unscaled``: the learning rate is that of one rank, although the global batch is larger; the
    sum of the gradients is then equivalent to their mean with the linear rule.
    """
    size = len(records)
    updates = [record["updates"] for record in records]
    count = min(map(len, updates))
    if not count:
        return Row(5, NOT_SEEN, "no update was made")
    if size == 1:
        return Row(5, NOT_SEEN, "one rank: nothing to reduce")
    tensors = plural(updates[0][0]["tensors"], "tensor")
    largest = 0.0
    for step in range(count):
        applied = [np.array(update[step]["applied"]["sample"]) for update in updates]
        scale = max(float(np.linalg.norm(applied[0])), 1e-30)
        to_root = [float(np.linalg.norm(values - applied[0])) / scale for values in applied]
        different = [rank for rank, value in enumerate(to_root) if not value <= BETWEEN]
        if different:
            evidence = f"{rank_list(different)} applied different gradients than rank 0 at update "
            evidence += f"{step + 1}: relative difference {number(max(to_root))}, {tensors}"
            return row(5, False, f"{evidence}{_cause(records)}", between=max(to_root))
        largest = max(largest, *to_root)
    evidence = f"max difference between ranks {number(largest)} over {plural(count, 'update')}"
    result = _composition(records, single_rank, count, f"{evidence}, {tensors}")
    if result.state == FAILED and result.facts.get("summed") and unscaled:
        evidence = f"{result.evidence}; at the rate of one rank, equivalent to the linear rule"
        return row(5, True, evidence, **result.facts)
    return result


def _cause(records: Records) -> str:
    """Return a known cause; empty if there is none."""
    if any(record["reduced"] for record in records):
        return ""
    calls = {call["name"] for record in records for call in record["calls"]}
    if keras := {name for name in calls if name.endswith("keras.DistributedOptimizer")}:
        return (
            f"; {min(keras)} reduces nothing with Keras 3: use hvd.DistributedGradientTape, or "
            "hvdtrain's distribute_optimizer"
        )
    return "; Horovod reduced nothing"


def _composition(
    records: Records, single_rank: RankRecord | None, count: int, evidence: str
) -> Row:
    """Judge how the gradients applied were combined, at the first update that shows it."""
    for step in range(count):
        updates = [record["updates"][step] for record in records]
        applied = np.array(updates[0]["applied"]["sample"])
        if any(update["local"] is None for update in updates) or not np.any(applied):
            continue
        local = np.array([update["local"]["sample"] for update in updates])  # (ranks, values)
        if not all(record["reduced"] for record in records):
            return row(5, False, f"{evidence}; but Horovod reduced nothing")
        part = 0.0 if records[0]["hvdtrain"] else _part(local, single_rank)
        return _combination(applied, local, evidence, part=part)
    if all(record["reduced"] for record in records):
        return row(5, True, f"{evidence}; the local gradients were not seen")
    return Row(5, NOT_SEEN, evidence)


def _part(local: Vector, single_rank: RankRecord | None) -> float | None:
    """Return the norm of the local gradients relative to the run on one rank, at update 1.

    It is 1 if each is the mean over the samples of its rank; 1 / size if each is a sum divided by
    the size of the global batch.
    """
    if single_rank is None or not single_rank["updates"]:
        return None
    first = single_rank["updates"][0]
    base = float(np.linalg.norm((first["local"] or first["applied"])["sample"]))
    return float(np.median(np.linalg.norm(local, axis=1))) / base if base else None


def _combination(applied: Vector, local: Vector, evidence: str, *, part: float | None) -> Row:
    """Judge whether ``applied`` is the mean of the gradients ``local``, or uses all of them.

    ``evidence`` so far; ``part``: see ``_part``, 0 if hvdtrain weights the gradients.
    """
    size = len(local)
    scale = float(np.linalg.norm(applied))
    to_mean = float(np.linalg.norm(applied - local.mean(0))) / scale
    if to_mean <= REDUCED:
        evidence += f"; to the mean of the local gradients {number(to_mean)}"
        return row(5, True, evidence, mean=to_mean)
    to_sum = float(np.linalg.norm(applied - local.sum(0))) / scale
    if to_sum <= REDUCED:
        evidence += "; the sum, not the mean, of the local gradients"
        if part is None:
            return Row(5, NOT_SEEN, f"{evidence}; correct only if divided by the global batch size")
        if not part:
            return row(5, True, f"{evidence}, which are weighted before")
        evidence += f", each {part:.2g} times the gradient of one rank"
        # The geometric mean of 1 / size and the root of size, since noise makes the gradients of a
        # batch's parts larger by up to that root.
        if part < size**-0.25:
            return row(5, True, f"{evidence}: divided by the global batch size before")
        return row(5, False, evidence, summed=True)
    weights, _, rank, _ = np.linalg.lstsq(local.T, applied, rcond=1e-6)
    residual = float(np.linalg.norm(applied - weights @ local)) / scale
    if rank < size or residual > REDUCED:
        return row(
            5, True, f"{evidence}; no unique weights of the local gradients (clipped by value?)"
        )
    unused = [r for r in range(size) if abs(weights[r]) < IDLE * np.max(np.abs(weights))]
    factors = ", ".join(f"{weight:.3g}" for weight in weights[:8])
    if unused:
        return row(5, False, f"{evidence}; gradients of {rank_list(unused)} not used ({factors})")
    evidence += f"; {factors} times the local gradients"
    return row(5, True, evidence, weights=weights.tolist())


def equal_start(records: Records) -> Row:
    """Judge step 6: parameters were broadcast, and are equal by the second update."""
    size = len(records)
    if size == 1:
        return Row(6, NOT_SEEN, "one rank: nothing to broadcast")
    names = [_broadcasts(record) for record in records]
    waiting = [rank for rank, record in enumerate(records) if record["waiting"]]
    if waiting and len(waiting) < size:
        name = records[waiting[0]]["waiting"]
        absent = [rank for rank in range(size) if rank not in waiting]
        verb = "waits" if len(waiting) == 1 else "wait"
        return row(
            6, False, f"{rank_list(waiting)} {verb} in {name}, {rank_list(absent)} did not call it"
        )
    count = min(len(record["updates"]) for record in records)
    if not count:
        return Row(6, NOT_SEEN, "no update was made")
    starts = [_difference(records, step) for step in range(min(count, 2))]
    equal = next((step for step, difference in enumerate(starts) if difference == 0), None)
    tensors = plural(records[0]["updates"][0]["tensors"], "tensor")
    before = f"max difference to rank 0 before update {1 if equal is None else equal + 1}: "
    evidence = f"{before}{number(starts[equal or 0])}, {size} ranks, {tensors}"
    missing = [rank for rank, calls in enumerate(names) if not calls]
    if missing:
        where = "" if len(missing) == size else f" on {rank_list(missing)}"
        count = max(_values(records[rank]) for rank in missing)
        total = plural(records[0]["updates"][0]["values"], "parameter")
        cause = f"only {plural(count, 'value')} broadcast, of {total}" if count else NO_BROADCAST
        evidence = f"{cause}{where}; {evidence}"
        if equal is not None:
            evidence += ", equal only because all ranks drew the same initial weights"
        return row(6, False, evidence)
    called = ", ".join(sorted(set.union(*names)))
    if equal is None and count < 2:
        return Row(6, NOT_SEEN, f"{called}; only one update was made; {evidence}")
    states = {record["updates"][0]["state"] for record in records}
    if equal == 0 and len(states) > 1 and None not in states:
        return row(6, False, f"{called}; the optimizer's state differs by rank; {evidence}")
    return row(6, equal is not None, f"{called}; {evidence}", difference=starts[equal or 0])


def _broadcasts(record: RankRecord) -> set[str]:
    """Return the rank's calls that broadcast all parameters, before the second update."""
    whole = {call["name"] for call in record["calls"]} & WHOLE
    if whole or not record["updates"] or _values(record) < record["updates"][0]["values"]:
        return whole
    return {call["name"] for call in _parameter_calls(record)}


def _parameter_calls(record: RankRecord) -> list[dict[str, Any]]:
    """Return broadcasts of single values before the second update that may be parameters."""
    calls = [call for call in record["calls"] if "values" in call and call["update"] <= 1]
    return [call for call in calls if call["name"] not in {*WHOLE, STATE}]


def _values(record: RankRecord) -> int:
    """Return the number of values broadcast by ``_parameter_calls``."""
    return sum(call["values"] for call in _parameter_calls(record))


def _difference(records: Records, step: int) -> float:
    """Return the largest difference of parameters before an update; inf if only digests differ."""
    start = [record["updates"][step]["before"] for record in records]
    if all(rank["digest"] == start[0]["digest"] for rank in start):
        return 0.0
    samples = [np.array(rank["sample"]) for rank in start]
    difference = max(float(np.max(np.abs(s - samples[0]), initial=0)) for s in samples)
    return difference or float("inf")
