"""Tuning at start-up: fixed by launcher, strategy and workload, never by a timing.

Only what the user has not set is set. Figures: DESIGN of the project and ``benchmarks``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


# Open MPI polls while it waits and takes the core from a thread that computes. Our ranks always
# fill their cores (``threads_per_rank``), so it should yield.
MPI_VARIABLES = {"OMPI_MCA_mpi_yield_when_idle": "1"}


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def keep_freed_memory(environ: Mapping[str, str] = os.environ) -> bool:
    """Let glibc's malloc keep what is freed, instead of giving it back to the kernel.

    A training step frees and allocates the same large tensors again and again; each round trip
    through mmap costs a page fault for every 4 KiB. Does nothing where the user has tuned malloc
    (``MALLOC_*``, ``LD_PRELOAD``) or where the C library is another.

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
