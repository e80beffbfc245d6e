"""Judge how a script trains: its learning rate (4), its gradients (5) and its equal start (6).

``everyone`` holds one record per rank, by rank (see ``record.py``); ``alone`` is what one rank
alone noted of the same script, to compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.commands.verify.rows import FAILED, NOT_SEEN, Row, by_rank, number, row
from hvdtrain.commands.verify.script.record import SAME, Noted
from hvdtrain.system.output.text import plural, rank_list

Vector = NDArray[np.float64]

BETWEEN = 1e-6  # relative difference between ranks that hold the same
REDUCED = 5e-3  # relative difference to the mean: compression to fp16 stays below it
RULE = 1e-3  # relative difference to a rule of the learning rate
IDLE = 1e-2  # the weight of a rank whose gradients do not count
NO_BROADCAST = "no broadcast was executed"
STATE = "broadcast_optimizer_state"
WHOLE = {"broadcast_global_variables", "broadcast_state"}  # all there is, whatever they are given


def learning_rate(everyone: Sequence[Noted], alone: Noted | None, *, summed: bool) -> Row:
    """Judge step 4: the rates are the same on all ranks, and follow from those of one rank alone.

    ``summed``: the ranks' gradients are added up and not divided.
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
    told = f"{told} in {plural(count, 'update')} on {plural(size, 'rank')}"
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


def is_unscaled(everyone: Sequence[Noted], alone: Noted | None) -> bool:
    """Return whether the rate is that of one rank alone, though the global batch is larger."""
    if not alone or not alone["rates"] or not all(record["rates"] for record in everyone):
        return False
    growth = _growth(everyone, alone)
    return _like(_peak(everyone, alone), 1.0) and growth is not None and _grows(everyone, growth)


def _rule(everyone: Sequence[Noted]) -> tuple[float, float] | None:
    """Return base and factor of ``scale_learning_rate``; None unless called on all ranks."""
    found = {
        (call["base"], call["factor"])
        for record in everyone
        for call in record["calls"]
        if call["name"] == "scale_learning_rate" and call["base"] is not None
    }
    called = all(any("factor" in call for call in record["calls"]) for record in everyone)
    return found.pop() if called and len(found) == 1 else None


def _growth(everyone: Sequence[Noted], alone: Noted | None) -> float | None:
    """Return the global batch size over that of one rank alone; None where not seen."""
    if not alone or not alone["updates"] or not all(record["updates"] for record in everyone):
        return None
    whole = sum(record["updates"][0]["rows"] for record in everyone)
    one = alone["updates"][0]["rows"]
    return whole / one if whole and one else None


def _grows(everyone: Sequence[Noted], growth: float) -> bool:
    """Return whether the global batch grows with the ranks, rather than being shared out."""
    return growth >= (1 + len(everyone)) / 2


def _top(record: Noted) -> float:
    """Return the highest rate: used, or the one that a scheduler makes the others from."""
    return float(max(record["initial_rate"], *record["rates"]))


def _peak(everyone: Sequence[Noted], alone: Noted) -> float:
    """Return the highest rate of the ranks over that of one rank alone."""
    base = _top(alone)
    return _top(everyone[0]) / base if base else math.inf


def _like(value: float, other: float) -> bool:
    return math.isclose(value, other, rel_tol=RULE)


def _climbs(record: Noted) -> bool:
    """Return whether the rates still rise at their end, to a height that nothing tells."""
    rates = record["rates"]
    return len(rates) > 1 and rates[-1] > rates[-2] * (1 + SAME) and rates[-1] >= _top(record)


def _scaled(everyone: Sequence[Noted], alone: Noted, told: str) -> Row | None:
    """Return the row where the rates follow or exceed a rule; None where they do neither."""
    size = len(everyone)
    rates, base = everyone[0]["rates"], alone["rates"]
    # One rank makes ``growth`` updates for each of theirs. A schedule may look at the epoch where
    # an update begins, or where it ends.
    growth, updates = _growth(everyone, alone) or 1.0, range(len(rates))
    early = _ratios(rates, base, [round(i * growth) for i in updates])
    late = _ratios(rates, base, [round((i + 1) * growth) - 1 for i in updates])
    peak = _peak(everyone, alone)
    climbs = _climbs(everyone[0]) or _climbs(alone)
    for name, factor in (("linear", float(size)), ("square root", math.sqrt(size))):
        kept = any(some and all(_like(one, factor) for one in some) for some in (early, late))
        if kept if climbs else _like(peak, factor):
            return row(4, True, f"{told}: {name} rule, x {factor:.3g}", ratio=factor)
    if peak > size and not climbs:
        return row(4, False, f"{told}: x {peak:.3g}, more than the linear rule's {size}")
    if max(base) <= base[0] * (1 + RULE) and max(rates) > rates[0] * (1 + RULE):
        start = rates[0] / base[0] if base[0] else 0.0
        return row(4, True, f"{told}: a warm-up, from x {start:.3g} to x {peak:.3g}", ratio=start)
    if climbs or not _like(peak, 1.0):
        return Row(4, NOT_SEEN, f"{told}: x {peak:.3g}, which is no rule that is known here")
    return None


def _unscaled(everyone: Sequence[Noted], alone: Noted, told: str, *, summed: bool) -> Row:
    """Return the row where the rate of one rank is kept."""
    growth = _growth(everyone, alone)
    if growth is None:
        return Row(4, NOT_SEEN, f"{told}; the size of the batches was not seen")
    if not _grows(everyone, growth):
        return row(4, True, f"{told}: as the global batch, which stays the same", ratio=1.0)
    if summed:
        equal = f"gradients are summed, which is their mean at x {len(everyone)}: linear rule"
        return row(4, True, f"{told}; {equal}", ratio=1.0)
    told = f"{told}, though the global batch is {growth:.3g} times larger"
    if any(record["epoch"] is None for record in everyone):
        told += "; a warm-up that rises once per epoch would show with --updates all"
    return row(4, False, told)


def _ratios(rates: list[float], base: list[float], places: list[int]) -> list[float]:
    """Return the rates over those of one rank alone at the same ``places``, where it has any."""
    pairs = zip(rates, places, strict=True)
    return [rate / base[i] for rate, i in pairs if 0 <= i < len(base) and base[i]]


def mean_gradient(everyone: Sequence[Noted], alone: Noted | None, *, unscaled: bool) -> Row:
    """Judge step 5: the gradients applied are equal on all ranks, and made of all ranks' own.

    ``unscaled``: the learning rate is that of one rank, though the global batch is larger; then the
    sum of the gradients does what the linear rule does to their mean.
    """
    size = len(everyone)
    updates = [record["updates"] for record in everyone]
    count = min(map(len, updates))
    if not count:
        return Row(5, NOT_SEEN, "no update was made")
    if size == 1:
        return Row(5, NOT_SEEN, "one rank: nothing to reduce")
    tensors = plural(updates[0][0]["tensors"], "tensor")
    largest = 0.0
    for step in range(count):
        applied = [np.array(one[step]["applied"]["sample"]) for one in updates]
        scale = max(float(np.linalg.norm(applied[0])), 1e-30)
        off = [float(np.linalg.norm(other - applied[0])) / scale for other in applied]
        different = [rank for rank, value in enumerate(off) if not value <= BETWEEN]
        if different:
            told = (
                f"{rank_list(different)} applied other gradients than rank 0 at update {step + 1}"
            )
            told = f"{told}: relative difference {number(max(off))}, {tensors}{_why(everyone)}"
            return row(5, False, told, between=max(off))
        largest = max(largest, *off)
    told = f"max difference between ranks {number(largest)} over {plural(count, 'update')}"
    made = _composition(everyone, alone, count, f"{told}, {tensors}")
    if made.state == FAILED and made.facts.get("summed") and unscaled:
        told = f"{made.evidence}; at the rate of one rank: as the mean by the linear rule"
        return row(5, True, told, **made.facts)
    return made


def _why(everyone: Sequence[Noted]) -> str:
    """Return a cause that is known; empty where none is."""
    if any(record["reduced"] for record in everyone):
        return ""
    calls = {call["name"] for record in everyone for call in record["calls"]}
    if keras := {name for name in calls if name.endswith("keras.DistributedOptimizer")}:
        return (
            f"; {min(keras)} reduces nothing with Keras 3: use hvd.DistributedGradientTape, or "
            "hvdtrain's distribute_optimizer"
        )
    return "; Horovod reduced nothing"


def _composition(everyone: Sequence[Noted], alone: Noted | None, count: int, told: str) -> Row:
    """Judge what the gradients applied are made of, at the first update where it can be seen."""
    for step in range(count):
        updates = [record["updates"][step] for record in everyone]
        applied = np.array(updates[0]["applied"]["sample"])
        if any(update["local"] is None for update in updates) or not np.any(applied):
            continue
        local = np.array([update["local"]["sample"] for update in updates])  # (ranks, values)
        if not all(record["reduced"] for record in everyone):
            return row(5, False, f"{told}; but Horovod reduced nothing")
        part = 0.0 if everyone[0]["hvdtrain"] else _part(local, alone)
        return _made_of(applied, local, told, part=part)
    if all(record["reduced"] for record in everyone):
        return row(5, True, f"{told}; the ranks' own were not seen")
    return Row(5, NOT_SEEN, told)


def _part(local: Vector, alone: Noted | None) -> float | None:
    """Return the size of the ranks' own gradients over one rank's alone, at the first update.

    1 where each is the mean over the rank's own samples; 1 / size where each is a sum divided by
    the size of the global batch.
    """
    if alone is None or not alone["updates"]:
        return None
    first = alone["updates"][0]
    one = float(np.linalg.norm((first["local"] or first["applied"])["sample"]))
    return float(np.median(np.linalg.norm(local, axis=1))) / one if one else None


def _made_of(applied: Vector, local: Vector, told: str, *, part: float | None) -> Row:
    """Judge whether ``applied`` is the mean of the ranks' own, ``local``, or a mix of them all.

    ``told`` is the evidence so far; ``part``: see ``_part``, 0 where hvdtrain weighs the gradients.
    """
    size = len(local)
    scale = float(np.linalg.norm(applied))
    to_mean = float(np.linalg.norm(applied - local.mean(0))) / scale
    if to_mean <= REDUCED:
        told += f"; to the mean of the ranks' own {number(to_mean)}"
        return row(5, True, told, mean=to_mean)
    to_sum = float(np.linalg.norm(applied - local.sum(0))) / scale
    if to_sum <= REDUCED:
        note = f"{told}; the sum, not the mean, of the ranks' own"
        if part is None:
            return Row(5, NOT_SEEN, f"{note}; right only if divided by the global batch before")
        if not part:
            return row(5, True, f"{note}, which are weighed before")
        note += f", each {part:.2g} times as large as one rank's alone"
        # Halfway, in magnitudes, from 1 / size to where noise may bring it: a batch that is cut
        # into parts has gradients up to the root of the size larger.
        if part < size**-0.25:
            return row(5, True, f"{note}: divided by the global batch before")
        return row(5, False, note, summed=True)
    weights, _, rank, _ = np.linalg.lstsq(local.T, applied, rcond=1e-6)
    residual = float(np.linalg.norm(applied - weights @ local)) / scale
    if rank < size or residual > REDUCED:
        return row(5, True, f"{told}; no plain mean of the ranks' own (clipped by tensor, perhaps)")
    idle = [r for r in range(size) if abs(weights[r]) < IDLE * np.max(np.abs(weights))]
    mix = ", ".join(f"{weight:.3g}" for weight in weights[:8])
    if idle:
        return row(5, False, f"{told}; but those of {rank_list(idle)} do not count ({mix})")
    return row(5, True, f"{told}; {mix} times the ranks' own", weights=weights.tolist())


def equal_start(everyone: Sequence[Noted]) -> Row:
    """Judge step 6: something was broadcast, and the parameters are equal by the second update."""
    size = len(everyone)
    if size == 1:
        return Row(6, NOT_SEEN, "one rank: nothing to broadcast")
    names = [_broadcasts(record) for record in everyone]
    waiting = [rank for rank, record in enumerate(everyone) if record["waiting"]]
    if waiting and len(waiting) < size:
        name = everyone[waiting[0]]["waiting"]
        rest = [rank for rank in range(size) if rank not in waiting]
        wait = "waits" if len(waiting) == 1 else "wait"
        return row(
            6, False, f"{rank_list(waiting)} {wait} in {name}, {rank_list(rest)} did not call it"
        )
    count = min(len(record["updates"]) for record in everyone)
    if not count:
        return Row(6, NOT_SEEN, "no update was made")
    starts = [_difference(everyone, step) for step in range(min(count, 2))]
    equal = next((step for step, off in enumerate(starts) if off == 0), None)
    tensors = plural(everyone[0]["updates"][0]["tensors"], "tensor")
    before = f"max difference to rank 0 before update {1 if equal is None else equal + 1}: "
    told = f"{before}{number(starts[equal or 0])}, {size} ranks, {tensors}"
    missing = [rank for rank, found in enumerate(names) if not found]
    if missing:
        who = "" if len(missing) == size else f" on {rank_list(missing)}"
        some = max(_values(everyone[rank]) for rank in missing)
        whole = plural(everyone[0]["updates"][0]["values"], "parameter")
        note = f"only {plural(some, 'value')} broadcast, of {whole}" if some else NO_BROADCAST
        note = f"{note}{who}; {told}"
        if equal is not None:
            note += ", equal only because all ranks drew the same first weights"
        return row(6, False, note)
    called = ", ".join(sorted(set.union(*names)))
    if equal is None and count < 2:
        return Row(6, NOT_SEEN, f"{called}; only one update was made; {told}")
    states = {record["updates"][0]["state"] for record in everyone}
    if equal == 0 and len(states) > 1 and None not in states:
        return row(6, False, f"{called}; the optimizer's state differs by rank; {told}")
    return row(6, equal is not None, f"{called}; {told}", difference=starts[equal or 0])


def _broadcasts(record: Noted) -> set[str]:
    """Return the calls by which the rank took part in a broadcast of all parameters, in time."""
    whole = {call["name"] for call in record["calls"]} & WHOLE
    if whole or not record["updates"] or _values(record) < record["updates"][0]["values"]:
        return whole
    return {call["name"] for call in _others(record)}


def _others(record: Noted) -> list[dict[str, Any]]:
    """Return the other broadcasts before the second update that may be of parameters."""
    calls = [call for call in record["calls"] if "values" in call and call["update"] <= 1]
    return [call for call in calls if call["name"] not in {*WHOLE, STATE}]


def _values(record: Noted) -> int:
    """Return how many values were broadcast, as far as they may be parameters."""
    return sum(call["values"] for call in _others(record))


def _difference(everyone: Sequence[Noted], step: int) -> float:
    """Return how far parameters before an update differ; inf where only the digests do."""
    start = [record["updates"][step]["before"] for record in everyone]
    if all(one["digest"] == start[0]["digest"] for one in start):
        return 0.0
    root = np.array(start[0]["sample"])
    off = max(float(np.max(np.abs(np.array(one["sample"]) - root), initial=0)) for one in start)
    return off or float("inf")
