"""Compare allreduce algorithms by message size and number of ranks.

    mpirun -n 4 python -m hvdtrain.collectives --study --json

Rank 0 prints one JSON object:

    {"ranks": 4, "hosts": 1, "cores": 2, "gradient_bytes": 102000000, "notes": [...],
     "algorithms": {NAME: {"origin": "Open MPI" or "hvdtrain", "variables": {...}}},
     "rows": [ROW, ...], "best": [BEST, ...], "link": {...}}

A ROW has ``ranks`` (the first ranks of the job; the others sleep), ``bytes``, ``algorithm``,
``repeats``, ``seconds`` (median of the slowest rank's time), ``seconds_min``, ``seconds_max``, and
``ratio``, ``ratio_low``, ``ratio_high``: median and quartiles over the repeats of the ratio of its
time to that of MPI's default in the same repeat. Each repeat runs every algorithm once, in random
order, so that drift and order affect all algorithms equally.

A BEST has, for ``ranks`` and ``bytes``, the ``algorithm`` with the smallest ratio, its ``ratio``,
and whether it is ``clear``: faster than MPI's default in three of four repeats.

``link`` has ``latency_seconds`` and ``bytes_per_second``, fitted to the rows whose algorithm has a
law in ``model``: of Open MPI, or, if these are not available, of hvdtrain (slower, in Python).
"""

from __future__ import annotations

import math
import os
import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from hvdtrain.collectives.cost import (
    RABENSEIFNER,
    RECURSIVE_DOUBLING,
    RING,
    Law,
    Link,
    Message,
    fit,
)
from hvdtrain.collectives.mpi4py import wait_for_all
from hvdtrain.commands.collectives import algorithms, open_mpi
from hvdtrain.commands.collectives.algorithms import MPI_CHOICE, OPEN_MPI, OWN
from hvdtrain.commands.collectives.timing import ELEMENT, repeats_for
from hvdtrain.errors import HvdtrainError

SIZES = (
    4,
    2**10,
    16 * 2**10,
    256 * 2**10,
    2**21,
    16 * 2**20,
)  # bytes, in addition to the gradient size
SECONDS = 1.0  # for all algorithms, per size and number of ranks
GRADIENT = 102 * 10**6  # bytes of ResNet-50's 25.6 million weights in float32

Floats = NDArray[np.float32]
World = Any  # an mpi4py communicator
Row = dict[str, Any]


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
        compared += [_of_open_mpi(world, number) for number in open_mpi.ALGORITHMS]
    except HvdtrainError as error:
        notes.append(f"algorithms of Open MPI are not available: {error}")
    names = world.allgather(socket.gethostname())
    hierarchical = algorithms.Hierarchical(world, names.index(names[world.rank]))
    implemented: tuple[tuple[str, algorithms.Algorithm, Law | None], ...] = (
        ("ring", algorithms.ring, RING),
        ("recursive doubling", algorithms.recursive_doubling, RECURSIVE_DOUBLING),
        ("Rabenseifner", algorithms.rabenseifner, RABENSEIFNER),
        ("hierarchical", hierarchical, None),
    )
    for name, run, law in implemented:
        compared.append(Algorithm(f"{name}, ours", OWN, _on(world, run), law))
    return compared, notes


def _of_open_mpi(world: World, number: int) -> Algorithm:
    chosen = open_mpi.choose(world, number)
    return Algorithm(
        open_mpi.ALGORITHMS[number],
        OPEN_MPI,
        lambda data: chosen.Allreduce(MPI.IN_PLACE, data),
        open_mpi.LAWS.get(number),
        open_mpi.variables(number),
    )


def _on(world: World, run: algorithms.Algorithm) -> Callable[[Floats], object]:
    return lambda data: run(world, data)


def rank_counts(size: int) -> tuple[int, ...]:
    """Return the powers of two from 2 to ``size``, and ``size``."""
    return tuple(sorted({*(2**power for power in range(1, size.bit_length())), size}))


def measure(
    all_ranks: World, counts: Sequence[int], sizes: Sequence[int], gradient: int, budget: float
) -> dict[str, Any]:
    """Measure all algorithms for each number of ranks and size; all ranks together.

    Args:
        all_ranks: communicator of at least two ranks.
        counts: numbers of ranks.
        sizes: message sizes in bytes.
        gradient: an additional size, bytes of the gradients of a training.
        budget: seconds per size and number of ranks.

    Returns:
        The JSON object of ``--json`` on rank 0; elsewhere without rows.

    Raises:
        HvdtrainError: an algorithm gives a wrong sum.
    """
    rows: list[Row] = []
    notes: list[str] = []
    laws: dict[str, Law | None] = {}
    described: dict[str, Any] = {}
    for count in counts:
        world = all_ranks.Split(0 if all_ranks.rank < count else MPI.UNDEFINED, all_ranks.rank)
        if world != MPI.COMM_NULL:
            compared, notes = candidates(world)
            origins = {entry.origin for entry in compared}
            fitted = OPEN_MPI if OPEN_MPI in origins else OWN
            laws = {entry.name: entry.law for entry in compared if entry.origin == fitted}
            described = {
                entry.name: {"origin": entry.origin, "variables": entry.variables}
                for entry in compared
            }
            for size in sorted({*sizes, gradient}):
                rows += compare(world, compared, size, budget)
        wait_for_all(all_ranks)
    hosts, cores = _machine(all_ranks)
    return {
        "ranks": all_ranks.size,
        "hosts": hosts,
        "cores": cores,
        "gradient_bytes": gradient,
        "notes": notes,
        "algorithms": described,
        "rows": rows,
        "best": best(rows),
        "link": _link(rows, laws) if rows else None,
    }


def compare(world: World, compared: Sequence[Algorithm], size: int, budget: float) -> list[Row]:
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
    repeats = world.bcast(repeats_for(time.perf_counter() - began, budget))
    mine = np.empty((repeats, len(compared)))
    for repeat in range(repeats):
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
    if not world.allreduce(bool((data == expected).all()), op=MPI.LAND):
        raise HvdtrainError(f"{algorithm.name}: a sum over {world.size} ranks is not {expected}")


def _once(world: World, algorithm: Algorithm, data: Floats) -> float:
    world.Barrier()
    began = time.perf_counter()
    algorithm.run(data)
    return time.perf_counter() - began


def _row(ranks: int, size: int, name: str, slowest: Any, index: int) -> Row:
    """Return the row of an algorithm; ``slowest``: seconds by repeat and algorithm."""
    times = slowest[:, index]
    low, middle, high = np.percentile(times / slowest[:, 0], [25, 50, 75])
    return {
        "ranks": ranks,
        "bytes": size,
        "algorithm": name,
        "repeats": len(times),
        "seconds": statistics.median(times.tolist()),
        "seconds_min": float(times.min()),
        "seconds_max": float(times.max()),
        "ratio": float(middle),
        "ratio_low": float(low),
        "ratio_high": float(high),
    }


def best(rows: Sequence[Row]) -> list[Row]:
    """Return the fastest algorithm for each number of ranks and size."""
    winners = []
    for ranks, size in dict.fromkeys((row["ranks"], row["bytes"]) for row in rows):
        compared = [row for row in rows if (row["ranks"], row["bytes"]) == (ranks, size)]
        first = min(compared, key=lambda row: float(row["ratio"]))
        kept = {key: first[key] for key in ("ranks", "bytes", "algorithm", "seconds", "ratio")}
        winners.append({**kept, "clear": first["ratio_high"] < 1})
    return winners


def _link(rows: Sequence[Row], laws: dict[str, Law | None]) -> dict[str, Any]:
    messages = [
        Message(law.hops(row["ranks"]), law.volume(row["ranks"]) * row["bytes"], row["seconds"])
        for row in rows
        if (law := laws.get(row["algorithm"]))
    ]
    link: Link = fit(messages)
    speed = link.bandwidth if math.isfinite(link.bandwidth) else None
    return {"latency_seconds": link.latency, "bytes_per_second": speed}


def _machine(world: World) -> tuple[int, int]:
    """Return the numbers of hosts and cores of the ranks."""
    pairs = world.allgather((socket.gethostname(), sorted(os.sched_getaffinity(0))))
    cores = {(host, core) for host, local in pairs for core in local}
    return len({host for host, _ in pairs}), len(cores)
