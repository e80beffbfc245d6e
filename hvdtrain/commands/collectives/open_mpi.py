"""Select Open MPI's allreduce algorithm per communicator at run time.

It uses control variables of MPI's tool interface (MPI standard, "Tool Support"), which mpi4py does
not support. In Open MPI 5.0.6 and later they are writable (open-mpi/ompi, pull request 12864), and
read when a communicator is created. So one job can compare all algorithms; environment variables
would need a job for each. For a training use ``variables``.
"""

from __future__ import annotations

import ctypes
from typing import Any

from mpi4py import MPI

from hvdtrain.collectives.cost import RABENSEIFNER, RECURSIVE_DOUBLING, RING, Law
from hvdtrain.errors import HvdtrainError

IN_PLACE = MPI.IN_PLACE
RULES, ALGORITHM = "coll_tuned_use_dynamic_rules", "coll_tuned_allreduce_algorithm"
# Across hosts component "han" would take precedence over "tuned", which has these algorithms.
PRIORITY = "coll_han_priority"
# `ompi_info --param coll tuned --level 9` lists them.
ALGORITHMS = {
    1: "linear",
    2: "reduce, broadcast",
    3: "recursive doubling",
    4: "ring",
    5: "segmented ring",
    6: "Rabenseifner",
}
LAWS: dict[int, Law] = {3: RECURSIVE_DOUBLING, 4: RING, 6: RABENSEIFNER}


def variables(number: int) -> dict[str, str]:
    """Return the environment variables that select algorithm ``number``."""
    return {f"OMPI_MCA_{RULES}": "1", f"OMPI_MCA_{ALGORITHM}": str(number)}


def choose(world: Any, number: int) -> Any:
    """Return a copy of ``world`` that uses algorithm ``number``; all its ranks together.

    Raises:
        HvdtrainError: not supported by this MPI.
    """
    library = ctypes.CDLL(MPI.__file__)  # linked with MPI, whose symbols are found through it
    wanted = {RULES: 1, ALGORITHM: number}
    before: dict[str, int] = {}
    try:
        _check(library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int())), "MPI_T_init_thread")
        if _index(library, PRIORITY) is not None:
            wanted[PRIORITY] = 0
        for name, value in wanted.items():
            before[name] = _exchange(library, name, value)
        return world.Dup()
    except AttributeError as error:  # no such function
        raise HvdtrainError(f"this MPI has no tool interface: {error}") from error
    finally:
        for name, value in before.items():
            _exchange(library, name, value)


def _index(library: ctypes.CDLL, name: str) -> int | None:
    """Return the index of a control variable, or None if there is no such variable."""
    index = ctypes.c_int()
    code = library.MPI_T_cvar_get_index(name.encode(), ctypes.byref(index))
    return index.value if code == MPI.SUCCESS else None


def _exchange(library: ctypes.CDLL, name: str, value: int) -> int:
    """Write a control variable of type int or bool, and return its previous value."""
    index = _index(library, name)
    if index is None:
        raise HvdtrainError(f"this MPI has no {name}")
    handle, count = ctypes.c_void_p(), ctypes.c_int()
    allocate = library.MPI_T_cvar_handle_alloc
    _check(allocate(index, None, ctypes.byref(handle), ctypes.byref(count)), name)
    # Longer than either type; a bool is its first byte on little-endian machines.
    old, new = ctypes.c_int64(0), ctypes.c_int64(value)
    _check(library.MPI_T_cvar_read(handle, ctypes.byref(old)), name)
    _check(library.MPI_T_cvar_write(handle, ctypes.byref(new)), name)
    library.MPI_T_cvar_handle_free(ctypes.byref(handle))
    return old.value


def _check(code: int, name: str) -> None:
    if code != MPI.SUCCESS:
        raise HvdtrainError(f"{name} cannot be set at run time in this MPI (error {code})")
