"""Load a library in a separate process, which may crash, and report its MPI.

``python -m hvdtrain.commands.doctor.checks.loading NAME`` prints one JSON object. It imports no
framework and does not start MPI, so it takes a second and may run on a login node.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

from hvdtrain.config.strategies import HOROVOD
from hvdtrain.system.machine import mpi_library
from hvdtrain.system.machine.frameworks import find_module
from hvdtrain.system.runtime.command import Command, run

MPI4PY = "mpi4py"
TORCHVISION = "torchvision"
# TensorFlow loads these before Horovod's library, which depends on them.
TENSORFLOW_LIBRARIES = ("libtensorflow_framework.so.2", "libtensorflow_cc.so.2")
TIMEOUT = 60.0  # seconds; TensorFlow's library takes long from an uncached shared disk


@dataclass(frozen=True)
class Loaded:
    """The result of loading a library."""

    error: str  # empty if it loads
    mpi: tuple[tuple[str, str], ...] = ()  # path and identity of the MPIs loaded with it


def extension(framework: str) -> Path | None:
    """Return Horovod's library for ``framework``; None if Horovod was not built for it."""
    return find_module(HOROVOD.requires[framework])


def has_nccl() -> bool:
    """Return whether a library of Horovod has GPU operations, i.e. uses NCCL's functions."""
    files = filter(None, map(extension, HOROVOD.requires))
    return any(b"ncclAllReduce" in file.read_bytes() for file in files)


def try_loading(name: str) -> Loaded:
    """Load a library in a separate process; ``name`` as in ``load``."""
    program = (sys.executable, "-m", "hvdtrain.commands.doctor.checks.loading", name)
    result = run(Command(program), timeout=TIMEOUT)
    lines = result.output.strip().splitlines()
    for line in lines:
        if line.startswith('{"error"'):
            return msgspec.json.decode(line, type=Loaded)
    last = f": {lines[-1]}" if lines else ""
    return Loaded(f"loading it crashed, exit code {result.exit_code}{last}")


def load(name: str) -> None:
    """Load a library into this process: ``MPI4PY``, ``TORCHVISION`` or Horovod's for a framework.

    Raises:
        OSError, ImportError: it does not load.
    """
    if name == MPI4PY:
        import mpi4py

        mpi4py.rc.initialize = False
        from mpi4py import MPI  # noqa: F401

        return
    if name in ("pytorch", TORCHVISION) and find_module("torch"):
        # As in `import torch`: a cached wheel has the path of the torch with which it was built.
        ctypes.CDLL(f"{find_module('torch')}/lib/libtorch_python.so", ctypes.RTLD_GLOBAL)
    if name == TORCHVISION:
        ctypes.CDLL(f"{find_module(TORCHVISION)}/_C.so", os.RTLD_NOW)
        return
    if name == "tensorflow":
        root = find_module("tensorflow")
        for library in TENSORFLOW_LIBRARIES if root else ():
            ctypes.CDLL(f"{root}/{library}", ctypes.RTLD_GLOBAL)
    path = extension(name)
    # All symbols at once, as in Python: a missing one means another version of the framework.
    ctypes.CDLL(str(path), os.RTLD_NOW)


def main(name: str) -> int:
    """Load a library and print the result."""
    message = ""
    try:
        load(name)
    except (OSError, ImportError, RuntimeError) as error:
        message = " ".join(str(error).split()) or type(error).__name__
    libraries = tuple((library.path, library.identity) for library in mpi_library.loaded())
    sys.stdout.write(json.dumps(asdict(Loaded(message, libraries))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
