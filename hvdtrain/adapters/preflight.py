"""Step 1's checks: one MPI library, one world, the same software, a device for each rank.

It finds out what ``steps/integrity.py`` and ``steps/world.py`` judge.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict

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
    """Refuse a process that holds two MPI libraries, before MPI starts.

    Raises:
        UsageError: on each rank that holds two, naming both.
    """
    libraries = mpi_library.loaded()
    if len(libraries) > 1:
        raise UsageError(
            f"two MPI libraries are loaded in this process ({'; '.join(map(str, libraries))}): "
            "Horovod and mpi4py belong to different ones. Build Horovod for the MPI that you start "
            "with (`hvdtrain install-horovod --rebuild`) and mpi4py too (`pip install "
            "--no-cache-dir --force-reinstall --no-binary mpi4py mpi4py`); `hvdtrain doctor` shows "
            "who uses which"
        )


def check_world(launch: LaunchInfo, size: int, runtime: str) -> None:
    """Compare the world of the runtime, which has started, with the launcher's.

    Raises:
        UsageError: on every rank, where they differ.
    """
    evidence = Evidence()
    if launch.size != size:
        libraries = mpi_library.loaded()
        evidence = Evidence(
            mpi="; ".join(map(str, libraries)),
            own_mpirun=mpi_library.own_mpirun(libraries[0]) if libraries else "",
            started_by=mpi_library.started_by(),
        )
    try:
        check_launch(launch, size, runtime, evidence)
    except UsageError as error:
        if launch.launcher == BY_HAND:  # each has its own standard error, so each speaks
            raise
        raise agreed(error) from None  # every rank sees the same two numbers


def exchange(communicator: Communicator) -> list[RankFacts]:
    """Tell all ranks what this one is, in one collective; all must run the same software.

    Returns:
        The facts of all ranks, by rank.

    Raises:
        UsageError: on every rank, telling who runs what.
    """
    identities = sorted({library.identity for library in mpi_library.loaded()})
    mine = integrity.rank_facts(os.environ, ", ".join(identities))
    everyone = [RankFacts.decode(data) for data in communicator.gather(mine.encode())]
    known = integrity.MIXED_VERSIONS
    _judge(communicator, everyone, known, lambda: integrity.check_software(everyone))
    return everyone


def check_devices(communicator: Communicator, device: Device, everyone: list[RankFacts]) -> None:
    """Tell all ranks which device this one took, in one collective; each has one of its own.

    Raises:
        UsageError: on every rank, naming those that share one.
    """
    told = communicator.gather(json.dumps(asdict(device)).encode())
    devices = [Device(**json.loads(data)) for data in told]
    known = integrity.SHARED_GPU
    _judge(communicator, everyone, known, lambda: integrity.check_devices(devices, everyone))


def _judge(
    communicator: Communicator, everyone: list[RankFacts], known: str, rule: Callable[[], None]
) -> None:
    """Raise what ``rule`` raises, as agreed by all; only say it where ``known`` is let pass."""
    try:
        rule()
    except UsageError as error:
        if known not in everyone[0].allow:
            raise agreed(error) from None
        message = str(error)
        communicator.on_root(lambda: log.warning("%s", message))
