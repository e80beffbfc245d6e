"""Which MPI library a process uses, and who started it: the evidence where launcher and MPI differ.

Nothing here starts MPI: ``MPI_Get_library_version`` may be called before ``MPI_Init`` (the MPI
standard, "Version Inquiries"), and all else is read from ``/proc``.
"""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.errors import UsageError
from hvdtrain.system.machine.toolchain import mpi_identity

# The C library itself under the names that MPIs give it: Open MPI, MPICH, Intel MPI, MVAPICH,
# Debian's MPICH, Cray MPICH. Not what belongs to it: Fortran, C++, the GPU transport layer.
LIBRARY = re.compile(r"libmpi(ch|_(abi|cray|gnu|intel|nvidia|amd|aocc)(_\w+)?)?\.so[.\d]*")
VERSION_LENGTH = 8192  # MPI_MAX_LIBRARY_VERSION_STRING is 256 in Open MPI, 8192 in MPICH
LAUNCHERS = re.compile(
    r"(mpirun|mpiexec|orterun|orted|prterun|prted|prun|hydra|palsd|pals|slurmstepd|srun|jsrun|flux)"
)


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library file."""

    path: str  # the file, links followed
    identity: str  # library and version, such as ``Open MPI 5.0.11``

    def __str__(self) -> str:
        return f"{self.identity}, {self.path}"


def loaded() -> tuple[MpiLibrary, ...]:
    """Return the MPI libraries in this process's memory, by path; more than one is trouble."""
    return tuple(
        MpiLibrary(path, identity(path)) for path in mapped(Path("/proc/self/maps").read_text())
    )


def not_loaded(error: Exception) -> UsageError:
    """Return what to tell where ``error`` came of importing mpi4py: most often, no MPI library."""
    cause = " ".join(str(error).split())
    return UsageError(
        f"mpi4py finds no MPI library that works ({cause}): pip install 'hvdtrain[mpi]', or load "
        "the module of your MPI"
    )


def mapped(text: str) -> tuple[str, ...]:
    """Return the paths of the MPI libraries in the text of a ``/proc/PID/maps``."""
    rows = [line.split(maxsplit=5) for line in text.splitlines()]
    paths = {row[5] for row in rows if len(row) == 6}
    return tuple(sorted(path for path in paths if LIBRARY.fullmatch(Path(path).name)))


def identity(path: str) -> str:
    """Return library and version of the MPI library at ``path``; loads it, does not start it."""
    text = ctypes.create_string_buffer(VERSION_LENGTH)
    length = ctypes.c_int()
    try:
        ctypes.CDLL(path).MPI_Get_library_version(text, ctypes.byref(length))
    except (OSError, AttributeError):
        return "unknown MPI"
    return mpi_identity(text.value.decode(errors="replace"))


def started_by() -> str:
    """Return the path of this process's nearest ancestor that is a launcher; empty if none is."""
    for ancestor in psutil.Process().parents():
        try:
            name = ancestor.name()
            if LAUNCHERS.match(name):
                return _program(ancestor) or name
        except psutil.Error:  # gone meanwhile
            continue
    return ""


def _program(process: psutil.Process) -> str:
    try:
        return process.exe()
    except psutil.Error:  # another user's, such as Slurm's daemon
        return ""


def own_mpirun(library: MpiLibrary) -> str:
    """Return the ``mpirun`` installed with ``library``; empty where it is in no usual place.

    It stands in ``bin`` beside one of the directories above the library: ``lib``, ``lib64``,
    ``lib/x86_64-linux-gnu/openmpi/lib``.
    """
    for folder in Path(library.path).parents:
        if (folder / "bin" / "mpirun").is_file():
            return str(folder / "bin" / "mpirun")
    return ""
