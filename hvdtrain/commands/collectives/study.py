"""Compare allreduce algorithms by message size and number of ranks.

Each repeat runs every algorithm once, in random order, so that drift and order affect all
algorithms equally.

The link is fitted to the rows whose algorithm has a law in ``cost``: of Open MPI, or, if these are
not available, of hvdtrain (slower, in Python).
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hvdtrain.collectives.cost import RABENSEIFNER, RECURSIVE_DOUBLING, RING, Law, Message, fit
from hvdtrain.collectives.mpi4py import gather_bytes, wait_for_all
from hvdtrain.commands.collectives import algorithms
from hvdtrain.commands.collectives.algorithms import (
    MPI_CHOICE,
    OPEN_MPI,
    OWN,
    AllreduceStudy,
    Best,
    LinkFacts,
    Selection,
    StudyRow,
)
from hvdtrain.commands.collectives.timing import ELEMENT, repeats_for
from hvdtrain.errors import HvdtrainError

SIZES = (4, 2**10, 2**14, 2**18, 2**21, 2**24)  # bytes, in addition to the gradient size
SECONDS = 1.0  # for all algorithms, per size and number of ranks
GRADIENT = 102 * 10**6  # bytes of ResNet-50's 25.6 million weights in float32

# Open MPI's algorithms are selected per communicator by control variables of MPI's tool interface
# (MPI standard, "Tool Support"), which mpi4py lacks. In Open MPI 5.0.6 and later they are
# writable (open-mpi/ompi, pull request 12864), and read when a communicator is created. So one job
# can compare all algorithms; environment variables would need a job for each.
RULES, ALGORITHM = "coll_tuned_use_dynamic_rules", "coll_tuned_allreduce_algorithm"
# Across hosts component "han" would take precedence over "tuned", which has these algorithms.
PRIORITY = "coll_han_priority"
# `ompi_info --param coll tuned --level 9` lists them.
OPEN_MPI_ALGORITHMS = {
    1: "linear",
    2: "reduce, broadcast",
    3: "recursive doubling",
    4: "ring",
    5: "segmented ring",
    6: "Rabenseifner",
}
OPEN_MPI_LAWS: dict[int, Law] = {3: RECURSIVE_DOUBLING, 4: RING, 6: RABENSEIFNER}

Floats = NDArray[np.float32]
World = Any  # an mpi4py communicator


@dataclass(frozen=True)
class Algorithm:
    """An algorithm on the ranks of a communicator."""

    name: str
    origin: str
    run: Callable[[Floats], object]
    law: Law | None = None
    variables: dict[str, str] = field(default_factory=dict)  # that select it in a training


def candidates(world: World) -> tuple[list[Algorithm], list[str]]:
    """Return the algorithms for ``world``, MPI's default first, and notes on unavailable ones.

    All ranks of ``world`` must call it together.
    """
    compared = [Algorithm(MPI_CHOICE, MPI_CHOICE, lambda data: world.Allreduce(MPI.IN_PLACE, data))]
    notes = []
    try:
        compared += [_of_open_mpi(world, number) for number in OPEN_MPI_ALGORITHMS]
    except HvdtrainError as error:
        notes.append(f"algorithms of Open MPI are not available: {error}")
    names = gather_bytes(world, socket.gethostname().encode())
    hierarchical = algorithms.Hierarchical(world, names.index(names[world.rank]))
    implemented: tuple[tuple[str, algorithms.Algorithm, Law | None], ...] = (
        ("ring", algorithms.ring, RING),
        ("recursive doubling", algorithms.recursive_doubling, RECURSIVE_DOUBLING),
        ("Rabenseifner", algorithms.rabenseifner, RABENSEIFNER),
        ("hierarchical", hierarchical, None),
    )
    for name, run, law in implemented:
        compared.append(Algorithm(f"{name}, ours", OWN, partial(run, world), law))
    return compared, notes


def _of_open_mpi(world: World, number: int) -> Algorithm:
    chosen = with_algorithm(world, number)
    return Algorithm(
        OPEN_MPI_ALGORITHMS[number],
        OPEN_MPI,
        lambda data: chosen.Allreduce(MPI.IN_PLACE, data),
        OPEN_MPI_LAWS.get(number),
        variables(number),
    )


def variables(number: int) -> dict[str, str]:
    """Return the environment variables that select algorithm ``number``."""
    return {f"OMPI_MCA_{RULES}": "1", f"OMPI_MCA_{ALGORITHM}": str(number)}


def with_algorithm(world: Any, number: int) -> Any:
    """Return a copy of ``world`` that uses algorithm ``number``; all its ranks together.

    Raises:
        HvdtrainError: not supported by this MPI.
    """
    library = ctypes.CDLL(MPI.__file__)  # linked with MPI, whose symbols are found through it
    wanted = {RULES: 1, ALGORITHM: number}
    before: dict[str, int] = {}
    try:
        _check_code(library.MPI_T_init_thread(0, ctypes.byref(ctypes.c_int())), "MPI_T_init_thread")
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
    _check_code(allocate(index, None, ctypes.byref(handle), ctypes.byref(count)), name)
    # Longer than either type; a bool is its first byte on little-endian machines.
    old, new = ctypes.c_int64(0), ctypes.c_int64(value)
    _check_code(library.MPI_T_cvar_read(handle, ctypes.byref(old)), name)
    _check_code(library.MPI_T_cvar_write(handle, ctypes.byref(new)), name)
    library.MPI_T_cvar_handle_free(ctypes.byref(handle))
    return old.value


def _check_code(code: int, name: str) -> None:
    if code != MPI.SUCCESS:
        raise HvdtrainError(f"{name} cannot be set at run time in this MPI (error {code})")


def rank_counts(size: int) -> tuple[int, ...]:
    """Return the powers of two from 2 to ``size``, and ``size``."""
    return tuple(sorted({*(2**power for power in range(1, size.bit_length())), size}))


def measure(
    all_ranks: World, counts: Sequence[int], sizes: Sequence[int], gradient: int, budget: float
) -> AllreduceStudy:
    """Measure all algorithms for each number of ranks and size; all ranks together.

    Args:
        all_ranks: communicator of at least two ranks.
        counts: numbers of ranks.
        sizes: message sizes in bytes.
        gradient: an additional size, bytes of the gradients of a training.
        budget: seconds per size and number of ranks.

    Raises:
        HvdtrainError: an algorithm gives a wrong sum.
    """
    rows: list[StudyRow] = []
    notes: list[str] = []
    laws: dict[str, Law | None] = {}
    described: dict[str, Selection] = {}
    for count in counts:
        world = all_ranks.Split(0 if all_ranks.rank < count else MPI.UNDEFINED, all_ranks.rank)
        if world != MPI.COMM_NULL:
            compared, notes = candidates(world)
            origins = {entry.origin for entry in compared}
            fitted = OPEN_MPI if OPEN_MPI in origins else OWN
            laws = {entry.name: entry.law for entry in compared if entry.origin == fitted}
            described = {e.name: Selection(e.origin, e.variables) for e in compared}
            for size in sorted({*sizes, gradient}):
                rows += compare(world, compared, size, budget)
        wait_for_all(all_ranks)
    hosts, cores = _machine(all_ranks)
    return AllreduceStudy(
        ranks=all_ranks.size,
        hosts=hosts,
        cores=cores,
        gradient_bytes=gradient,
        notes=notes,
        algorithms=described,
        rows=rows,
        best=best(rows),
        link=_link(rows, laws) if rows else None,
    )


def compare(
    world: World, compared: Sequence[Algorithm], size: int, budget: float
) -> list[StudyRow]:
    """Time each of ``compared`` on messages of ``size`` bytes; return rows on rank 0 only.

    Raises:
        HvdtrainError: an algorithm gives a wrong sum.
    """
    data = np.zeros(max(1, size // ELEMENT), np.float32)
    for algorithm in compared:
        _check(world, algorithm, data)
    data.fill(0)  # repeated sums stay 0
    began = time.perf_counter()
    for algorithm in compared:
        _once(world, algorithm, data)
    repeats = np.array(repeats_for(time.perf_counter() - began, budget))
    world.Bcast(repeats)
    mine = np.empty((int(repeats), len(compared)))
    for repeat in range(int(repeats)):
        order = np.random.default_rng(repeat).permutation(len(compared))  # the same on all ranks
        for index in order:
            mine[repeat, index] = _once(world, compared[index], data)
    slowest = np.empty_like(mine) if world.rank == 0 else None
    world.Reduce(mine, slowest, op=MPI.MAX)
    if slowest is None:
        return []
    return [_row(world.size, size, entry.name, slowest, n) for n, entry in enumerate(compared)]


def _check(world: World, algorithm: Algorithm, data: Floats) -> None:
    """Raise if rank + 1, summed over n ranks, is not n (n + 1) / 2."""
    data.fill(world.rank + 1)
    algorithm.run(data)
    expected = world.size * (world.size + 1) / 2
    right = np.array((data == expected).all())
    world.Allreduce(MPI.IN_PLACE, right, op=MPI.LAND)
    if not right:
        raise HvdtrainError(f"{algorithm.name}: a sum over {world.size} ranks is not {expected}")


def _once(world: World, algorithm: Algorithm, data: Floats) -> float:
    world.Barrier()
    began = time.perf_counter()
    algorithm.run(data)
    return time.perf_counter() - began


def _row(ranks: int, size: int, name: str, slowest: Any, index: int) -> StudyRow:
    """Return the row of an algorithm; ``slowest``: seconds by repeat and algorithm."""
    times = slowest[:, index]
    low, middle, high = np.percentile(times / slowest[:, 0], [25, 50, 75])
    return StudyRow(
        ranks=ranks,
        bytes=size,
        algorithm=name,
        repeats=len(times),
        seconds=statistics.median(times.tolist()),
        seconds_min=float(times.min()),
        seconds_max=float(times.max()),
        ratio=float(middle),
        ratio_low=float(low),
        ratio_high=float(high),
    )


def best(rows: Sequence[StudyRow]) -> list[Best]:
    """Return the fastest algorithm for each number of ranks and size."""
    winners = []
    for ranks, size in dict.fromkeys((row.ranks, row.bytes) for row in rows):
        compared = [row for row in rows if (row.ranks, row.bytes) == (ranks, size)]
        first = min(compared, key=lambda row: row.ratio)
        clear = first.ratio_high < 1
        winners.append(Best(ranks, size, first.algorithm, first.seconds, first.ratio, clear))
    return winners


def _link(rows: Sequence[StudyRow], laws: dict[str, Law | None]) -> LinkFacts:
    messages = [
        Message(law.hops(row.ranks), law.volume(row.ranks) * row.bytes, row.seconds)
        for row in rows
        if (law := laws.get(row.algorithm))
    ]
    link = fit(messages)
    return LinkFacts(link.latency, link.bandwidth if math.isfinite(link.bandwidth) else None)


def _machine(world: World) -> tuple[int, int]:
    """Return the numbers of hosts and cores of the ranks."""
    local = json.dumps([socket.gethostname(), sorted(os.sched_getaffinity(0))])
    pairs = [json.loads(data) for data in gather_bytes(world, local.encode())]
    cores = {(host, core) for host, numbers in pairs for core in numbers}
    return len({host for host, _ in pairs}), len(cores)
