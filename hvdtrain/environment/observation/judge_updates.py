"""Steps 5 and 6 of a script, from the parameters and gradients that were seen at its updates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.environment.verification.rows import (
    FAILED,
    NOT_SEEN,
    Row,
    listed,
    number,
    row,
    several,
)

Record = dict[str, Any]
Vector = NDArray[np.float64]

BETWEEN = 1e-6  # relative difference between ranks that hold the same
REDUCED = 5e-3  # relative difference to the mean: compression to fp16 stays below it
NO_BROADCAST = "no broadcast was executed"
IDLE = 1e-2  # the weight of a rank whose gradients do not count


def mean_gradient(everyone: Sequence[Record], alone: Record | None, *, unscaled: bool) -> Row:
    """Step 5: the gradients applied are equal on all ranks, and made of all ranks' own.

    Args:
        everyone: what the ranks noted.
        alone: what one rank alone noted.
        unscaled: whether the learning rate is that of one rank, though the global batch is larger:
            then the sum of the gradients does what the linear rule does to their mean.
    """
    size = len(everyone)
    updates = [record["updates"] for record in everyone]
    count = min(map(len, updates))
    if not count:
        return Row(5, NOT_SEEN, "no update was made")
    if size == 1:
        return Row(5, NOT_SEEN, "one rank: nothing to reduce")
    tensors = several(updates[0][0]["tensors"], "tensor")
    largest = 0.0
    for step in range(count):
        applied = [np.array(one[step]["applied"]["sample"]) for one in updates]
        scale = max(float(np.linalg.norm(applied[0])), 1e-30)
        off = [float(np.linalg.norm(other - applied[0])) / scale for other in applied]
        different = [rank for rank, value in enumerate(off) if not value <= BETWEEN]
        if different:
            told = f"{listed(different)} applied other gradients than rank 0 at update {step + 1}"
            told = f"{told}: relative difference {number(max(off))}, {tensors}{_why(everyone)}"
            return row(5, False, told, between=max(off))
        largest = max(largest, *off)
    told = f"max difference between ranks {number(largest)} over {several(count, 'update')}"
    made = _composition(everyone, alone, count, f"{told}, {tensors}")
    if made.state == FAILED and made.facts.get("summed") and unscaled:
        told = f"{made.evidence}; at the rate of one rank: as the mean by the linear rule"
        return row(5, True, told, **made.facts)
    return made


def _why(everyone: Sequence[Record]) -> str:
    """A cause that is known."""
    calls = {call["name"] for record in everyone for call in record["calls"]}
    keras = {name for name in calls if name.endswith("keras.DistributedOptimizer")}
    if keras and not any(record["reduced"] for record in everyone):
        return (
            f"; {min(keras)} reduces nothing with Keras 3: use hvd.DistributedGradientTape, or "
            "hvdtrain's distribute_optimizer"
        )
    return "" if any(record["reduced"] for record in everyone) else "; Horovod reduced nothing"


def _composition(everyone: Sequence[Record], alone: Record | None, count: int, told: str) -> Row:
    """What the gradients applied are made of, at the first update where that can be seen."""
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


def _part(local: Vector, alone: Record | None) -> float | None:
    """How large the ranks' own gradients are beside one rank's alone, at the first update.

    1 where each is the mean over the rank's own samples; 1 / size where each is a sum divided by
    the size of the global batch.
    """
    if alone is None or not alone["updates"]:
        return None
    first = alone["updates"][0]
    one = float(np.linalg.norm((first["local"] or first["applied"])["sample"]))
    return float(np.median(np.linalg.norm(local, axis=1))) / one if one else None


def _made_of(applied: Vector, local: Vector, told: str, *, part: float | None) -> Row:
    """Whether ``applied`` is the mean of the rows of ``local``, or another mix of all of them.

    Args:
        applied: the gradients of an update.
        local: the ranks' own, of shape (ranks, values).
        told: the evidence so far.
        part: see ``_part``; 0 where the script leaves the weights to hvdtrain.
    """
    size = len(local)
    scale = float(np.linalg.norm(applied))
    to_mean = float(np.linalg.norm(applied - local.mean(0))) / scale
    if to_mean <= REDUCED:
        return row(
            5, True, f"{told}; to the mean of the ranks' own {number(to_mean)}", mean=to_mean
        )
    to_sum = float(np.linalg.norm(applied - local.sum(0))) / scale
    if to_sum <= REDUCED:
        note = f"{told}; the sum, not the mean, of the ranks' own"
        if part is None:
            return Row(5, NOT_SEEN, f"{note}; right only if divided by the global batch before")
        # Halfway, in magnitudes, from 1 / size to where noise may bring it: a batch that is cut
        # into parts has gradients up to the root of the size larger.
        divided = part < size**-0.25
        if not part:
            return row(5, True, f"{note}, which are weighed before")
        note += f", each {part:.2g} times as large as one rank's alone"
        if divided:
            return row(5, True, f"{note}: divided by the global batch before")
        return row(5, False, note, summed=True)
    weights, _, rank, _ = np.linalg.lstsq(local.T, applied, rcond=1e-6)
    residual = float(np.linalg.norm(applied - weights @ local)) / scale
    if rank < size or residual > REDUCED:
        return row(5, True, f"{told}; no plain mean of the ranks' own (clipped by tensor, perhaps)")
    idle = [r for r in range(size) if abs(weights[r]) < IDLE * np.max(np.abs(weights))]
    mix = ", ".join(f"{weight:.3g}" for weight in weights[:8])
    if idle:
        return row(5, False, f"{told}; but those of {listed(idle)} do not count ({mix})")
    return row(5, True, f"{told}; {mix} times the ranks' own", weights=weights.tolist())


def equal_start(everyone: Sequence[Record]) -> Row:
    """Step 6: something was broadcast, and the parameters are equal by the second update."""
    size = len(everyone)
    if size == 1:
        return Row(6, NOT_SEEN, "one rank: nothing to broadcast")
    names = [_broadcasts(record) for record in everyone]
    waiting = [rank for rank, record in enumerate(everyone) if record["waiting"]]
    if waiting and len(waiting) < size:
        name = everyone[waiting[0]]["waiting"]
        rest = [rank for rank in range(size) if rank not in waiting]
        wait = "waits" if len(waiting) == 1 else "wait"
        return row(6, False, f"{listed(waiting)} {wait} in {name}, {listed(rest)} did not call it")
    count = min(len(record["updates"]) for record in everyone)
    if not count:
        return Row(6, NOT_SEEN, "no update was made")
    starts = [_difference(everyone, step) for step in range(min(count, 2))]
    equal = next((step for step, off in enumerate(starts) if off == 0), None)
    tensors = several(everyone[0]["updates"][0]["tensors"], "tensor")
    before = f"max difference to rank 0 before update {1 if equal is None else equal + 1}: "
    told = f"{before}{number(starts[equal or 0])}, {size} ranks, {tensors}"
    missing = [rank for rank, found in enumerate(names) if not found]
    if missing:
        who = "" if len(missing) == size else f" on {listed(missing)}"
        some = max(_values(everyone[rank]) for rank in missing)
        whole = several(everyone[0]["updates"][0]["values"], "parameter")
        note = f"only {several(some, 'value')} broadcast, of {whole}" if some else NO_BROADCAST
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


# What broadcasts all that there is, whatever it is given.
WHOLE = {"broadcast_global_variables", "broadcast_state"}
STATE = "broadcast_optimizer_state"


def _broadcasts(record: Record) -> set[str]:
    """By which calls the rank took part in a broadcast of all parameters, in time."""
    whole = {call["name"] for call in record["calls"]} & WHOLE
    if whole or not record["updates"] or _values(record) < record["updates"][0]["values"]:
        return whole
    return {call["name"] for call in _others(record)}


def _others(record: Record) -> list[dict[str, Any]]:
    known = {*WHOLE, STATE}
    calls = [call for call in record["calls"] if "values" in call and call["update"] <= 1]
    return [call for call in calls if call["name"] not in known]


def _values(record: Record) -> int:
    """How many values were broadcast, as far as they may be parameters."""
    return sum(call["values"] for call in _others(record))


def _difference(everyone: Sequence[Record], step: int) -> float:
    """How far the parameters before an update are apart; inf where only the digests tell."""
    start = [record["updates"][step]["before"] for record in everyone]
    if all(one["digest"] == start[0]["digest"] for one in start):
        return 0.0
    root = np.array(start[0]["sample"])
    off = max(float(np.max(np.abs(np.array(one["sample"]) - root), initial=0)) for one in start)
    return off or float("inf")
