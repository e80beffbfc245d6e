"""Check who computes what: the world (1), devices (2), shards (3), metrics over them (8)."""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from dataclasses import asdict

from hvdtrain.commands.verify.harness import Bench, Facts
from hvdtrain.commands.verify.rows import Row, by_rank, number, row
from hvdtrain.steps.integrity import BOOT_ID
from hvdtrain.steps.sharding import evaluation_parts
from hvdtrain.steps.world import World
from hvdtrain.system.output.text import plural, rank_list
from hvdtrain.system.runtime.detect import detect

EXACT = 1e-12  # relative


def host_name() -> str:
    """Return the name of this host, with what tells it from another one of the same name."""
    return f"{socket.gethostname()} {BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ''}"


def true_world(rank: int, hosts: list[str]) -> World:
    """Return the world of ``rank``, counted from the hosts of all ranks."""
    mine = hosts[rank]  # as ``host_name`` has it
    return World(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(mine),
        local_size=hosts.count(mine),
        host=mine.split()[0],
        hosts=len(set(hosts)),
    )


def measure_world(bench: Bench) -> Facts:
    """Return the world of ``initialize``, the launcher's, and which process this really is."""
    place = detect(os.environ)
    return {
        "claimed": asdict(bench.claimed),
        "strategy": bench.adapter.name,
        "launcher": [place.launcher, place.rank, place.size],
        "host": host_name(),
        "process": os.getpid(),
    }


def judge_world(everyone: list[Facts]) -> Row:
    """Judge step 1: each world is the true one, each process another, the launcher agrees."""
    hosts = [facts["host"] for facts in everyone]
    size = len(everyone)
    wrong = [
        f"rank {rank} believes it is {told['rank']} of {told['size']} (local {told['local_rank']} "
        f"of {told['local_size']}, {plural(told['hosts'], 'host')})"
        for rank, facts in enumerate(everyone)
        if (told := facts["claimed"]) != asdict(true_world(rank, hosts))
    ]
    processes = {(facts["host"], facts["process"]) for facts in everyone}
    if len(processes) != size:
        wrong.append(f"{plural(size, 'rank')} are {len(processes)} processes")
    launchers = [facts["launcher"] for facts in everyone]
    if sorted(place[1] for place in launchers) != list(range(size)):
        wrong.append(f"the launcher numbers them {', '.join(str(p[1]) for p in launchers)}")
    if any(place[2] != size for place in launchers):
        wrong.append(f"{launchers[0][0]} started {launchers[0][2]}")
    by_host = ", ".join(
        f"{count} on {host}" for host, count in Counter(h.split()[0] for h in hosts).items()
    )
    started = f"{launchers[0][0]} started {size}" if launchers[0][0] else "no launcher"
    evidence = f"{rank_list(range(size))} once each, {by_host}; {started}"
    if size == 1:
        evidence = f"one process on {hosts[0].split()[0]}; {started}"
    if wrong:
        evidence = f"{'; '.join(wrong[:3])}; truly {evidence}"
    strategy = everyone[0]["strategy"]
    return row(
        1, not wrong, evidence, strategy=strategy, ranks=size, hosts=len(set(hosts)), wrong=wrong
    )


def measure_devices(bench: Bench) -> Facts:
    """Pin, then ask the framework what it computes on."""
    bench.adapter.pin_device()
    cores = sorted(os.sched_getaffinity(0))
    return {"host": host_name(), "cores": cores, **asdict(bench.kit.processor())}


def judge_devices(everyone: list[Facts]) -> Row:
    """Judge step 2: no GPU twice; no more threads than cores, or one per rank, if more."""
    by_host: dict[str, list[Facts]] = {}
    for facts in everyone:
        by_host.setdefault(facts["host"], []).append(facts)
    found = {host: _host(ranks) for host, ranks in by_host.items()}
    told: dict[str, list[str]] = {}
    for host, (_, text) in found.items():
        told.setdefault(text, []).append(host.split()[0])
    evidence = "; ".join(f"{', '.join(hosts)}: {text}" for text, hosts in told.items())
    return row(2, all(good for good, _ in found.values()), evidence, hosts=len(found))


def _host(ranks: list[Facts]) -> tuple[bool, str]:
    """Return whether the ranks of one host share nothing that they must not, and what they use."""
    gpus = [facts["gpu"] for facts in ranks if facts["gpu"] is not None]
    if gpus:
        text = f"{plural(len(set(gpus)), 'GPU')} for {plural(len(ranks), 'rank')}"
        if len(gpus) < len(ranks):
            text += f", {len(ranks) - len(gpus)} of them on the CPU"
        return len(set(gpus)) == len(ranks), text
    cores = len(set().union(*(facts["cores"] for facts in ranks)))
    threads = [facts["threads"] for facts in ranks]
    each = "" if len(threads) == 1 else f"{by_rank(threads)} = "
    text = f"{each}{plural(sum(threads), 'thread')} on {plural(cores, 'core')}"
    if len(ranks) > cores:
        text += f" for {plural(len(ranks), 'rank')}"
    return sum(threads) <= max(cores, len(ranks)), text


# Step 3, shards: over all ranks every sample exactly once per epoch, in equally many steps.

DRAWN = 2  # epochs


def measure_shards(bench: Bench) -> Facts:
    """Draw two epochs of a dataset that neither the batch nor the ranks divide."""
    size = bench.size
    batch = 3 * size + 1
    samples = 2 * batch + max(1, size - 1)  # the last step leaves a rank without any
    shards = bench.adapter.shard_data(samples, global_batch=batch, seed=7)
    epochs, told = [], True
    for epoch in range(DRAWN):
        steps = []
        for part in shards.epoch(epoch):
            steps.append(part.indices.tolist())
            told = told and bench.adapter.current_part is part
        epochs.append(steps)
    return {"samples": samples, "epochs": epochs, "told": told}


def judge_shards(everyone: list[Facts]) -> Row:
    """Judge step 3: each sample drawn once per epoch, over all ranks, in equally many steps."""
    samples, size = everyone[0]["samples"], len(everyone)
    wrong = []
    for epoch in range(DRAWN):
        drawn = [facts["epochs"][epoch] for facts in everyone]
        counts = Counter(index for steps in drawn for part in steps for index in part)
        twice = sum(1 for count in counts.values() if count > 1)
        missing = sum(1 for index in range(samples) if index not in counts)
        foreign = len(counts) + missing - samples
        if twice or missing or foreign:
            wrong.append(
                f"epoch {epoch}: {missing} of {plural(samples, 'sample')} on no rank, {twice} "
                f"more than once, {foreign} that do not exist"
            )
        if len({len(steps) for steps in drawn}) > 1:
            wrong.append(f"steps by rank: {', '.join(str(len(steps)) for steps in drawn)}")
    if not all(facts["told"] for facts in everyone):
        wrong.append("the adapter is not told which part is in hand, so it cannot weigh it")
    parts = [len(part) for facts in everyone for steps in facts["epochs"] for part in steps]
    evidence = "; ".join(wrong) or (
        f"each of {plural(samples, 'sample')} once in each of {DRAWN} epochs; "
        f"{plural(size, 'rank')}, {len(everyone[0]['epochs'][0])} steps, parts of {min(parts)} to "
        f"{max(parts)}"
    )
    return row(3, not wrong, evidence, samples=samples, ranks=size)


def loss_of(sample: int) -> float:
    """Return a value that no rank's average shares with another's."""
    return (sample + 0.5) ** 2 / 7


def is_correct(sample: int) -> int:
    """Return 1 for one sample in three."""
    return int(sample % 3 == 0)


def slices(size: int) -> list[list[int]]:
    """Return the samples of each rank's slice, cut by hand: the first rank has none."""
    ends = [2 * rank if size > 1 else 5 for rank in range(size)]
    return [list(range(sum(ends[:rank]), sum(ends[: rank + 1]))) for rank in range(size)]


def measure_metrics(bench: Bench) -> Facts:
    """Average over an evaluation set as the trainer cuts it, and over one with an empty slice."""
    total = 3 * bench.size + 1
    cut = [int(i) for p in evaluation_parts(total, 2, bench.rank, bench.size) for i in p]
    rounds = []
    for mine in (cut, slices(bench.size)[bench.rank]):
        loss, correct = math.fsum(map(loss_of, mine)), sum(map(is_correct, mine))
        means, count = bench.adapter.average_metrics(len(mine), loss=loss, accuracy=correct)
        told = {name: float(value) for name, value in means.items()}
        rounds.append({**told, "count": count, "mine": len(mine)})
    return {"rounds": rounds}


def judge_metrics(everyone: list[Facts]) -> Row:
    """Judge step 8: every rank has the means over all samples, and their number."""
    size = len(everyone)
    totals = (3 * size + 1, sum(map(len, slices(size))))
    off, wrong = 0.0, []
    rounds = list(zip(*(facts["rounds"] for facts in everyone), strict=True))  # by set, by rank
    for total, ranks in zip(totals, rounds, strict=True):
        loss = math.fsum(map(loss_of, range(total))) / total
        accuracy = sum(map(is_correct, range(total))) / total
        for rank, found in enumerate(ranks):
            difference = max(abs(found["loss"] / loss - 1), abs(found["accuracy"] - accuracy))
            off = max(off, math.inf if math.isnan(difference) else difference)
            if not difference <= EXACT:
                wrong.append(f"rank {rank}: loss {found['loss']:.6g}, not {loss:.6g}")
            elif found["count"] != total:
                wrong.append(f"rank {rank}: over {found['count']} samples, not {total}")
    cuts = ", ".join(by_rank([found["mine"] for found in ranks], "+") for ranks in rounds)
    evidence = (
        f"max difference to the whole set {number(off)}; {plural(size, 'rank')}, "
        f"{totals[0]} and {totals[1]} samples ({cuts})"
    )
    if wrong:
        evidence = f"{wrong[0]}; {evidence}"
    return row(8, not wrong, evidence, difference=off, samples=list(totals))
