"""What each rank finds where it runs: ``hvdtrain doctor -n N`` starts it on N ranks over mpi4py.

Rank 0 prints one JSON object: ``size`` (of the world that MPI made), ``announced`` (by the
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

ROUNDS = 20  # exchanges with each host to compare clocks; the quickest one counts


def main() -> int:
    """Gather and print."""
    set_defaults(MPI_VARIABLES)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    mine = {**facts(), "rank": world.rank, "sees_directory": _sees_directory(world)}
    everyone = world.gather(mine)
    ahead = _clocks(world, [] if everyone is None else [rank["host"] for rank in everyone])
    if everyone is not None:
        for rank in everyone:
            rank["clock_ahead"] = ahead.get(rank["host"], 0.0)
        announced = detect(os.environ).size
        report = {"size": world.size, "announced": announced, "ranks": everyone}
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    return 0


def facts() -> dict[str, Any]:
    """Return what this process knows of itself and its host."""
    driver = gpus.find_driver()
    found = find_resources()
    libraries = mpi_library.loaded()
    return {
        "host": socket.gethostname(),
        "machine": BOOT_ID.read_text().strip() if BOOT_ID.is_file() else "",
        "resources": asdict(found),
        "affinity": sorted(os.sched_getaffinity(0)),
        "gpus": [gpu.uuid for gpu in driver.gpus] if driver else [],
        "software": software(),
        "mpi": [str(library) for library in libraries],
        "fabric": has_fabric(),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def software() -> dict[str, str]:
    """Return the versions of what is installed here, by name; nothing is imported."""
    digest = source_digest(Path(hvdtrain.__file__).parent)
    found = {
        "hvdtrain": f"{hvdtrain.__version__} (code {digest})",
        "Python": platform.python_version(),
    }
    torch, tensorflow = find_torch(), find_tensorflow()
    found |= {"torch": torch.version} if torch else {}
    found |= {"tensorflow": tensorflow.version} if tensorflow else {}
    return found | versions("horovod")


def _sees_directory(world: Any) -> bool:
    """Return whether this rank sees a file that rank 0 has just made here; all ranks call it."""
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
    """Return the seconds that each host's clock is ahead of rank 0's, on rank 0; all call it.

    Cristian's algorithm: the other clock is read half-way between question and answer; of several
    exchanges the quickest is the most exact.
    """
    asked = world.bcast({host: hosts.index(host) for host in hosts})
    ahead = {}
    for host, rank in asked.items():
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
                there = world.recv(source=rank)
                after = time.time()
                rounds.append((after - before, there - (before + after) / 2))
            ahead[host] = min(rounds)[1]
    return ahead


if __name__ == "__main__":
    run_and_exit(main)
