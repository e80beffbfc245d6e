"""Do each collective once, on small arrays, and keep what every rank held before and after it.

Rank r begins with the numbers 10 (r + 1), 10 (r + 1) + 1 ..., one per rank where a collective
deals in several, so that every number tells where it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.output.tables import entry, message, table

Cells = list[int]
Numbers = NDArray[np.int64]
World = Any  # an mpi4py communicator

UNIT = 10  # the numbers of rank r begin with UNIT (r + 1); a power of 10, and more than the ranks


@dataclass(frozen=True)
class Collective:
    """A collective: what it does, where a training uses it, and how it is called."""

    name: str
    what: str
    use: str
    before: Callable[[int, int], Cells]  # of rank and size
    run: Callable[[World, Numbers], Numbers | None]  # what this rank holds after it, if anything


@dataclass(frozen=True)
class Outcome:
    """What every rank, by rank, held before a collective and after it."""

    collective: Collective
    before: list[Cells]
    after: list[Cells]

    def origins(self, value: int) -> list[tuple[int, int]]:
        """Return where ``value`` comes from: (rank, place) of itself, or of all that it sums."""
        cells = [(r, p, v) for r, row in enumerate(self.before) for p, v in enumerate(row)]
        if same := [(rank, place) for rank, place, number in cells if number == value]:
            return same[:1]
        places = {place for _, place, _ in cells}
        sums = {p: sum(number for _, place, number in cells if place == p) for p in places}
        return [(rank, place) for rank, place, _ in cells if sums[place] == value]

    def to_json(self) -> dict[str, Any]:
        """Return name, meaning and numbers for ``--json``."""
        one = self.collective
        told = {"name": one.name, "what": one.what, "use": one.use}
        return {**told, "before": self.before, "after": self.after}


def run_all(world: World) -> list[Outcome]:
    """Do each collective; all ranks together, and every rank gets all that was held."""
    return [_outcome(world, one) for one in COLLECTIVES]


def text(outcomes: list[Outcome]) -> str:
    """Return each collective as a table: a line per rank, what it held before and after."""
    size = len(outcomes[0].before)
    parts = [f"{size} rank{'s' * (size > 1)}: `mpirun -n N` starts another number", ""]
    for outcome in outcomes:
        one = outcome.collective
        pairs = zip(outcome.before, outcome.after, strict=True)
        rows = [[str(rank), *map(_cells, pair)] for rank, pair in enumerate(pairs)]
        parts += [message(f"{one.name}: {one.what}"), table(("rank", "before", "after"), rows)]
        parts += [entry("  ", f"In training: {one.use}"), ""]
    return "\n".join(parts[:-1])


def _cells(numbers: Cells) -> str:
    return " ".join(map(str, numbers)) or "-"


def _outcome(world: World, one: Collective) -> Outcome:
    before = one.before(world.rank, world.size)
    received = one.run(world, np.array(before, np.int64))
    after = [] if received is None else received.tolist()
    held = world.allgather((before, after))
    return Outcome(one, [first for first, _ in held], [last for _, last in held])


# What a rank holds before


def _one(rank: int, size: int) -> Cells:
    return _several(rank, size)[:1]


def _several(rank: int, size: int) -> Cells:
    unit = UNIT
    while unit < size:
        unit *= 10
    return [unit * (rank + 1) + place for place in range(size)]


def _several_on_root(rank: int, size: int) -> Cells:
    return _several(rank, size) if rank == 0 else []


# How MPI is called


def _broadcast(world: World, mine: Numbers) -> Numbers:
    world.Bcast(mine, root=0)
    return mine


def _scatter(world: World, mine: Numbers) -> Numbers:
    received = np.empty(1, np.int64)
    world.Scatter(mine if world.rank == 0 else None, received, root=0)
    return received


def _gather(world: World, mine: Numbers) -> Numbers | None:
    received = np.empty(world.size, np.int64) if world.rank == 0 else None
    world.Gather(mine, received, root=0)
    return received


def _reduce(world: World, mine: Numbers) -> Numbers | None:
    total = np.empty_like(mine) if world.rank == 0 else None
    world.Reduce(mine, total, root=0)
    return total


def _allreduce(world: World, mine: Numbers) -> Numbers:
    total = np.empty_like(mine)
    world.Allreduce(mine, total)
    return total


def _allgather(world: World, mine: Numbers) -> Numbers:
    received = np.empty(world.size, np.int64)
    world.Allgather(mine, received)
    return received


def _reduce_scatter(world: World, mine: Numbers) -> Numbers:
    total = np.empty(1, np.int64)
    world.Reduce_scatter_block(mine, total)
    return total


def _alltoall(world: World, mine: Numbers) -> Numbers:
    received = np.empty_like(mine)
    world.Alltoall(mine, received)
    return received


def _send_and_receive(world: World, mine: Numbers) -> Numbers:
    received = np.empty_like(mine)
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    world.Sendrecv(mine, dest=following, recvbuf=received, source=previous)
    return received


COLLECTIVES = (
    Collective(
        "broadcast",
        "all ranks get what rank 0 holds",
        "step 6, all replicas begin with the weights of rank 0.",
        _several,
        _broadcast,
    ),
    Collective(
        "scatter",
        "rank 0 deals out what it holds, a part to each",
        "data that one rank has read. Step 3 does without: every rank reads its own part.",
        _several_on_root,
        _scatter,
    ),
    Collective(
        "gather",
        "rank 0 gets what each rank holds, by rank",
        "logs and results that one rank writes.",
        _one,
        _gather,
    ),
    Collective(
        "reduce",
        "rank 0 gets the sum",
        "a loss that only rank 0 shows.",
        _several,
        _reduce,
    ),
    Collective(
        "allreduce",
        "all ranks get the sum; a reduce and a broadcast in one",
        "step 5, the gradients of the global batch; step 8, the metrics of all samples.",
        _several,
        _allreduce,
    ),
    Collective(
        "allgather",
        "all ranks get what each rank holds; a gather and a broadcast in one",
        "step 1, who is where with which software; the digests of the replicas.",
        _one,
        _allgather,
    ),
    Collective(
        "reduce-scatter",
        "each rank gets its part of the sum; with an allgather after it, an allreduce",
        "ZeRO and FSDP, where a rank updates only its part of the weights.",
        _several,
        _reduce_scatter,
    ),
    Collective(
        "alltoall",
        "each rank deals out what it holds; rows become columns",
        "mixtures of experts, where samples travel to the rank of their expert.",
        _several,
        _alltoall,
    ),
    Collective(
        "send and receive",
        "each rank sends to the next one; no collective, but what they are made of",
        "pipelines, whose stages hand activations on; the steps of a ring allreduce.",
        _one,
        _send_and_receive,
    ),
)
