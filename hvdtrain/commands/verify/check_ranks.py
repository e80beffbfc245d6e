"""Check how work is divided: world (1), devices (2), shards (3), metrics over all samples (8)."""

from __future__ import annotations

import math
import os
import socket
from collections import Counter
from dataclasses import asdict

from hvdtrain.commands.verify.probe import Facts, Probe
from hvdtrain.commands.verify.rows import StepRow, by_rank, number, row
from hvdtrain.steps.integrity import ALLOW, SHARED_GPU, accepted
from hvdtrain.steps.sharding import evaluation_parts
from hvdtrain.steps.world import World
from hvdtrain.system.machine.network import boot_id
from hvdtrain.system.output.text import plural, rank_list
from hvdtrain.system.runtime.detect import detect

EXACT = 1e-12  # relative


def host_name() -> str:
    """Return name and boot ID of this host; the boot ID distinguishes hosts of the same name."""
    return f"{socket.gethostname()} {boot_id()}"


def true_world(rank: int, hosts: list[str]) -> World:
    """Return the world of ``rank``, counted from the hosts of all ranks."""
    local = hosts[rank]  # as returned by ``host_name``
    return World(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(local),
        local_size=hosts.count(local),
        host=local.split()[0],
        hosts=len(set(hosts)),
    )


def measure_world(probe: Probe) -> Facts:
    """Return the world according to ``initialize`` and to the launcher, and the real process."""
    launch = detect(os.environ)
    return {
        "claimed": asdict(probe.claimed),
        "strategy": probe.adapter.name,
        "launcher": [launch.launcher, launch.rank, launch.size],
        "host": host_name(),
        "process": os.getpid(),
    }


def judge_world(all_ranks: list[Facts]) -> StepRow:
    """Judge step 1: each rank has the true world, its own process and the launcher's rank."""
    hosts = [facts["host"] for facts in all_ranks]
    size = len(all_ranks)
    wrong = [
        f"rank {rank} was initialized as rank {claimed['rank']} of {claimed['size']} (local rank "
        f"{claimed['local_rank']} of {claimed['local_size']}, {plural(claimed['hosts'], 'host')})"
        for rank, facts in enumerate(all_ranks)
        if (claimed := facts["claimed"]) != asdict(true_world(rank, hosts))
    ]
    processes = {(facts["host"], facts["process"]) for facts in all_ranks}
    if len(processes) != size:
        wrong.append(f"number of processes: {len(processes)} for {plural(size, 'rank')}")
    launchers = [facts["launcher"] for facts in all_ranks]
    if sorted(rank for _, rank, _ in launchers) != list(range(size)):
        wrong.append(f"launcher's ranks: {', '.join(str(rank) for _, rank, _ in launchers)}")
    if any(started != size for _, _, started in launchers):
        wrong.append(f"{launchers[0][0]} started {launchers[0][2]}")
    by_host = ", ".join(
        f"{count} on {host}" for host, count in Counter(h.split()[0] for h in hosts).items()
    )
    started = f"{launchers[0][0]} started {size}" if launchers[0][0] else "no launcher"
    evidence = f"{rank_list(range(size))} once each, {by_host}; {started}"
    if size == 1:
        evidence = f"one process on {hosts[0].split()[0]}; {started}"
    if wrong:
        evidence = f"{'; '.join(wrong[:3])}; actual: {evidence}"
    strategy = all_ranks[0]["strategy"]
    return row(
        1, not wrong, evidence, strategy=strategy, ranks=size, hosts=len(set(hosts)), wrong=wrong
    )


def measure_devices(probe: Probe) -> Facts:
    """Pin the device, then return the one that the framework reports."""
    probe.adapter.pin_device()
    gpu, threads = probe.processor()
    cores = sorted(os.sched_getaffinity(0))
    shares = SHARED_GPU in accepted(os.environ)
    return {
        "host": host_name(),
        "cores": cores,
        "gpu": gpu,
        "threads": threads,
        "shares": shares,
    }


def judge_devices(all_ranks: list[Facts]) -> StepRow:
    """Judge step 2: no GPU is shared; threads do not exceed cores, or one per rank if more.

    Ranks may share a GPU if the user allows it, as in a training.
    """
    by_host: dict[str, list[Facts]] = {}
    for facts in all_ranks:
        by_host.setdefault(facts["host"], []).append(facts)
    usage = {host: _host_usage(ranks) for host, ranks in by_host.items()}
    hosts_by_text: dict[str, list[str]] = {}
    for host, (_, text) in usage.items():
        hosts_by_text.setdefault(text, []).append(host.split()[0])
    evidence = "; ".join(f"{', '.join(hosts)}: {text}" for text, hosts in hosts_by_text.items())
    return row(2, all(holds for holds, _ in usage.values()), evidence, hosts=len(usage))


def _host_usage(ranks: list[Facts]) -> tuple[bool, str]:
    """Return whether the ranks of one host share no GPU or core, and the devices they use."""
    gpus = [facts["gpu"] for facts in ranks if facts["gpu"] is not None]
    if gpus:
        text = f"{plural(len(set(gpus)), 'GPU')} for {plural(len(ranks), 'rank')}"
        if len(gpus) < len(ranks):
            text += f", {len(ranks) - len(gpus)} of them on the CPU"
        elif len(set(gpus)) < len(gpus) and ranks[0]["shares"]:
            return True, f"{text} ({ALLOW}={SHARED_GPU})"
        return len(set(gpus)) == len(ranks), text
    cores = len(set().union(*(facts["cores"] for facts in ranks)))
    threads = [facts["threads"] for facts in ranks]
    each = "" if len(threads) == 1 else f"{by_rank(threads)} = "
    text = f"{each}{plural(sum(threads), 'thread')} on {plural(cores, 'core')}"
    if len(ranks) > cores:
        text += f" for {plural(len(ranks), 'rank')}"
    return sum(threads) <= max(cores, len(ranks)), text


# Step 3, shards: each sample on exactly one rank per epoch, the same number of steps on all.

DRAWN = 2  # epochs


def measure_shards(probe: Probe) -> Facts:
    """Draw two epochs of a dataset whose size is no multiple of the batch or of the ranks."""
    size = probe.size
    batch = 3 * size + 1
    samples = 2 * batch + max(1, size - 1)  # one rank has none in the last step
    shards = probe.adapter.shard_data(samples, global_batch=batch, seed=7)
    epochs, tracked = [], True
    for epoch in range(DRAWN):
        steps = []
        for part in shards.epoch(epoch):
            steps.append(part.indices[: part.count].tolist())  # without a stand-in
            tracked = tracked and probe.adapter.current_part is part
        epochs.append(steps)
    return {"samples": samples, "epochs": epochs, "tracked": tracked}


def judge_shards(all_ranks: list[Facts]) -> StepRow:
    """Judge step 3: over all ranks each sample is drawn once per epoch, in equally many steps."""
    samples, size = all_ranks[0]["samples"], len(all_ranks)
    wrong = []
    for epoch in range(DRAWN):
        drawn = [facts["epochs"][epoch] for facts in all_ranks]
        counts = Counter(index for steps in drawn for part in steps for index in part)
        repeated = sum(1 for count in counts.values() if count > 1)
        missing = sum(1 for index in range(samples) if index not in counts)
        foreign = len(counts) + missing - samples
        if repeated or missing or foreign:
            wrong.append(
                f"epoch {epoch}: {missing} of {plural(samples, 'sample')} not drawn, {repeated} "
                f"drawn more than once, {foreign} out of range"
            )
        if len({len(steps) for steps in drawn}) > 1:
            wrong.append(f"steps by rank: {', '.join(str(len(steps)) for steps in drawn)}")
    if not all(facts["tracked"] for facts in all_ranks):
        wrong.append("the adapter does not know the current part, so it cannot weight it")
    parts = [len(part) for facts in all_ranks for steps in facts["epochs"] for part in steps]
    evidence = "; ".join(wrong) or (
        f"each of {plural(samples, 'sample')} once in each of {DRAWN} epochs; "
        f"{plural(size, 'rank')}, {len(all_ranks[0]['epochs'][0])} steps, parts of {min(parts)} to "
        f"{max(parts)}"
    )
    return row(3, not wrong, evidence, samples=samples, ranks=size)


def loss_of(sample: int) -> float:
    """Return a loss whose averages differ from rank to rank."""
    return (sample + 0.5) ** 2 / 7


def is_correct(sample: int) -> int:
    """Return 1 for every third sample."""
    return int(sample % 3 == 0)


def slices(size: int) -> list[list[int]]:
    """Return the samples of each rank in an uneven split; the first of several has none."""
    ends = [2 * rank if size > 1 else 5 for rank in range(size)]
    return [list(range(sum(ends[:rank]), sum(ends[: rank + 1]))) for rank in range(size)]


def measure_metrics(probe: Probe) -> Facts:
    """Average over an evaluation set split as in the trainer, and over one with an empty slice."""
    total = 3 * probe.size + 1
    part = [int(i) for p in evaluation_parts(total, 2, probe.rank, probe.size) for i in p]
    rounds = []
    for local in (part, slices(probe.size)[probe.rank]):
        loss, correct = math.fsum(map(loss_of, local)), sum(map(is_correct, local))
        means, count = probe.adapter.average_metrics(len(local), loss=loss, accuracy=correct)
        averages = {name: float(value) for name, value in means.items()}
        rounds.append({**averages, "count": count, "local": len(local)})
    return {"rounds": rounds}


def judge_metrics(all_ranks: list[Facts]) -> StepRow:
    """Judge step 8: every rank has the means over all samples, and the number of samples."""
    size = len(all_ranks)
    totals = (3 * size + 1, sum(map(len, slices(size))))
    largest, wrong = 0.0, []
    rounds = list(zip(*(facts["rounds"] for facts in all_ranks), strict=True))  # by set, by rank
    for total, ranks in zip(totals, rounds, strict=True):
        loss = math.fsum(map(loss_of, range(total))) / total
        accuracy = sum(map(is_correct, range(total))) / total
        for rank, averages in enumerate(ranks):
            difference = max(abs(averages["loss"] / loss - 1), abs(averages["accuracy"] - accuracy))
            largest = max(largest, math.inf if math.isnan(difference) else difference)
            if not difference <= EXACT:
                wrong.append(f"rank {rank}: loss {averages['loss']:.6g}, expected {loss:.6g}")
            elif averages["count"] != total:
                wrong.append(f"rank {rank}: {averages['count']} samples, expected {total}")
    cuts = ", ".join(by_rank([averages["local"] for averages in ranks], "+") for ranks in rounds)
    evidence = (
        f"max difference to the whole set {number(largest)}; {plural(size, 'rank')}, "
        f"{totals[0]} and {totals[1]} samples ({cuts})"
    )
    if wrong:
        evidence = f"{wrong[0]}; {evidence}"
    return row(8, not wrong, evidence, difference=largest, samples=list(totals))
