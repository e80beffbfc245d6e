"""The eight rows, from what all ranks noted about a script: pure functions of JSON values.

``everyone`` holds one record per rank, by rank (see ``record.py``); only ranks that wrote one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from hvdtrain.commands.verify.check_ranks import judge_devices
from hvdtrain.commands.verify.rows import NOT_SEEN, OK, Row, by_rank, row
from hvdtrain.commands.verify.script.judge_updates import (
    equal_start,
    is_unscaled,
    learning_rate,
    mean_gradient,
)
from hvdtrain.commands.verify.script.record import OURS, SAME, Noted
from hvdtrain.commands.verify.script.samples import first_epoch, on_several, repeated
from hvdtrain.system.output.text import plural, rank_list

FEW = 3  # samples on two ranks that may be chance: data has duplicates. And a sampler may pad
ADASUM = "Adasum adds the ranks' steps by a rule of its own, with the rate of one rank"
NO_INIT = "Horovod has not been initialized"  # in its own words
EXPECTED = 5.0  # samples that would be on two ranks if they were drawn without shards
COVERED = 0.9  # of what one rank alone sees: tails of batches may be dropped


def rows(everyone: Sequence[Noted], alone: Noted | None = None) -> list[Row]:
    """Return all eight rows; ``alone``: what one rank alone noted, to compare with."""
    gradient = mean_gradient(everyone, alone, unscaled=is_unscaled(everyone, alone))
    rate = learning_rate(everyone, alone, summed=gradient.facts.get("summed", False))
    if any(call.get("adasum") for record in everyone for call in record["calls"]):
        rate, gradient = (Row(step, NOT_SEEN, ADASUM) for step in (rate.step, gradient.step))
    return [
        one_world(everyone),
        devices(everyone),
        shards(everyone, alone),
        rate,
        gradient,
        equal_start(everyone),
        one_writer(everyone),
        metrics(everyone),
    ]


def one_world(everyone: Sequence[Noted]) -> Row:
    """Judge step 1: Horovod's ranks are the launcher's."""
    worlds = [record["world"] for record in everyone]
    started = everyone[0]["launcher"][2]
    told = f"{everyone[0]['launcher'][0]} started {started}" if started > 1 else "one process"
    without = [rank for rank, world in enumerate(worlds) if world is None]
    # Where the ranks end together, mpirun may kill one before it can tell.
    if any(NO_INIT in (everyone[rank]["ended"] or "") for rank in without):
        return row(1, False, f"{told}, and hvd.init() was not called before Horovod was needed")
    if without:
        if started == 1 or any(everyone[rank]["updates"] == [] for rank in without):
            return Row(1, NOT_SEEN, f"hvd.init() was not reached on {rank_list(without)}")
        return row(1, False, f"hvd.init() was not called on {rank_list(without)}; {told}")
    sizes, ranks = [w["size"] for w in worlds], [w["rank"] for w in worlds]
    holds = set(sizes) == {started} and sorted(ranks) == list(range(started))
    by_host: dict[str, list[int]] = {}
    for record in everyone:
        by_host.setdefault(record["host"], []).append(record["world"]["local_rank"])
    local = all(sorted(ranks) == list(range(len(ranks))) for ranks in by_host.values())
    hosts = ", ".join(f"{len(ranks)} on {host}" for host, ranks in by_host.items())
    if not holds:
        seen = "; ".join(f"rank {w['rank']} of {w['size']}" for w in worlds[:4])
        return row(1, False, f"Horovod says {seen}; {told}")
    if not local:
        return row(1, False, f"local ranks {by_host}; {told}")
    known = f"{rank_list(ranks)} once each, {hosts}; {told}" if started > 1 else told
    return row(1, True, known, ranks=started)


def devices(everyone: Sequence[Noted]) -> Row:
    """Judge step 2, once the script has made an update."""
    if any(record["processor"] is None for record in everyone):
        return Row(2, NOT_SEEN, "no update was made")
    found = judge_devices(
        [{**one["processor"], "host": f"{one['host']} ", "cores": one["cores"]} for one in everyone]
    )
    asked = [call for call in everyone[0]["calls"] if call["name"] == "torch.set_num_threads"]
    if found.state == OK or not asked:
        return found
    own = f"the script itself calls {asked[-1]['name']}({asked[-1]['threads']})"
    return replace(found, evidence=f"{found.evidence}; {own}")


def shards(everyone: Sequence[Noted], alone: Noted | None) -> Row:
    """Judge step 3, from the calls that shard, from loaders, and from the samples themselves."""
    size = len(everyone)
    if size == 1:
        return Row(3, NOT_SEEN, "one rank: nothing to share out")
    found = [shard for record in everyone if (shard := _shard_of(record))]
    seen = first_epoch(everyone)
    whole = first_epoch([alone])[0] if alone else []
    union = set[str]().union(*seen)
    if not union and len(found) < size:
        return Row(3, NOT_SEEN, "no training sample was seen")
    twins = on_several(seen) & repeated(whole)  # the data has them several times
    if len(repeated(whole)) > (1 - COVERED) * len(set(whole)):  # no, one rank draws them so
        twins = set()
    shared = len(on_several(seen) - twins)
    samples = f"{shared} of {len(union):,} samples seen were on more than one rank"
    if twins:
        samples += f" ({len(twins)} more that the data has several times)"
    apart = len({rank for _, rank, _ in found}) == size and {n for n, _, _ in found} == {size}
    if len(found) == size and not apart:
        told = ", ".join(f"{rank} of {n}" for n, rank, _ in found)
        return row(3, False, f"the ranks ask for shards {told}; {samples}", shared=shared)
    if shared > FEW + size - 1:
        return row(3, False, samples, shared=shared)
    if order := _one_order(everyone):
        return row(3, False, order)
    if len(found) == size:
        return row(3, True, f"{found[0][2]} gives {size} shards; {samples}", shared=shared)
    return _covering(seen, whole, samples) or _unsharded(everyone, seen, samples)


def _shard_of(record: Noted) -> tuple[int, int, str] | None:
    """Return which shard the rank asked for: of how many, which one, by what."""
    for call in record["calls"]:
        if "shards" in call and call["shards"] is not None:
            return call["shards"], call["shard"], call["name"]
    loader = record["loader"]
    if loader and loader["replicas"]:
        return loader["replicas"], loader["rank"], loader["sampler"]
    return None


def _one_order(everyone: Sequence[Noted]) -> str:
    """Say that a sampler which shuffles did so alike in two epochs; empty if none did."""
    for record in everyone:
        loader = record["loader"] or {"epochs": []}
        begun = [*loader["epochs"], [None, record["done"]]]
        trained = [order for (order, at), (_, end) in pairwise(begun) if end > at]
        for epoch, (one, other) in enumerate(pairwise(trained), start=2):
            if one == other:
                name = loader["sampler"]
                return (
                    f"epoch {epoch} of the training goes through the samples in the order of the "
                    f"one before: call set_epoch(epoch) of the {name} before each epoch"
                )
    return ""


def _covering(seen: Sequence[list[str]], whole: list[str], samples: str) -> Row | None:
    """Return the row if the ranks together saw what one alone does; None where unknown."""
    if not whole:
        return None
    all_of_it, own = set(whole), [set(marks) for marks in seen]
    by_chance = math.prod(map(len, own[:2])) / len(all_of_it)
    union = set.union(*own)
    covered = len(union & all_of_it)
    if covered < COVERED * max(len(all_of_it), len(union)) or by_chance < EXPECTED:
        return None
    told = f"{by_rank([f'{len(marks):,}' for marks in seen])} samples, "
    told += "all" if covered == len(all_of_it) else f"{covered:,} of the {len(all_of_it):,}"
    return row(3, True, f"{told} that one rank alone sees; {samples}")


def _unsharded(everyone: Sequence[Noted], seen: Sequence[list[str]], samples: str) -> Row:
    """Judge where no call that shards was seen: each rank may still have data of its own."""
    loaders = [record["loader"] for record in everyone]
    known = [loader for loader in loaders if loader and loader["samples"]]
    if len(known) == len(everyone):
        whole = all(loader["drawn"] == loader["samples"] for loader in known)
        probes = {tuple(loader["probes"] or [str(rank)]) for rank, loader in enumerate(known)}
        if whole and len(probes) == 1:
            count = known[0]["samples"]
            return row(3, False, f"every rank draws from the same {count:,} samples; {samples}")
        own = [len(set(marks)) for marks in seen]
        if math.prod(own[:2]) / known[0]["samples"] >= EXPECTED:
            return row(3, True, f"data of its own on each rank; {samples}")
    return Row(3, NOT_SEEN, f"no sampler and no shard call; {samples}")


def one_writer(everyone: Sequence[Noted]) -> Row:
    """Judge step 7: no file is written by two ranks."""
    writers: dict[str, list[int]] = {}
    for rank, record in enumerate(everyone):
        for path in record["written"]:
            writers.setdefault(path, []).append(rank)
    if not writers:
        return Row(7, NOT_SEEN, f"no file was written in {_updates(everyone)}")
    several_times = {path: ranks for path, ranks in writers.items() if len(ranks) > 1}
    if several_times:
        path, ranks = next(iter(several_times.items()))
        more = f" and {len(several_times) - 1} more" if len(several_times) > 1 else ""
        return row(7, False, f"{rank_list(ranks)} wrote {path}{more}")
    told = "; ".join(
        f"rank {rank} wrote {plural(len(record['written']), 'file')}"
        for rank, record in enumerate(everyone)
        if record["written"]
    )
    return row(7, True, f"{told}, none twice: {next(iter(writers))}", files=len(writers))


def metrics(everyone: Sequence[Noted]) -> Row:
    """Judge step 8: values were reduced over the ranks, and are the same on all."""
    found = [_metrics(record) for record in everyone]
    if not any(found):
        return Row(8, NOT_SEEN, f"no metric was reduced in {_updates(everyone)}")
    missing = [rank for rank, values in enumerate(found) if not values]
    if missing and all(everyone[rank]["ended"] is None for rank in missing):
        return Row(
            8, NOT_SEEN, f"{rank_list(missing)} had to end before any metric was reduced there"
        )
    if missing:
        return row(8, False, f"metrics are reduced, but not on {rank_list(missing)}")
    for values in zip(*found, strict=False):
        name, _, after = values[0]
        if any(not _close(other[2], after) for other in values):
            told = by_rank([_first(value[2]) for value in values], ", ")
            return row(8, False, f"{name} is {told} by rank after the reduction")
    name, _, after = found[0][0]
    before = by_rank([_first(values[0][1]) for values in found], ", ")
    told = f"{name}: {before} by rank, {_first(after)} on all after the reduction"
    if not everyone[0]["hvdtrain"]:
        told += "; a mean of means is right where all ranks count the same samples"
    return row(8, True, told, reductions=min(map(len, found)))


def _metrics(record: Noted) -> list[Any]:
    if record["hvdtrain"]:  # what its adapters reduce otherwise is none of the script's
        return [metric for metric in record["metrics"] if metric[0].startswith(OURS)]
    return list(record["metrics"])


def _first(values: list[float]) -> str:
    return f"{values[0]:g}" if values else "nothing"  # a rank may gather nothing


def _close(one: list[float], other: list[float]) -> bool:
    return len(one) == len(other) and all(
        math.isclose(a, b, rel_tol=SAME, abs_tol=1e-12) or (math.isnan(a) and math.isnan(b))
        for a, b in zip(one, other, strict=True)
    )


def _updates(everyone: Sequence[Noted]) -> str:
    return plural(min(record["done"] for record in everyone), "update")
