"""Program that reports the environment of each rank, started by ``hvdtrain doctor -n N``.

Rank 0 prints a ``WorldReport`` as one JSON object.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import hvdtrain
from hvdtrain.steps.integrity import source_digest
from hvdtrain.system.machine import gpus, mpi_library
from hvdtrain.system.machine.frameworks import find_tensorflow, find_torch, versions
from hvdtrain.system.machine.limits import Resources, find_resources
from hvdtrain.system.machine.network import boot_id, has_fabric
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py

ROUNDS = 20  # exchanges with each host to compare clocks; the fastest counts


@dataclass(frozen=True)
class RankReport:
    """The environment of a rank."""

    rank: int
    host: str
    machine: str  # identity of the running system; empty if unknown
    resources: Resources
    affinity: list[int]
    gpus: list[str]  # identities of the visible GPUs
    software: dict[str, str]  # version by name
    mpi: list[str]  # the MPI libraries that mpi4py has loaded
    fabric: bool  # whether the host has an InfiniBand or Omni-Path adapter
    threads: str  # OMP_NUM_THREADS
    sees_directory: bool  # whether rank 0's current directory is visible
    clock_ahead: float  # seconds that the host's clock is ahead of rank 0's


@dataclass(frozen=True)
class WorldReport:
    """The report of MPI's world."""

    size: int  # of the world
    announced: int  # number of ranks according to the launcher
    ranks: list[RankReport]


def main() -> int:
    """Gather the reports of all ranks and print them on rank 0."""
    set_defaults(MPI_VARIABLES)
    from hvdtrain.collectives.mpi4py import Mpi4py

    world = Mpi4py()
    driver, libraries = gpus.find_driver(), mpi_library.loaded()
    host, sees_directory = socket.gethostname(), _sees_directory(world)
    ahead = _clocks(world, host)
    local = RankReport(
        rank=world.rank,
        host=host,
        machine=boot_id(),
        resources=find_resources(),
        affinity=sorted(os.sched_getaffinity(0)),
        gpus=[gpu.uuid for gpu in driver.gpus] if driver else [],
        software=software(),
        mpi=[str(library) for library in libraries],
        fabric=has_fabric(),
        threads=os.environ.get("OMP_NUM_THREADS", ""),
        sees_directory=sees_directory,
        clock_ahead=ahead.get(host, 0.0),
    )
    all_ranks = world.gather_json(local)
    if world.is_root:
        announced = detect(os.environ).size
        report = {"size": world.size, "announced": announced, "ranks": all_ranks}
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    return 0


def software() -> dict[str, str]:
    """Return the installed versions by name, without importing anything."""
    digest = source_digest(Path(hvdtrain.__file__).parent)
    installed = {
        "hvdtrain": f"{hvdtrain.__version__} (code {digest})",
        "Python": platform.python_version(),
    }
    torch, tensorflow = find_torch(), find_tensorflow()
    installed |= {"torch": torch.version} if torch else {}
    installed |= {"tensorflow": tensorflow.version} if tensorflow else {}
    return installed | versions("horovod")


def _sees_directory(world: Mpi4py) -> bool:
    """Return whether this rank sees a file that rank 0 has just created; all ranks must call it."""
    file = None
    if world.is_root:
        with suppress(OSError):
            file = tempfile.NamedTemporaryFile(prefix=".hvdtrain-doctor-", dir=Path.cwd())  # noqa: SIM115
    name = os.fsdecode(world.broadcast_bytes(os.fsencode(file.name if file else "")))
    seen = bool(name) and Path(name).is_file()
    world.wait_for_all()
    if file:
        file.close()
    return seen


def _clocks(world: Mpi4py, host: str) -> dict[str, float]:
    """Return the seconds that each host's clock is ahead; all ranks must call it.

    Cristian's algorithm: the other clock is read half-way between request and reply; of several
    exchanges the fastest is the most exact.
    """
    hosts, clock = world.gather_json(host), np.empty(1)
    host_ranks = {host: hosts.index(host) for host in hosts}
    ahead = {}
    for host, rank in host_ranks.items():
        if rank == 0:
            continue
        if world.rank == rank:
            for _ in range(ROUNDS):
                world.world.Recv(clock, source=0)
                clock[0] = time.time()
                world.world.Send(clock, dest=0)
        elif world.rank == 0:
            rounds = []
            for _ in range(ROUNDS):
                before = time.time()
                world.world.Send(clock, dest=rank)
                world.world.Recv(clock, source=rank)
                after = time.time()
                rounds.append((after - before, float(clock[0]) - (before + after) / 2))
            ahead[host] = min(rounds)[1]
    return dict(world.gather_json(ahead)[0])


if __name__ == "__main__":
    run_and_exit(main)
