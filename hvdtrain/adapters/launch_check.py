"""Step 1, integrity: finding out what ``steps/integrity.py`` and ``steps/world.py`` judge.

Called by ``initialize``, in this order; an error is raised on every rank.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict

from hvdtrain.adapters.communicator import Communicator
from hvdtrain.environment import mpi_library
from hvdtrain.errors import UsageError
from hvdtrain.launch.detect import BY_HAND, Place
from hvdtrain.launch.ending import agreed
from hvdtrain.steps import integrity
from hvdtrain.steps.integrity import Device, RankFacts
from hvdtrain.steps.world import Evidence, check_launch

log = logging.getLogger(__name__)


def check_libraries() -> None:
    """Before MPI starts: no process may hold two MPI libraries.

    Raises:
        UsageError: on each rank that holds two, naming both.
    """
    libraries = mpi_library.loaded()
    if len(libraries) > 1:
        raise UsageError(
            f"two MPI libraries are loaded in this process ({'; '.join(map(str, libraries))}): "
            "Horovod and mpi4py belong to different ones. Build Horovod for the MPI that you start "
            "with (`hvdtrain install-horovod --rebuild`) and mpi4py too (`pip install "
            "--force-reinstall --no-binary mpi4py mpi4py`); `hvdtrain doctor` shows who uses which"
        )


def check_world(place: Place, size: int, runtime: str) -> None:
    """After the runtime has started: its world is the launcher's.

    Raises:
        UsageError: on every rank, where they differ.
    """
    evidence = Evidence()
    if place.size != size:
        libraries = mpi_library.loaded()
        evidence = Evidence(
            mpi="; ".join(map(str, libraries)),
            own_mpirun=mpi_library.own_mpirun(libraries[0]) if libraries else "",
            started_by=mpi_library.started_by(),
        )
    try:
        check_launch(place, size, runtime, evidence)
    except UsageError as error:
        if place.launcher == BY_HAND:  # each has its own standard error, so each speaks
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
