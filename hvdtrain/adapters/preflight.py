"""Checks of step 1: one MPI library, one world, the same software, a separate device per rank.

This module collects the facts; ``steps/integrity.py`` and ``steps/world.py`` judge them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.steps import integrity
from hvdtrain.steps.integrity import Device, RankFacts
from hvdtrain.steps.world import Evidence, check_launch
from hvdtrain.system.machine import mpi_library
from hvdtrain.system.runtime.detect import BY_HAND, LaunchInfo
from hvdtrain.system.runtime.exit import agreed

log = logging.getLogger(__name__)


def check_libraries() -> None:
    """Raise, before MPI starts, if this process has loaded two MPI libraries."""
    libraries = mpi_library.loaded()
    if len(libraries) > 1:
        raise UsageError(
            f"two MPI libraries are loaded in this process ({'; '.join(map(str, libraries))}): "
            "Horovod and mpi4py were built for different ones. Rebuild both for the MPI of your "
            "mpirun: Horovod by `hvdtrain install-horovod --rebuild`, mpi4py by `pip install "
            "--no-cache-dir --force-reinstall --no-binary mpi4py mpi4py`; `hvdtrain doctor` shows "
            "which package uses which library"
        )


def check_world(launch: LaunchInfo, size: int, runtime: str) -> None:
    """Raise, on every rank, if the launcher started another number than the runtime sees."""
    evidence = Evidence()
    if launch.size != size:
        libraries = mpi_library.loaded()
        evidence = Evidence(
            mpi="; ".join(map(str, libraries)),
            matching_mpirun=mpi_library.matching_mpirun(libraries[0]) if libraries else "",
            started_by=mpi_library.started_by(),
        )
    try:
        check_launch(launch, size, runtime, evidence)
    except UsageError as error:
        if launch.launcher == BY_HAND:  # each rank has a separate standard error: each reports
            raise
        raise agreed(error) from None  # every rank sees the same two numbers


def exchange(communicator: Communicator) -> list[RankFacts]:
    """Return the facts of all ranks, in one collective; they must run the same software."""
    identities = sorted({library.identity for library in mpi_library.loaded()})
    mine = integrity.rank_facts(os.environ, ", ".join(identities))
    ranks = communicator.gather_json(mine, RankFacts)
    with _allowing(communicator, ranks, integrity.MIXED_VERSIONS):
        integrity.check_software(ranks)
    return ranks


def check_devices(communicator: Communicator, device: Device, ranks: list[RankFacts]) -> None:
    """Raise, on every rank, naming the ranks, if two share a device; it is one collective."""
    devices = communicator.gather_json(device, Device)
    with _allowing(communicator, ranks, integrity.SHARED_GPU):
        integrity.check_devices(devices, ranks)


@contextmanager
def _allowing(communicator: Communicator, ranks: list[RankFacts], known: str) -> Iterator[None]:
    """Raise an error of the block, agreed by all ranks; only warn if the user allows ``known``."""
    try:
        yield
    except UsageError as error:
        if known not in ranks[0].allow:
            raise agreed(error) from None
        message = str(error)
        communicator.on_root(lambda: log.warning("%s", message))
