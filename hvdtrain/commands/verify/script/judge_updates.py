"""Judge how a script trains: learning rate (4), gradients (5) and equal start (6).

``records`` are by rank; ``single_rank`` is the record of a run of the same script on one rank, to
compare with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.commands.verify.rows import OK, StepRow, by_rank, not_seen, number, row
from hvdtrain.commands.verify.script.record import (
    SAME,
    SCALED,
    Call,
    Record,
    Records,
    Update,
    Values,
)
from hvdtrain.system.output.text import plural, rank_list

Vector = NDArray[np.float64]

BETWEEN = 1e-6  # relative difference between ranks that counts as equal
REDUCED = 5e-3  # relative difference to the mean: compression to fp16 stays below it
RULE = 1e-3  # relative difference to a rule of the learning rate
CONSTANT = 1.1  # growth of a global batch that is divided among the ranks, and rounded up
LOSS = 0.05  # relative difference of the losses of two batches that counts as equal
APART = 1e-3  # relative difference of parameters between ranks that counts as none
IDLE = 1e-2  # relative weight below which the gradients of a rank are not used
DIVIDED = ": averaged, though each rank's gradient was already divided by the global batch"
DIVIDED_BEFORE = "divided by the global batch size before"
KERAS = "import hvdtrain.keras as hvd"
NO_BROADCAST = "no broadcast was executed"
STATE = "broadcast_optimizer_state"
DDP = "DistributedDataParallel"
# Calls after which all parameters are those of rank 0, or parts of one copy of them.
WHOLE = {"broadcast_global_variables", "broadcast_state", DDP, "fully_shard"}
WRAPPERS = {"DistributedOptimizer", DDP}  # of which a mean is expected


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


def mean_gradient(records: Records, single_rank: Record | None) -> StepRow:
    """Judge step 5: the gradients applied are equal on all ranks, and combine all local gradients.

    At the rate of one rank the sum of the gradients is equivalent to their mean with the linear
    rule, and so is at size times that rate their mean divided by the size.
    """
    steps = _by_rank(records)
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
    if rate := _compensation(records, single_rank, result.facts):
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


def _compensation(records: Records, single_rank: Record | None, facts: Mapping[str, Any]) -> str:
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


def _by_rank(records: Records) -> list[tuple[Update, ...]]:
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
    steps = _by_rank(records)
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


def equal_start(records: Records, *, drifts: bool = False) -> StepRow:
    """Judge step 6: parameters were broadcast, and are equal by the second update.

    ``drifts``: whether they must be equal later, too.
    """
    size = len(records)
    if size == 1:
        return not_seen(6, "one rank: nothing to broadcast")
    waiting = [rank for rank, record in enumerate(records) if record.waiting]
    if waiting and len(waiting) < size:
        name = records[waiting[0]].waiting
        absent = [rank for rank in range(size) if rank not in waiting]
        verb = "waits" if len(waiting) == 1 else "wait"
        evidence = f"{rank_list(waiting)} {verb} in {name}, {rank_list(absent)} did not call it"
        return row(6, False, evidence)
    steps = [[update.before for update in step] for step in _by_rank(records)]
    starts = [_difference(before) for before in steps[:2]]
    if not starts:
        return not_seen(6, "no update was made")
    equal = next((step for step, difference in enumerate(starts) if difference == 0), None)
    start = equal or 0
    evidence = f"max difference to rank 0 before update {start + 1}: {number(starts[start])}, "
    evidence += f"{size} ranks, {plural(records[0].updates[0].tensors, 'tensor')}"
    calls = [_broadcasts(record) for record in records]
    missing = [rank for rank in range(size) if not _is_complete(calls[rank], records[rank])]
    if missing:
        where = "" if len(missing) == size else f" on {rank_list(missing)}"
        values = max(sum(call.values for call in calls[rank]) for rank in missing)
        total = plural(records[0].updates[0].values, "parameter")
        cause = f"only {plural(values, 'value')} broadcast, of {total}" if values else NO_BROADCAST
        evidence = f"{cause}{where}; {evidence}"
        if equal is not None:
            evidence += ", equal only because all ranks drew the same initial weights"
        return row(6, False, evidence)
    evidence = f"{', '.join(sorted({call.name for names in calls for call in names}))}; {evidence}"
    if equal is None and len(starts) < 2:
        return not_seen(6, f"{evidence}; only one update was made")
    states = {record.updates[0].state for record in records}
    if equal == 0 and len(states) > 1 and None not in states:
        return row(6, False, f"the optimizer's state differs by rank; {evidence}")
    later = steps[start + 1 :] if drifts and equal is not None else []
    for update, before in enumerate(later, start + 2):
        difference, scale = _difference(before), np.max(np.abs(before[0].sample), initial=0)
        if APART * scale < difference < math.inf:  # infinite: only digests differ
            evidence += f"; before update {update}: {number(difference)}, they drift apart"
            return row(6, False, evidence, difference=difference)
    return row(6, equal is not None, evidence, difference=starts[start])


def _broadcasts(record: Record) -> list[Call]:
    """Return the rank's calls that broadcast all parameters; else those before the second update.

    Broadcasts of single values may be parameters.
    """
    whole = [call for call in record.calls if call.name in WHOLE]
    early = [call for call in record.calls if call.values and call.update <= 1]
    return whole or [call for call in early if call.name != STATE]


def _is_complete(calls: list[Call], record: Record) -> bool:
    """Return whether the ``_broadcasts`` of a rank are of all parameters."""
    values = sum(call.values for call in calls)
    return any(call.name in WHOLE for call in calls) or values >= record.updates[0].values


def _difference(ranks: Sequence[Values]) -> float:
    """Return the largest difference of the parameters to rank 0; inf if only digests differ."""
    if all(rank.digest == ranks[0].digest for rank in ranks):
        return 0.0
    samples = [np.array(rank.sample) for rank in ranks]
    difference = max(float(np.max(np.abs(s - samples[0]), initial=0)) for s in samples)
    return difference or math.inf
