"""Step 1, one world: every rank once, as many as the launcher started, rightly counted by host."""

from __future__ import annotations

import os
import socket
from collections import Counter
from dataclasses import asdict

from hvdtrain.environment.verification.bench import Bench, Facts
from hvdtrain.environment.verification.rows import Row, listed, row, several
from hvdtrain.launch.detect import detect
from hvdtrain.steps.integrity import BOOT_ID
from hvdtrain.steps.world import World

STEP = 1


def host_name() -> str:
    """The name of this host, with what tells it from another one of the same name."""
    return f"{socket.gethostname()} {BOOT_ID.read_text().strip() if BOOT_ID.is_file() else ''}"


def true_world(rank: int, hosts: list[str]) -> World:
    """The world of ``rank``, counted from the hosts of all ranks."""
    mine = hosts[rank]  # as ``host_name`` has it
    return World(
        rank=rank,
        size=len(hosts),
        local_rank=hosts[:rank].count(mine),
        local_size=hosts.count(mine),
        host=mine.split()[0],
        hosts=len(set(hosts)),
    )


def measure(bench: Bench) -> Facts:
    """What ``initialize`` told, what the launcher says, and which process this really is."""
    place = detect(os.environ)
    return {
        "claimed": asdict(bench.claimed),
        "strategy": bench.adapter.name,
        "launcher": [place.launcher, place.rank, place.size],
        "host": host_name(),
        "process": os.getpid(),
    }


def judge(everyone: list[Facts]) -> Row:
    """Each world is the true one, each process another, and the launcher agrees."""
    hosts = [facts["host"] for facts in everyone]
    size = len(everyone)
    wrong = [
        f"rank {rank} believes it is {told['rank']} of {told['size']} (local {told['local_rank']} "
        f"of {told['local_size']}, {several(told['hosts'], 'host')})"
        for rank, facts in enumerate(everyone)
        if (told := facts["claimed"]) != asdict(true_world(rank, hosts))
    ]
    processes = {(facts["host"], facts["process"]) for facts in everyone}
    if len(processes) != size:
        wrong.append(f"{several(size, 'rank')} are {len(processes)} processes")
    launchers = [facts["launcher"] for facts in everyone]
    if sorted(place[1] for place in launchers) != list(range(size)):
        wrong.append(f"the launcher numbers them {', '.join(str(p[1]) for p in launchers)}")
    if any(place[2] != size for place in launchers):
        wrong.append(f"{launchers[0][0]} started {launchers[0][2]}")
    by_host = ", ".join(
        f"{count} on {host}" for host, count in Counter(h.split()[0] for h in hosts).items()
    )
    started = f"{launchers[0][0]} started {size}" if launchers[0][0] else "no launcher"
    evidence = f"{listed(range(size))} once each, {by_host}; {started}"
    if size == 1:
        evidence = f"one process on {hosts[0].split()[0]}; {started}"
    if wrong:
        evidence = f"{'; '.join(wrong[:3])}; truly {evidence}"
    strategy = everyone[0]["strategy"]
    return row(
        STEP, not wrong, evidence, strategy=strategy, ranks=size, hosts=len(set(hosts)), wrong=wrong
    )
