"""Tuning at start-up, depending on launcher, strategy and workload but not on timings.

Values set by the user are kept. Measurements: ``benchmarks``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


# Open MPI polls while it waits, on a core that a compute thread needs: the ranks use all cores
# (``threads_per_rank``), so it must yield.
MPI_VARIABLES = {"OMPI_MCA_mpi_yield_when_idle": "1"}


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process, except those set by the user."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let glibc's malloc keep freed memory instead of returning it to the kernel.

    Training steps free and allocate the same large tensors repeatedly; each round trip through mmap
    costs a page fault per 4 KiB. Does nothing if the user has tuned malloc (``MALLOC_*``,
    ``LD_PRELOAD``) or the C library is not glibc.

    Returns:
        Whether it took effect.
    """
    if "LD_PRELOAD" in environ or any(name.startswith("MALLOC_") for name in environ):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    return bool(mallopt(M_MMAP_MAX, 0) and mallopt(M_TRIM_THRESHOLD, 2**31 - 1))


def release_freed_memory() -> None:
    """Return what ``keep_freed_memory`` keeps to the kernel, also from the middle of the heap.

    Call it after work of another size than the steps', e.g. an evaluation: a small value that stays
    there would split its memory, and each further evaluation would need as much again.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
