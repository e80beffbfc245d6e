"""Judge row 5 of a script: the gradients.

``records`` are by rank; ``single_rank`` is the record of a run of the same script on one rank, to
compare with.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.commands.verify.rows import OK, StepRow, by_rank, not_seen, number, row
from hvdtrain.commands.verify.script.judge_rate import RULE, compensation
from hvdtrain.commands.verify.script.record import Record, Records, Update
from hvdtrain.commands.verify.script.watch_distributed import DDP
from hvdtrain.system.output.text import plural, rank_list

Vector = NDArray[np.float64]

BETWEEN = 1e-6  # relative difference between ranks that counts as equal
REDUCED = 5e-3  # relative difference to the mean: compression to fp16 stays below it
LOSS = 0.05  # relative difference of the losses of two batches that counts as equal
IDLE = 1e-2  # relative weight below which the gradients of a rank are not used
DIVIDED = ": averaged, though each rank's gradient was already divided by the global batch"
DIVIDED_BEFORE = "divided by the global batch size before"
KERAS = "import hvdtrain.keras as hvd"
WRAPPERS = {"DistributedOptimizer", DDP}  # of which a mean is expected


def mean_gradient(records: Records, single_rank: Record | None) -> StepRow:
    """Judge step 5: the gradients applied are equal on all ranks, and combine all local gradients.

    At the rate of one rank the sum of the gradients is equivalent to their mean with the linear
    rule, and so is at size times that rate their mean divided by the size.
    """
    steps = updates_by_rank(records)
    if not steps:
        return not_seen(5, "no update was made")
    if len(records) == 1:
        return not_seen(5, "one rank: nothing to reduce")
    if all(record.graded is False for record in records):
        count = plural(len(steps), "update")
        remedy = "create it with those of the model"
        return row(5, False, f"no parameter of the optimizer had a gradient in {count}: {remedy}")
    tensors = plural(records[0].updates[0].tensors, "tensor")
    largest = 0.0
    for step, updates in enumerate(steps, 1):
        applied = np.array([update.applied for update in updates])
        if not np.isfinite(applied).all(axis=1).any():
            return not_seen(5, f"the gradients of update {step} are not finite on any rank")
        scale = max(_norm(applied[0]), 1e-30)
        to_root = [_norm(values - applied[0]) / scale for values in applied]
        different = [rank for rank, value in enumerate(to_root) if not value <= BETWEEN]
        if different:
            evidence = f"{rank_list(different)} applied different gradients than rank 0 at update "
            evidence += f"{step}: relative difference {number(max(to_root))}, {tensors}"
            return row(5, False, f"{evidence}{_cause(records)}", between=max(to_root))
        largest = max(largest, *to_root)
    evidence = f"max difference between ranks {number(largest)} over {plural(len(steps), 'update')}"
    result = _composition(records, single_rank, f"{evidence}, {tensors}{_carried(steps)}")
    if rate := compensation(records, single_rank, result.facts):
        result = row(5, True, f"{result.evidence}; at {rate}", **result.facts)
    right = result.state == OK and "weights" not in result.facts and not records[0].hvdtrain
    return _uneven(records, result) if right else result


def _carried(steps: Sequence[tuple[Update, ...]]) -> str:
    """Return a note if an update also applied the gradients of the one before."""
    for first, second in pairwise(steps):
        local = [update.local for update in second if update.local is not None]
        if len(local) < len(second) or len(first[0].applied) != len(second[0].applied):
            continue  # unseen, or of two optimizers
        previous, applied = np.array(first[0].applied), np.array(second[0].applied)
        mean = np.array(local).mean(0)
        if any(previous) and _norm(applied - mean - previous) <= REDUCED * _norm(previous):
            return "; note: the gradients of an update are added to those before: call zero_grad()"
    return ""


def _uneven(records: Records, result: StepRow) -> StepRow:
    """Judge an equal mix of the gradients where the ranks' parts are uneven.

    Of sums over the samples, divided by the same number on all ranks, it is correct; of means not.
    """
    seen = [zip(record.seen.by_update(), record.sample_weights, strict=False) for record in records]
    for update, ranks in enumerate(zip(*seen, strict=False), 1):
        counts = [len(part) for part, _ in ranks]
        if min(counts) == max(counts) or not min(counts):
            continue
        weights = np.array([weight for _, weight in ranks], float)
        unseen = np.isnan(weights).any()
        if DIVIDED_BEFORE in result.evidence if unseen else np.ptp(weights) <= RULE * weights.max():
            continue
        evidence = f"{result.evidence}; parts of {by_rank(counts)} samples at update {update}"
        calls = {call.name.split(".")[-1] for call in records[0].calls}
        if unseen or not WRAPPERS & calls:  # the script may weight the gradients
            return not_seen(5, f"{evidence}: correct if the losses are weighted by these numbers")
        return row(5, False, f"{evidence}: the mean of the ranks' means")
    return result


def updates_by_rank(records: Records) -> list[tuple[Update, ...]]:
    """Return the updates that all ranks have made, each by rank."""
    return list(zip(*(record.updates for record in records), strict=False))


def _norm(values: Any) -> float:
    return float(np.linalg.norm(values))


def _cause(records: Records) -> str:
    """Return a known cause; empty if there is none."""
    if foreign := records[0].foreign:
        count = plural(foreign, "parameter")
        return f"; {count} of the optimizer not held by {DDP} (replaced after wrapping?)"
    if any(record.reduced for record in records):
        return ""
    calls = {call.name for record in records for call in record.calls}
    if keras := {name for name in calls if name.endswith("keras.DistributedOptimizer")}:
        return (
            f"; {min(keras)} reduces nothing with Keras 3: use `{KERAS}` instead, or "
            "hvd.DistributedGradientTape"
        )
    return f"; {_nothing(records)}"


def _nothing(records: Records) -> str:
    """Return the words for gradients that were not reduced, and the remedy if it is known."""
    calls = {call.name for record in records for call in record.calls}
    if DDP in calls:
        return "no pass went through DistributedDataParallel: call the wrapper, not model.module"
    if records[0].distributed:
        return "nothing was reduced: wrap the model in DistributedDataParallel"
    return "Horovod reduced nothing"


def _composition(records: Records, single_rank: Record | None, evidence: str) -> StepRow:
    """Judge how the gradients applied were combined, at the first update that shows it."""
    reduced = all(record.reduced for record in records)
    steps = updates_by_rank(records)
    if not any(any(updates[0].applied) for updates in steps):
        return not_seen(5, f"{evidence}; all gradients are 0")
    for updates in steps:
        # Without hvdtrain's stand-ins of empty parts, whose weight is 0.
        mixed = [u for u in updates if u.samples and records[0].hvdtrain] or updates
        local = [update.local for update in mixed if update.local is not None]
        if len(local) < len(mixed) or not any(updates[0].applied):
            continue
        if not reduced:
            return row(5, False, f"{evidence}; but {_nothing(records)}")
        part = _part(np.array(local), single_rank)
        divided = _is_divided(records, updates, single_rank)
        if records[0].hvdtrain:  # it weights the gradients
            part, divided = 0.0, False
        applied = np.array(updates[0].applied)
        return _combination(applied, np.array(local), evidence, part=part, divided=divided)
    if reduced:  # perhaps to their sum, or to the mean over some of the ranks
        evidence += "; reduced, but the local gradients were not seen"
    return not_seen(5, evidence)


def _part(local: Vector, single_rank: Record | None) -> float | None:
    """Return the norm of the local gradients relative to the run on one rank, at update 1.

    It is 1 if each is the mean over the samples of its rank; 1 / size if each is a sum divided by
    the size of the global batch.
    """
    if single_rank is None or not single_rank.updates:
        return None
    first = single_rank.updates[0]
    base = _norm(first.local or first.applied)
    return float(np.median(np.linalg.norm(local, axis=1))) / base if base else None


def _share(records: Records, single_rank: Record) -> float | None:
    """Return the factor of a rank's loss at update 1, relative to one rank's; None if not seen.

    It is the sum of the factors of the rank's samples: 1 for a mean over them, as on one rank.
    """
    sums = []
    for record in (*records, single_rank):
        weight = next(iter(record.sample_weights), None)
        if not weight or not record.updates or not record.updates[0].samples:
            return None
        sums.append(weight * record.updates[0].samples)
    return float(np.mean(sums[:-1])) / sums[-1]


def _is_divided(records: Records, updates: Sequence[Update], single_rank: Record | None) -> bool:
    """Return whether the losses of the ranks are 1 / size of the loss of one rank.

    Their gradients are then sums divided by the size of the global batch. It is read off the graph
    of the loss, if that shows it; else the losses are compared, which, unlike the gradients of two
    batches, differ little by noise.
    """
    if single_rank is None or not single_rank.updates:
        return False
    if (share := _share(records, single_rank)) is not None:
        return math.isclose(share * len(updates), 1.0, rel_tol=RULE)
    first = single_rank.updates[0]
    losses = [update.loss for update in updates if update.before.digest == first.before.digest]
    return bool(losses and first.loss) and all(
        loss is not None and math.isclose(loss * len(updates), first.loss or 0.0, rel_tol=LOSS)
        for loss in losses
    )


def _combination(
    applied: Vector, local: Vector, evidence: str, *, part: float | None, divided: bool
) -> StepRow:
    """Judge whether ``applied`` is the mean of the gradients ``local``, or uses all of them.

    ``evidence`` so far; ``part``: see ``_part``, 0 if hvdtrain weights the gradients; ``divided``:
    see ``_is_divided``.
    """
    size, scale = len(local), _norm(applied)
    to_mean = _norm(applied - local.mean(0)) / scale
    if to_mean <= REDUCED:
        evidence += f"; to the mean of the local gradients {number(to_mean)}"
        if divided:
            evidence += DIVIDED
        return row(5, not divided, evidence, mean=to_mean, divided=divided)
    if _norm(applied - local.sum(0)) / scale <= REDUCED:
        evidence += "; the sum, not the mean, of the local gradients"
        if part is None:
            return not_seen(5, f"{evidence}; correct only if divided by the global batch size")
        if not part:
            return row(5, True, f"{evidence}, which are weighted before")
        evidence += f", each {part:.2g} times the gradient of one rank"
        # The geometric mean of 1 / size and the root of size, since noise makes the gradients of a
        # batch's parts larger by up to that root.
        if divided or part < size**-0.25:
            return row(5, True, f"{evidence}: {DIVIDED_BEFORE}")
        return row(5, False, evidence, summed=True)
    weights, _, rank, _ = np.linalg.lstsq(local.T, applied, rcond=1e-6)
    if rank < size or _norm(applied - weights @ local) / scale > REDUCED:
        return not_seen(5, f"{evidence}; no weighted sum of the local gradients")
    unused = [r for r in range(size) if abs(weights[r]) < IDLE * np.max(np.abs(weights))]
    factors = ", ".join(f"{weight:.3g}" for weight in weights[:8])
    if unused:
        return row(5, False, f"{evidence}; gradients of {rank_list(unused)} not used ({factors})")
    evidence += f"; {factors} times the local gradients"
    if np.allclose(weights, size**-2, rtol=RULE, atol=0):
        evidence += ", note: as if divided by the ranks twice"
    return row(5, True, evidence, weights=weights.tolist())
