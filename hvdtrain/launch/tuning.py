"""Tuning at start-up: a fixed function of launcher and workload, never of a timing.

Only what the user has not set is set. Figures: DESIGN of the project and ``tests/perf``.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping

from hvdtrain.launch.detect import Place

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h of glibc


# Open MPI polls while it waits and takes the core from a thread that computes. Our ranks always
# fill their cores (``threads_per_rank``), so it should yield.
MPI_VARIABLES = {"OMPI_MCA_mpi_yield_when_idle": "1"}


def set_defaults(variables: Mapping[str, str]) -> None:
    """Set environment variables of this process that the user has not set."""
    for name, value in variables.items():
        os.environ.setdefault(name, value)


def runtime_variables(place: Place, *, short_steps: bool) -> dict[str, str]:
    """Environment variables that MPI and Horovod read when they start.

    Args:
        place: what the launcher told; alone, nothing needs tuning.
        short_steps: the training takes steps of milliseconds.
    """
    if place.size == 1:
        return {}
    variables = {
        **MPI_VARIABLES,
        # The adapters reduce few large buckets, each one tensor. Fusing buckets once more costs
        # two copies, and makes the order of summation, so the last bit, a matter of timing.
        "HOROVOD_FUSION_THRESHOLD": "0",
    }
    if short_steps:
        # Horovod looks for work once a cycle (ms); with short steps one waits for the cycle.
        variables["HOROVOD_CYCLE_TIME"] = "0.1"
    return variables


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
