"""Judge a script by the records of all ranks, in eight rows: pure functions.

``records`` are by rank, of the ranks that wrote one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import combinations, pairwise

import numpy as np

from hvdtrain.commands.verify.check_ranks import judge_devices, judge_world, true_world
from hvdtrain.commands.verify.rows import FAILED, OK, StepRow, by_rank, not_seen, number, row
from hvdtrain.commands.verify.script.judge_gradients import mean_gradient, updates_by_rank
from hvdtrain.commands.verify.script.judge_rate import learning_rate
from hvdtrain.commands.verify.script.record import (
    AVERAGED,
    OURS,
    SAME,
    TO_ONE,
    Call,
    MetricReduction,
    Record,
    Records,
    Values,
)
from hvdtrain.commands.verify.script.samples import first_epoch, on_several, repeated
from hvdtrain.commands.verify.script.watch_distributed import DDP
from hvdtrain.system.output.text import plural, rank_list

MAX_SHARED = 3  # samples that two ranks may share by chance: data have duplicates, samplers pad
ADASUM = "Adasum combines the ranks' steps by another rule, at the learning rate of one rank"
# Messages of Horovod and of PyTorch.
NO_INIT = ("Horovod has not been initialized", "Default process group has not been initialized")
EXPECTED = 5.0  # samples expected on several ranks if they were drawn without shards
COVERED = 0.9  # of the samples of a run on one rank: incomplete batches may be dropped
DRIFT = 1e-3  # relative difference of parameters between ranks that counts as none
NO_BROADCAST = "no broadcast was executed"
STATE = "broadcast_optimizer_state"
# Calls after which all parameters are those of rank 0, or parts of one copy of them.
WHOLE = {"broadcast_global_variables", "broadcast_state", DDP, "fully_shard"}


def rows(records: Records, single_rank: Record | None = None) -> list[StepRow]:
    """Return all eight rows; ``single_rank``: the record of a run on one rank, to compare with."""
    gradient = mean_gradient(records, single_rank)
    summed, divided = (gradient.facts.get(name, False) for name in ("summed", "divided"))
    rate = learning_rate(records, single_rank, summed=summed, divided=divided)
    if any(record.adasum for record in records):
        rate, gradient = (not_seen(4, ADASUM), not_seen(5, ADASUM))
    states = (rate.state, gradient.state)  # from these differences of parameters follow
    return [
        world(records),
        devices(records),
        shards(records, single_rank),
        rate,
        gradient,
        equal_start(records, drifts=records[0].distributed and FAILED not in states),
        writers(records),
        metrics(records),
    ]


def world(records: Records) -> StepRow:
    """Judge step 1: the world of Horovod or torch.distributed is the launcher's."""
    started = records[0].started
    launch = f"{records[0].launcher} started {started}" if started > 1 else "one process"
    without = [rank for rank, record in enumerate(records) if record.world is None]
    by_torch = any(record.distributed for record in records)
    call = "init_process_group()" if by_torch else "hvd.init()"
    # If the ranks fail together, mpirun may kill one before it has recorded the error.
    if any(words in (records[rank].ended or "") for rank in without for words in NO_INIT):
        library = "torch.distributed" if by_torch else "Horovod"
        return row(1, False, f"{launch}, and {call} was not called before {library} was used")
    if without:
        if started == 1 or not all(records[rank].updates for rank in without):
            return not_seen(1, f"{call} was not reached on {rank_list(without)}")
        return row(1, False, f"{call} was not called on {rank_list(without)}; {launch}")
    hosts = [f"{record.host} " for record in records]
    facts = []
    for rank, record in enumerate(records):
        claimed = asdict(true_world(rank, hosts)) | vars(record.world)
        launcher = [record.launcher, rank, record.started]
        identity = {"host": hosts[rank], "process": rank, "strategy": "horovod"}
        facts.append({"claimed": claimed, "launcher": launcher, **identity})
    return replace(judge_world(facts), facts={"ranks": started})


def devices(records: Records) -> StepRow:
    """Judge step 2, if the script has made an update."""
    used = []
    for record in records:
        if record.processor is None:
            return not_seen(2, "no update was made")
        gpu, threads = record.processor
        facts = {"host": f"{record.host} ", "cores": record.cores, "gpu": gpu, "threads": threads}
        used.append(facts)
    result = judge_devices(used)
    calls = [call for call in records[0].calls if call.threads is not None]
    if result.state == OK or not calls:
        return result
    cause = f"the script calls {calls[-1].name}({calls[-1].threads})"
    return replace(result, evidence=f"{result.evidence}; {cause}")


def shards(records: Records, single_rank: Record | None) -> StepRow:
    """Judge step 3, from calls that shard, from loaders, and from the samples."""
    size = len(records)
    if size == 1:
        return not_seen(3, "one rank: nothing to shard")
    requested = [shard for record in records if (shard := _shard_of(record))]
    seen = first_epoch([record.seen for record in records])
    whole = first_epoch([single_rank.seen])[0] if single_rank else []
    union = set[str]().union(*seen)
    if not union and len(requested) < size:
        return not_seen(3, "no training sample was seen")
    duplicates = on_several(seen) & repeated(whole)  # in the data
    if len(repeated(whole)) > (1 - COVERED) * len(set(whole)):  # not in the data: drawn repeatedly
        duplicates = set()
    repeats = on_several(seen) - duplicates
    shared = len(repeats & on_several(_before_last_update(records, seen)))
    samples = f"{len(repeats)} of {len(union):,} samples seen were on more than one rank"
    if shared < len(repeats):  # libraries fill it with samples of the first
        samples += f", {len(repeats) - shared} only in the last update of one"
    if duplicates:
        samples += f" (and {len(duplicates)} duplicates in the data)"
    distinct = len({shard[1] for shard in requested}) == size
    if len(requested) == size and not (distinct and {shard[0] for shard in requested} == {size}):
        names = ", ".join(f"{shard} of {count}" for count, shard, _ in requested)
        return row(3, False, f"the ranks request shards {names}; {samples}", shared=shared)
    if shared > MAX_SHARED + size - 1:
        return row(3, False, samples, shared=shared)
    if order := _equal_order(records):
        if not records[0].distributed:
            return row(3, False, order)
        samples += f"; note: {order}"
    if len(requested) == size:
        evidence = f"{requested[0][2]} gives {size} shards; {samples}"
        fixed = [record.loader for record in records if record.loader and record.loader.fixed]
        if len({tuple(loader.probes or []) for loader in fixed}) > 1:
            reason = "the dataset has another sample on each rank at the same index"
            return not_seen(3, f"{evidence}; {reason}")
        if _are_trained(records) or _by_chance(seen, _dataset_size(seen, single_rank)) >= EXPECTED:
            return row(3, True, evidence, shared=shared)
        more = "; use --updates all" if records[0].ended == "updates" else ""
        return not_seen(3, f"{evidence}, too few to show that these shards are trained on{more}")
    return _covering(seen, whole, samples) or _unsharded(records, seen, samples)


def _before_last_update(records: Records, seen: Sequence[list[str]]) -> list[list[str]]:
    """Return the samples without the last update of each rank, unless it is the only one."""
    last = [len((record.seen.by_update() or [[]])[-1]) for record in records]
    return [
        marks[:-count] if 0 < count < len(marks) else marks
        for marks, count in zip(seen, last, strict=True)
    ]


def _shard_of(record: Record) -> tuple[int, int, str] | None:
    """Return the shard that the rank requests: number of shards, index, and function."""
    for call in record.calls:
        if call.shards is not None and call.shard is not None:
            return call.shards, call.shard, call.name
    loader = record.loader
    if loader and loader.replicas and loader.rank is not None:
        return loader.replicas, loader.rank, loader.sampler
    return None


def _are_trained(records: Records) -> bool:
    """Return whether the shards are a sampler's; a call may shard the validation set only."""
    return all(record.loader and record.loader.replicas == len(records) for record in records)


def _dataset_size(seen: Sequence[list[str]], single_rank: Record | None) -> float:
    """Return the number of samples that one rank draws from; infinite if nothing shows it.

    If it has not drawn them all, their number follows from those that a rank has in common with it,
    of the rank with the fewest (capture and recapture).
    """
    if single_rank is None:
        return math.inf
    whole = set(first_epoch([single_rank.seen])[0])
    if single_rank.seen.epoch is not None or single_rank.ended not in (None, "updates"):
        return len(whole) or math.inf
    common = min(len(whole.intersection(marks)) / max(1, len(set(marks))) for marks in seen)
    return len(whole) / common if common else math.inf


def _by_chance(seen: Sequence[list[str]], samples: float) -> float:
    """Return how many of the samples seen several ranks would share if each drew from all."""
    counts = [len(set(marks)) for marks in seen]
    return sum(math.prod(pair) for pair in combinations(counts, 2)) / samples


def _equal_order(records: Records) -> str:
    """Return a message if a sampler shuffled two epochs equally; empty if none did."""
    for loader, done in ((record.loader, record.done) for record in records):
        if loader is None:
            continue
        epochs = [*loader.epochs, (None, done)]
        trained = [order for (order, begin), (_, end) in pairwise(epochs) if end > begin]
        for epoch, (previous, order) in enumerate(pairwise(trained), start=2):
            if order == previous:
                return (
                    f"epoch {epoch} has the same order of samples as the epoch before: call "
                    f"set_epoch(epoch) of the {loader.sampler} before each epoch"
                )
    return ""


def _covering(seen: Sequence[list[str]], whole: list[str], samples: str) -> StepRow | None:
    """Return the row if the ranks together saw the samples of one rank; None if unknown."""
    if not whole:
        return None
    dataset, union = set(whole), set[str]().union(*seen)
    covered = len(union & dataset)
    if covered < COVERED * max(len(dataset), len(union)):
        return None
    if _by_chance(seen, len(dataset)) < EXPECTED:
        return None
    evidence = f"{by_rank([f'{len(marks):,}' for marks in seen])} samples, "
    evidence += "all" if covered == len(dataset) else f"{covered:,} of the {len(dataset):,}"
    return row(3, True, f"{evidence} that a single rank sees; {samples}")


def _unsharded(records: Records, seen: Sequence[list[str]], samples: str) -> StepRow:
    """Judge step 3 without a call that shards: the ranks may still have different data."""
    loaders = [record.loader for record in records]
    known = [loader for loader in loaders if loader and loader.samples]
    if len(known) == len(records):
        whole = all(loader.drawn == loader.samples for loader in known)
        probes = {tuple(loader.probes or [str(rank)]) for rank, loader in enumerate(known)}
        samples_each = known[0].samples or 1
        if whole and len(probes) == 1:
            evidence = f"every rank draws from the same {samples_each:,} samples; {samples}"
            return row(3, False, evidence)
        if _by_chance(seen, samples_each) >= EXPECTED:
            return row(3, True, f"different data on each rank; {samples}")
    return not_seen(3, f"no sampler and no shard call; {samples}")


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
    steps = [[update.before for update in step] for step in updates_by_rank(records)]
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
        if DRIFT * scale < difference < math.inf:  # infinite: only digests differ
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


def writers(records: Records) -> StepRow:
    """Judge step 7: no file is written by two ranks."""
    by_path: dict[str, list[int]] = {}
    for rank, record in enumerate(records):
        for path in record.written:
            by_path.setdefault(path, []).append(rank)
    if not by_path:
        return not_seen(7, f"no file was written in {_updates(records)}")
    shared = {path: ranks for path, ranks in by_path.items() if len(ranks) > 1}
    if shared:
        path, ranks = next(iter(shared.items()))
        more = f" and {plural(len(shared) - 1, 'other file')}" if len(shared) > 1 else ""
        return row(7, False, f"{rank_list(ranks)} wrote {path}{more}")
    counts = ", ".join(
        f"{plural(len(record.written), 'file')} by rank {rank}"
        for rank, record in enumerate(records)
        if record.written
    )
    evidence = f"no file was written by two ranks: {counts}, e.g. {next(iter(by_path))}"
    return row(7, True, evidence, files=len(by_path))


def metrics(records: Records) -> StepRow:
    """Judge step 8: values were reduced that differ between the ranks, and then are equal on all.

    Equal values show nothing: an allreduce of a constant is a barrier.
    """
    reduced = [_metrics(record) for record in records]
    if not any(reduced):
        return not_seen(8, f"no metric was reduced in {_updates(records)}")
    missing = [rank for rank, values in enumerate(reduced) if not values]
    if missing and all(records[rank].ended is None for rank in missing):
        return not_seen(8, f"{rank_list(missing)} ended before reducing a metric")
    if missing:
        return row(8, False, f"metrics are reduced, but not on {rank_list(missing)}")
    if counted := sum(record.stand_ins_counted for record in records):
        evidence = f"{AVERAGED} counts {plural(counted, 'stand-in')} of empty parts as samples"
        return row(8, False, f"{evidence}: count part.count, not the length of the batch")
    reductions = list(zip(*reduced, strict=False))
    for metrics in reductions:
        results = [metric.after for metric in metrics if metric.after or metric.name not in TO_ONE]
        if any(not _close(values, results[0]) for values in results):
            by_ranks = by_rank([_first(values) for values in results], ", ")
            return row(8, False, f"{metrics[0].name} is {by_ranks} by rank after the reduction")
    different = [
        metrics
        for metrics in reductions
        if any(not _close(metric.before, metrics[0].before) for metric in metrics)
    ]
    if not different and len(records) > 1:
        return not_seen(8, "the values that were reduced were equal on all ranks before, too")
    metrics = (different or reductions)[0]
    metric = metrics[0]
    before = by_rank([_first(metric.before) for metric in metrics], ", ")
    after = max((values.after for values in metrics), key=len)
    where = "one rank" if metric.name in TO_ONE else "all"
    evidence = f"{metric.name}: {before} by rank, {_first(after)} on {where} after the reduction"
    if not records[0].hvdtrain:
        evidence += "; a mean of means is correct only for equal numbers of samples"
    return row(8, True, evidence, reductions=len(reductions))


def _metrics(record: Record) -> list[MetricReduction]:
    if record.hvdtrain:  # its adapters also reduce other values
        return [metric for metric in record.metrics if metric.name.startswith(OURS)]
    return record.metrics


def _first(values: list[float]) -> str:
    return f"{values[0]:g}" if values else "none"  # a rank may gather no value


def _close(left: list[float], right: list[float]) -> bool:
    return len(left) == len(right) and all(
        math.isclose(a, b, rel_tol=SAME, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(left, right, strict=True)
    )


def _updates(records: Records) -> str:
    return plural(min(record.done for record in records), "update")
