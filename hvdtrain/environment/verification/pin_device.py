"""Step 2, devices: a GPU for each rank, or threads that fill the cores of a host at most once."""

from __future__ import annotations

import os
from dataclasses import asdict

from hvdtrain.environment.verification.bench import Bench, Facts, Processor
from hvdtrain.environment.verification.initialize import host_name
from hvdtrain.environment.verification.rows import Row, by_rank, row, several

STEP = 2


def measure(bench: Bench) -> Facts:
    """Pin, then ask the framework what it computes on."""
    bench.adapter.pin_device()
    return here(bench.kit.processor())


def here(processor: Processor) -> Facts:
    """What this rank computes on, and which cores it may use."""
    cores = sorted(os.sched_getaffinity(0))
    return {"host": host_name(), "cores": cores, **asdict(processor)}


def judge(everyone: list[Facts]) -> Row:
    """No GPU twice; threads no more than cores, and one a rank where ranks outnumber them."""
    by_host: dict[str, list[Facts]] = {}
    for facts in everyone:
        by_host.setdefault(facts["host"], []).append(facts)
    found = {host: _host(ranks) for host, ranks in by_host.items()}
    told: dict[str, list[str]] = {}
    for host, (_, text) in found.items():
        told.setdefault(text, []).append(host.split()[0])
    evidence = "; ".join(f"{', '.join(hosts)}: {text}" for text, hosts in told.items())
    return row(STEP, all(good for good, _ in found.values()), evidence, hosts=len(found))


def _host(ranks: list[Facts]) -> tuple[bool, str]:
    """Whether the ranks of one host share nothing that they should not, and what they use."""
    gpus = [facts["gpu"] for facts in ranks if facts["gpu"] is not None]
    if gpus:
        text = f"{several(len(set(gpus)), 'GPU')} for {several(len(ranks), 'rank')}"
        if len(gpus) < len(ranks):
            text += f", {len(ranks) - len(gpus)} of them on the CPU"
        return len(set(gpus)) == len(ranks), text
    cores = len(set().union(*(facts["cores"] for facts in ranks)))
    threads = [facts["threads"] for facts in ranks]
    each = "" if len(threads) == 1 else f"{by_rank(threads)} = "
    text = f"{each}{several(sum(threads), 'thread')} on {several(cores, 'core')}"
    if len(ranks) > cores:
        text += f" for {several(len(ranks), 'rank')}"
    return sum(threads) <= max(cores, len(ranks)), text
