"""Perform each collective once on small arrays and record the data of all ranks before and after.

Rank r has the number 10 (r + 1), or 10 (r + 1), 10 (r + 1) + 1 ... with one number per rank, so
that each number shows its origin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.system.output.page import Section
from hvdtrain.system.output.tables import Table, entry

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py

Cells = list[int]
Numbers = NDArray[np.int64]
World = Any  # an mpi4py communicator

# Dimensions of a diagram in pixels.
WIDE, HIGH = 34, 24  # of a cell
ROW = 32  # distance of rows
LEFT, TOP = 52, 26  # of the first cell
GAP = 110  # between the columns before and after
DIGIT = 9  # additional width per digit beyond two

HOW_TO_READ = (
    "Each rank has a row and a colour. A number has the colour of the rank from which it "
    "originates; a sum over all ranks is grey. Lines show which ranks receive data of a rank."
)

UNIT = 10  # the first number of rank r is UNIT (r + 1); a power of 10


@dataclass(frozen=True)
class Demonstration:
    """A collective: its effect, its use in a training, and its call."""

    name: str
    effect: str
    use: str
    before: Callable[[int, int], Cells]  # data of a rank, from rank and size
    after: Callable[[int, int], Cells]  # the same after it, here only for the length
    run: Callable[[World, Numbers, Numbers], object]  # from the former to the latter


@dataclass(frozen=True)
class Outcome:
    """Data of all ranks before and after a collective, by rank."""

    collective: Demonstration
    before: list[Cells]
    after: list[Cells]

    def origins(self, value: int) -> list[tuple[int, int]]:
        """Return the origins of ``value`` as (rank, index): its own, or those of all summands."""
        cells = [(r, i, v) for r, row in enumerate(self.before) for i, v in enumerate(row)]
        if same := [(rank, index) for rank, index, number in cells if number == value]:
            return same[:1]
        indices = {index for _, index, _ in cells}
        sums = {i: sum(number for _, index, number in cells if index == i) for i in indices}
        return [(rank, index) for rank, index, _ in cells if sums[index] == value]

    def to_json(self) -> dict[str, object]:
        """Return name, meaning and numbers for ``--json``."""
        done = self.collective
        meaning = {"name": done.name, "what": done.effect, "use": done.use}
        return {**meaning, "before": self.before, "after": self.after}


def run_all(ranks: Mpi4py) -> list[Outcome]:
    """Perform each collective and return the outcomes on all ranks; all ranks together."""
    return [_outcome(ranks, collective) for collective in COLLECTIVES]


def text(outcomes: list[Outcome]) -> str:
    """Return a table per collective, with a line per rank."""
    size = len(outcomes[0].before)
    parts = [f"{size} rank{'s' * (size > 1)}: use `mpirun -n N` for another number"]
    for outcome in outcomes:
        done = outcome.collective
        pairs = zip(outcome.before, outcome.after, strict=True)
        rows = [[str(rank), *map(_cells, pair)] for rank, pair in enumerate(pairs)]
        title = f"{done.name}: {done.effect}"
        shown = Table(title, ("rank", "before", "after"), rows).text
        parts.append(f"{shown}\n{entry('  ', f'In training: {done.use}')}")
    return "\n\n".join(parts)


def section(outcomes: list[Outcome]) -> Section:
    """Return the section of the page, with a diagram per collective."""
    diagrams = [(outcome.collective, diagram(outcome)) for outcome in outcomes]
    return Section("Effect of each collective", (HOW_TO_READ,), diagrams=diagrams)


def diagram(outcome: Outcome) -> dict[str, object]:
    """Return cells and lines of a diagram: a row per rank, before on the left, after on the right.

    A line leads from each rank to those that receive a number of it. Line and cell have the colour
    of the rank from which the number originates; a sum has none.
    """
    ranks = len(outcome.before)
    longest = max(len(str(v)) for rows in (outcome.before, outcome.after) for r in rows for v in r)
    wide = WIDE + DIGIT * max(0, longest - 2)
    right = LEFT + wide * _columns(outcome.before) + GAP
    cells, ways = [], set()
    for side, rows in ((LEFT, outcome.before), (right, outcome.after)):
        for rank, row in enumerate(rows):
            for column, value in enumerate(row):
                sources = outcome.origins(value)
                hue = _hue(sources[0][0], ranks) if len(sources) == 1 else None
                x, y = side + wide * column, TOP + ROW * rank
                cells.append({"x": x, "y": y, "value": value, "hue": hue})
                ways |= {(source, rank) for source, _ in sources if side == right}
    rows_at = [TOP + ROW * rank + HIGH // 2 for rank in range(ranks)]
    lines = [
        {
            "from": (LEFT + wide * len(outcome.before[source]), rows_at[source]),
            "to": (right, rows_at[rank]),
            "hue": _hue(source, ranks),
        }
        for source, rank in sorted(ways)
    ]
    return {
        "cells": cells,
        "lines": lines,
        "cell": (wide, HIGH),
        "size": (right + wide * _columns(outcome.after) + 4, TOP + ROW * ranks),
        "rows": list(enumerate(rows_at)),
        "heads": ((LEFT, "before"), (right, "after")),
    }


def _columns(rows: list[Cells]) -> int:
    return max(map(len, rows))


def _hue(rank: int, ranks: int) -> int:
    """Return the hue of a rank in degrees."""
    return (210 + 360 * rank // ranks) % 360


def _cells(numbers: Cells) -> str:
    return " ".join(map(str, numbers)) or "-"


def _outcome(ranks: Mpi4py, collective: Demonstration) -> Outcome:
    before = collective.before(ranks.rank, ranks.size)
    received = np.zeros_like(collective.after(ranks.rank, ranks.size), np.int64)
    collective.run(ranks.world, np.array(before, np.int64), received)
    held = ranks.gather_json([before, received.tolist()])
    return Outcome(collective, [first for first, _ in held], [last for _, last in held])


# Data of a rank before a collective


def _single(rank: int, size: int) -> Cells:
    return _several(rank, size)[:1]


def _several(rank: int, size: int) -> Cells:
    unit = UNIT
    while unit < size:
        unit *= 10
    return [unit * (rank + 1) + index for index in range(size)]


def _several_on_root(rank: int, size: int) -> Cells:
    return _several(rank, size) if rank == 0 else []


# Collectives that need more than one argument besides the numbers


def _broadcast(world: World, mine: Numbers, received: Numbers) -> None:
    received[:] = mine
    world.Bcast(received)


def _send_and_receive(world: World, mine: Numbers, received: Numbers) -> None:
    following, previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size
    world.Sendrecv(mine, dest=following, recvbuf=received, source=previous)


COLLECTIVES = (
    Demonstration(
        "broadcast",
        "all ranks get the data of rank 0",
        "step 6, all replicas start with the weights of rank 0.",
        _several,
        _several,
        _broadcast,
    ),
    Demonstration(
        "scatter",
        "rank 0 distributes its data, one part per rank",
        "data read by one rank. Not needed in step 3: every rank reads its own part.",
        _several_on_root,
        _single,
        lambda world, mine, received: world.Scatter(mine, received),
    ),
    Demonstration(
        "gather",
        "rank 0 gets the data of all ranks, by rank",
        "logs and results written by one rank.",
        _single,
        _several_on_root,
        lambda world, mine, received: world.Gather(mine, received),
    ),
    Demonstration(
        "reduce",
        "rank 0 gets the sum",
        "a loss shown by rank 0 only.",
        _several,
        _several_on_root,
        lambda world, mine, received: world.Reduce(mine, received),
    ),
    Demonstration(
        "allreduce",
        "all ranks get the sum; a reduce and a broadcast in one",
        "step 5, the gradients of the global batch; step 8, the metrics of all samples.",
        _several,
        _several,
        lambda world, mine, received: world.Allreduce(mine, received),
    ),
    Demonstration(
        "allgather",
        "all ranks get the data of all ranks; a gather and a broadcast in one",
        "step 1, hosts and software of the ranks; digests of the replicas.",
        _single,
        _several,
        lambda world, mine, received: world.Allgather(mine, received),
    ),
    Demonstration(
        "reduce-scatter",
        "each rank gets its part of the sum; followed by an allgather, an allreduce",
        "ZeRO and FSDP, in which a rank updates only its part of the weights.",
        _several,
        _single,
        lambda world, mine, received: world.Reduce_scatter_block(mine, received),
    ),
    Demonstration(
        "alltoall",
        "each rank distributes its data; rows become columns",
        "mixtures of experts, in which samples are sent to the rank of their expert.",
        _several,
        _several,
        lambda world, mine, received: world.Alltoall(mine, received),
    ),
    Demonstration(
        "send and receive",
        "each rank sends to the next; not a collective, but the basis of them",
        "pipelines, whose stages send activations; the steps of a ring allreduce.",
        _single,
        _single,
        _send_and_receive,
    ),
)
