"""Program that reports the environment of each rank, started by ``hvdtrain doctor -n N``.

Rank 0 prints one JSON object: ``size`` (of MPI's world), ``announced`` (by the
launcher), and ``ranks``, one object each: ``rank host machine resources affinity gpus software mpi
fabric threads sees_directory clock_ahead``. Bytes and seconds.
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import hvdtrain
from hvdtrain.commands.doctor.checks.machine import has_fabric
from hvdtrain.steps.integrity import BOOT_ID, source_digest
from hvdtrain.system.machine import gpus, mpi_library
from hvdtrain.system.machine.frameworks import find_tensorflow, find_torch, versions
from hvdtrain.system.machine.limits import find_resources
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

ROUNDS = 20  # exchanges with each host to compare clocks; the fastest counts


def main() -> int:
    """Gather the reports of all ranks and print them on rank 0."""
    set_defaults(MPI_VARIABLES)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    local = {**facts(), "rank": world.rank, "sees_directory": _sees_directory(world)}
    all_ranks = world.gather(local)
    ahead = _clocks(world, [] if all_ranks is None else [rank["host"] for rank in all_ranks])
    if all_ranks is not None:
        for rank in all_ranks:
            rank["clock_ahead"] = ahead.get(rank["host"], 0.0)
        announced = detect(os.environ).size
        report = {"size": world.size, "announced": announced, "ranks": all_ranks}
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    return 0


def facts() -> dict[str, Any]:
    """Return the properties of this process and its host."""
    driver = gpus.find_driver()
    libraries = mpi_library.loaded()
    return {
        "host": socket.gethostname(),
        "machine": BOOT_ID.read_text().strip() if BOOT_ID.is_file() else "",
        "resources": asdict(find_resources()),
        "affinity": sorted(os.sched_getaffinity(0)),
        "gpus": [gpu.uuid for gpu in driver.gpus] if driver else [],
        "software": software(),
        "mpi": [str(library) for library in libraries],
        "fabric": has_fabric(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


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


def _sees_directory(world: Any) -> bool:
    """Return whether this rank sees a file that rank 0 has just created; all ranks must call it."""
    file = None
    if world.rank == 0:
        with suppress(OSError):
            file = tempfile.NamedTemporaryFile(prefix=".hvdtrain-doctor-", dir=Path.cwd())  # noqa: SIM115
    name = world.bcast(file.name if file else None)
    seen = name is not None and Path(name).is_file()
    world.barrier()
    if file:
        file.close()
    return seen


def _clocks(world: Any, hosts: list[str]) -> dict[str, float]:
    """Return, on rank 0, the seconds that each host's clock is ahead; all ranks must call it.

    Cristian's algorithm: the other clock is read half-way between request and reply; of several
    exchanges the fastest is the most exact.
    """
    host_ranks = world.bcast({host: hosts.index(host) for host in hosts})
    ahead = {}
    for host, rank in host_ranks.items():
        if rank == 0:
            continue
        if world.rank == rank:
            for _ in range(ROUNDS):
                world.recv(source=0)
                world.send(time.time(), dest=0)
        elif world.rank == 0:
            rounds = []
            for _ in range(ROUNDS):
                before = time.time()
                world.send(None, dest=rank)
                remote = world.recv(source=rank)
                after = time.time()
                rounds.append((after - before, remote - (before + after) / 2))
            ahead[host] = min(rounds)[1]
    return ahead


if __name__ == "__main__":
    run_and_exit(main)
