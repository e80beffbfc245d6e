"""Compare algorithms of allreduce by message size and number of ranks: which is best where.

    mpirun -n 4 python -m hvdtrain.collectives --study --json

Rank 0 prints one JSON object:

    {"ranks": 4, "hosts": 1, "cores": 2, "gradient_bytes": 102000000, "notes": [...],
     "algorithms": {NAME: {"origin": "Open MPI" or "hvdtrain", "variables": {...}}},
     "rows": [ROW, ...], "best": [BEST, ...], "link": {...}}

A ROW holds ``ranks`` (the first so many of the job; the others sleep), ``bytes``, ``algorithm``,
``repeats``, ``seconds`` (median of the slowest rank's), ``seconds_min``, ``seconds_max``, and
``ratio``, ``ratio_low``, ``ratio_high``: median and quartiles, over the repeats, of its time to
that of MPI's own choice in the same repeat. In each repeat every algorithm runs once, in an order
drawn anew, so that a drift of the machine, or what ran before, hits all of them alike.

A BEST names, for ``ranks`` and ``bytes``, the ``algorithm`` of the smallest ratio, its ``ratio``,
and whether it is ``clear``: faster than MPI's choice in three repeats of four.

``link`` has ``latency_seconds`` and ``bytes_per_second``, fitted to the rows whose algorithm has a
law in ``model``: of Open MPI's, or, where they are left out, of our own, in which Python is slower.
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

from hvdtrain.collectives import algorithms, open_mpi
from hvdtrain.collectives.algorithms import MPI_CHOICE, OPEN_MPI, OWN
from hvdtrain.collectives.bench import ELEMENT, repeats_for
from hvdtrain.collectives.model import (
    RABENSEIFNER,
    RECURSIVE_DOUBLING,
    RING,
    Law,
    Link,
    Message,
    fit,
)
from hvdtrain.collectives.mpi4py import wait_for_all
from hvdtrain.errors import HvdtrainError

SIZES = (4, 2**10, 16 * 2**10, 256 * 2**10, 2**21, 16 * 2**20)  # bytes, and those of the gradients
SECONDS = 1.0  # for all algorithms together, per size and number of ranks
GRADIENT = 102 * 10**6  # bytes of ResNet-50's 25.6 million weights in float32

Floats = NDArray[np.float32]
World = Any  # an mpi4py communicator
Row = dict[str, Any]


@dataclass(frozen=True)
class Algorithm:
    """One of those that are compared, on the ranks of one communicator."""

    name: str
    origin: str
    run: Callable[[Floats], object]
    law: Law | None = None
    variables: dict[str, str] = field(default_factory=dict)  # by which a training takes it


def candidates(world: World) -> tuple[list[Algorithm], list[str]]:
    """Return what can be compared on ``world``, MPI's choice first, and what cannot, and why.

    All ranks of ``world`` together.
    """
    found = [Algorithm(MPI_CHOICE, MPI_CHOICE, lambda data: world.Allreduce(MPI.IN_PLACE, data))]
    notes = []
    try:
        found += [_of_open_mpi(world, number) for number in open_mpi.ALGORITHMS]
    except HvdtrainError as error:
        notes.append(f"the algorithms of Open MPI are left out: {error}")
    names = world.allgather(socket.gethostname())
    hierarchical = algorithms.Hierarchical(world, names.index(names[world.rank]))
    own: tuple[tuple[str, algorithms.Algorithm, Law | None], ...] = (
        ("ring", algorithms.ring, RING),
        ("recursive doubling", algorithms.recursive_doubling, RECURSIVE_DOUBLING),
        ("Rabenseifner", algorithms.rabenseifner, RABENSEIFNER),
        ("hierarchical", hierarchical, None),
    )
    for name, run, law in own:
        found.append(Algorithm(f"{name}, ours", OWN, _on(world, run), law))
    return found, notes


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
    everyone: World, counts: Sequence[int], sizes: Sequence[int], gradient: int, budget: float
) -> dict[str, Any]:
    """Measure all algorithms at each number of ranks and size; all ranks of ``everyone`` together.

    Args:
        everyone: two ranks or more.
        counts: numbers of ranks.
        sizes: bytes of the messages.
        gradient: another one, bytes of the gradients of a training.
        budget: seconds per size and number of ranks.

    Returns:
        What ``--json`` prints, on rank 0; elsewhere without rows.

    Raises:
        HvdtrainError: an algorithm sums wrongly.
    """
    rows: list[Row] = []
    notes: list[str] = []
    laws: dict[str, Law | None] = {}
    described: dict[str, Any] = {}
    for count in counts:
        world = everyone.Split(0 if everyone.rank < count else MPI.UNDEFINED, everyone.rank)
        if world != MPI.COMM_NULL:
            compared, notes = candidates(world)
            writer = OPEN_MPI if any(one.origin == OPEN_MPI for one in compared) else OWN
            laws = {one.name: one.law for one in compared if one.origin == writer}
            described = {
                one.name: {"origin": one.origin, "variables": one.variables} for one in compared
            }
            for size in sorted({*sizes, gradient}):
                rows += compare(world, compared, size, budget)
        wait_for_all(everyone)
    hosts, cores = _machine(everyone)
    return {
        **{"ranks": everyone.size, "hosts": hosts, "cores": cores, "gradient_bytes": gradient},
        **{"notes": notes, "algorithms": described, "rows": rows, "best": best(rows)},
        "link": _link(rows, laws) if rows else None,
    }


def compare(world: World, compared: Sequence[Algorithm], size: int, budget: float) -> list[Row]:
    """Time each of ``compared`` on messages of ``size`` bytes; rows on rank 0, else none.

    Raises:
        HvdtrainError: an algorithm sums wrongly.
    """
    data = np.zeros(max(1, size // ELEMENT), np.float32)
    for one in compared:
        _check(world, one, data)
    data.fill(0)  # whose sum is that, however often
    began = time.perf_counter()
    for one in compared:
        _once(world, one, data)
    repeats = world.bcast(repeats_for(time.perf_counter() - began, budget))
    mine = np.empty((repeats, len(compared)))
    for repeat in range(repeats):
        order = np.random.default_rng(repeat).permutation(len(compared))  # the same on all ranks
        for place in order:
            mine[repeat, place] = _once(world, compared[place], data)
    slowest = np.empty_like(mine) if world.rank == 0 else None
    world.Reduce(mine, slowest, op=MPI.MAX)
    if slowest is None:
        return []
    return [_row(world.size, size, one.name, slowest, n) for n, one in enumerate(compared)]


def _check(world: World, one: Algorithm, data: Floats) -> None:
    """Make sure that rank + 1, summed over n ranks, is n (n + 1) / 2."""
    data.fill(world.rank + 1)
    one.run(data)
    expected = world.size * (world.size + 1) / 2
    if not world.allreduce(bool((data == expected).all()), op=MPI.LAND):
        raise HvdtrainError(f"{one.name}: a sum over {world.size} ranks is not {expected}")


def _once(world: World, one: Algorithm, data: Floats) -> float:
    world.Barrier()
    began = time.perf_counter()
    one.run(data)
    return time.perf_counter() - began


def _row(ranks: int, size: int, name: str, slowest: Any, place: int) -> Row:
    """Return the row of an algorithm; ``slowest``: seconds by repeat and algorithm."""
    times = slowest[:, place]
    low, middle, high = np.percentile(times / slowest[:, 0], [25, 50, 75])
    return {
        **{"ranks": ranks, "bytes": size, "algorithm": name, "repeats": len(times)},
        "seconds": statistics.median(times.tolist()),
        **{"seconds_min": float(times.min()), "seconds_max": float(times.max())},
        **{"ratio": float(middle), "ratio_low": float(low), "ratio_high": float(high)},
    }


def best(rows: Sequence[Row]) -> list[Row]:
    """Return which algorithm is the fastest for each number of ranks and size."""
    found = []
    for ranks, size in dict.fromkeys((row["ranks"], row["bytes"]) for row in rows):
        some = [row for row in rows if (row["ranks"], row["bytes"]) == (ranks, size)]
        first = min(some, key=lambda row: float(row["ratio"]))
        kept = {key: first[key] for key in ("ranks", "bytes", "algorithm", "seconds", "ratio")}
        found.append({**kept, "clear": first["ratio_high"] < 1})
    return found


def _link(rows: Sequence[Row], laws: dict[str, Law | None]) -> dict[str, Any]:
    messages = [
        Message(law.hops(row["ranks"]), law.volume(row["ranks"]) * row["bytes"], row["seconds"])
        for row in rows
        if (law := laws.get(row["algorithm"]))
    ]
    found: Link = fit(messages)
    speed = found.bandwidth if math.isfinite(found.bandwidth) else None
    return {"latency_seconds": found.latency, "bytes_per_second": speed}


def _machine(world: World) -> tuple[int, int]:
    """Return on how many hosts and cores the ranks are."""
    held = world.allgather((socket.gethostname(), sorted(os.sched_getaffinity(0))))
    cores = {(host, core) for host, own in held for core in own}
    return len({host for host, _ in held}), len(cores)
