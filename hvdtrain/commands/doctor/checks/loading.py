"""Does a library load, and with which MPI? Asked in a process of its own, which may crash.

``python -m hvdtrain.commands.doctor.checks.loading WHAT`` prints one JSON object. Neither is a
framework imported nor MPI started, so it takes a second and may run on a login node.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.config.strategies import HOROVOD
from hvdtrain.system.machine import mpi_library
from hvdtrain.system.machine.frameworks import find_module
from hvdtrain.system.runtime.command import Command, run

MPI4PY = "mpi4py"
TORCHVISION = "torchvision"
# What TensorFlow itself loads before Horovod's library, which finds it nowhere else.
TENSORFLOW_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
TIMEOUT = 60.0  # seconds; from a cold shared disk TensorFlow's library alone takes many


@dataclass(frozen=True)
class Loaded:
    """What came of loading a library."""

    error: str  # why it does not load; empty where it does
    mpi: tuple[tuple[str, str], ...] = ()  # path and identity of the MPIs that came with it


def extension(framework: str) -> Path | None:
    """Return Horovod's library for ``framework``; None where Horovod was not built for it."""
    return find_module(HOROVOD.requires[framework])


def has_nccl() -> bool:
    """Return whether a library of Horovod has GPU operations, by NCCL's functions in it."""
    files = filter(None, map(extension, HOROVOD.requires))
    return any(b"ncclAllReduce" in file.read_bytes() for file in files)


def try_loading(what: str) -> Loaded:
    """Load ``what`` in a process of its own: a framework's Horovod library, or another of ours."""
    program = (sys.executable, "-m", "hvdtrain.commands.doctor.checks.loading", what)
    result = run(Command(program), timeout=TIMEOUT)
    lines = result.output.strip().splitlines()
    for line in lines:
        if line.startswith('{"error"'):
            answer = json.loads(line)
            return Loaded(answer["error"], tuple((path, name) for path, name in answer["mpi"]))
    last = f": {lines[-1]}" if lines else ""
    return Loaded(f"loading it ended the process with exit code {result.exit_code}{last}")


def load(what: str) -> None:
    """Load ``what`` into this process.

    Raises:
        OSError, ImportError: it does not load.
    """
    if what == MPI4PY:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI  # noqa: F401

        return
    if what in ("pytorch", TORCHVISION) and find_module("torch"):
        # As `import torch` does: a cached wheel names the folder of the torch that it was built by.
        ctypes.CDLL(f"{find_module('torch')}/lib/libtorch_python.so", ctypes.RTLD_GLOBAL)
    if what == TORCHVISION:
        ctypes.CDLL(f"{find_module(TORCHVISION)}/_C.so", os.RTLD_NOW)
        return
    if what == "tensorflow":
        root = find_module("tensorflow")
        for name in TENSORFLOW_LIBRARIES if root else ():
            ctypes.CDLL(f"{root}/{name}", ctypes.RTLD_GLOBAL)
    path = extension(what)
    # Every symbol at once, as Python does: one that is missing is another framework's version.
    ctypes.CDLL(str(path), os.RTLD_NOW)


def main(what: str) -> int:
    """Load and tell."""
    error = ""
    try:
        load(what)
    except (OSError, ImportError, RuntimeError) as reason:
        error = " ".join(str(reason).split()) or type(reason).__name__
    libraries = [(library.path, library.identity) for library in mpi_library.loaded()]
    sys.stdout.write(json.dumps({"error": error, "mpi": libraries}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
