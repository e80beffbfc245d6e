"""The MPI library of a process and its launcher, to detect a mismatch.

MPI is not initialized: ``MPI_Get_library_version`` may be called before ``MPI_Init`` (MPI
standard, "Version Inquiries"), and the rest is read from ``/proc``.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from hvdtrain.errors import UsageError

# Names of the C library in Open MPI, MPICH, Intel MPI, MVAPICH, Debian's MPICH and Cray MPICH;
# not the libraries for Fortran, C++ or GPU transport.
LIBRARY = re.compile(r"libmpi(ch|_(abi|cray|gnu|intel|nvidia|amd|aocc)(_\w+)?)?\.so[.\d]*")
VERSION_LENGTH = 8192  # MPI_MAX_LIBRARY_VERSION_STRING is 256 in Open MPI, 8192 in MPICH
LAUNCHERS = re.compile(
    r"(mpirun|mpiexec|orterun|orted|prterun|prted|prun|hydra|palsd|pals|slurmstepd|srun|flux)"
)


@dataclass(frozen=True)
class MpiLibrary:
    """An MPI library file."""

    path: str  # of the file, links resolved
    identity: str  # library and version, e.g. ``Open MPI 5.0.11``

    def __str__(self) -> str:
        return f"{self.identity}, {self.path}"


def loaded() -> tuple[MpiLibrary, ...]:
    """Return the MPI libraries loaded in this process, by path; more than one is an error."""
    return tuple(
        MpiLibrary(path, identity(path)) for path in mapped(Path("/proc/self/maps").read_text())
    )


@contextlib.contextmanager
def required() -> Iterator[None]:
    """Import mpi4py in this context.

    Raises:
        UsageError: that failed, usually for lack of an MPI library.
    """
    try:
        yield
    except (ImportError, RuntimeError) as error:  # RuntimeError: no MPI library
        cause = " ".join(str(error).split())
        raise UsageError(
            f"mpi4py cannot load an MPI library ({cause}): pip install 'hvdtrain[mpi]', or load "
            "the module of your MPI"
        ) from error


def mapped(text: str) -> tuple[str, ...]:
    """Return the paths of the MPI libraries in the text of a ``/proc/PID/maps``."""
    rows = [line.split(maxsplit=5) for line in text.splitlines()]
    paths = {row[5] for row in rows if len(row) == 6}
    return tuple(sorted(path for path in paths if LIBRARY.fullmatch(Path(path).name)))


def identity(path: str) -> str:
    """Return name and version of the MPI library at ``path``, without initializing it."""
    text = ctypes.create_string_buffer(VERSION_LENGTH)
    length = ctypes.c_int()
    try:
        ctypes.CDLL(path).MPI_Get_library_version(text, ctypes.byref(length))
    except (OSError, AttributeError):
        return "unknown MPI"
    return mpi_identity(text.value.decode(errors="replace"))


def mpi_identity(text: str) -> str:
    """Return name and version from the version text of an MPI library or wrapper."""
    for name, pattern in (
        ("Open MPI", r"Open MPI v?([\w.]+)"),
        ("Intel MPI", r"Intel\(R\) MPI Library ([\w.]+)"),
        ("MVAPICH", r"MVAPICH2? version\s*:?\s*([\w.]+)"),
        ("Cray MPICH", r"CRAY MPICH version\s*:?\s*([\w.]+)"),
        ("MPICH", r"MPICH version\s*:?\s*([\w.]+)"),
    ):
        match = re.search(pattern, text, re.IGNORECASE)
        if match:
            return f"{name} {match[1]}"
    return "unknown MPI"


def started_by() -> str:
    """Return the path of the nearest ancestor process that is a launcher; empty if none is."""
    for ancestor in psutil.Process().parents():
        with contextlib.suppress(psutil.Error):  # it has exited
            if LAUNCHERS.match(name := ancestor.name()):
                with contextlib.suppress(psutil.Error):  # of another user, e.g. Slurm's daemon
                    return ancestor.exe() or name
                return name
    return ""


def matching_mpirun(library: MpiLibrary) -> str:
    """Return the ``mpirun`` installed with ``library``; empty if not found.

    It is in ``bin`` of a prefix whose ``lib``, ``lib64``, ``lib/x86_64-linux-gnu/openmpi/lib`` etc.
    has the library.
    """
    for folder in Path(library.path).parents:
        if (folder / "bin" / "mpirun").is_file():
            return str(folder / "bin" / "mpirun")
    return ""
