"""Allreduce algorithms of MPI libraries, implemented with point-to-point messages.

Each sums ``data``, a NumPy vector of the same length on all ranks, in place. Results are bit-equal
on all ranks, as each element is summed by one rank, or by both of a pair from the same two numbers.
``model`` gives their cost.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", Int. J. High Performance Computing Applications 19 (2005), section 4.5; for the ring P.
Patarasuk, X. Yuan, J. Parallel Distrib. Comput. 69 (2009).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.collectives.cost import power_below
from hvdtrain.steps.sharding import bounds

Data = NDArray[Any]
World = Any  # an mpi4py communicator
Algorithm = Callable[[World, Data], None]

MPI_CHOICE = "MPI's choice"  # the default algorithm of the library
OPEN_MPI, OWN = "Open MPI", "hvdtrain"  # origin of an algorithm


def ring(world: World, data: Data) -> None:
    """Sum around a ring: a reduce-scatter, then an allgather.

    2 (p - 1) messages of 1/p of the data: minimal volume, maximal latency.
    """
    rank, size = world.rank, world.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    parts = [data[slice(*bounds(len(data), part, size))] for part in range(size)]
    buffer = np.empty_like(parts[0])  # the longest
    for step in range(size - 1):
        sent, summed = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        received = buffer[: len(summed)]
        world.Sendrecv(sent, dest=following, recvbuf=received, source=previous)
        summed += received
    for step in range(size - 1):
        sent, received = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
        world.Sendrecv(sent, dest=following, recvbuf=received, source=previous)


def recursive_doubling(world: World, data: Data) -> None:
    """Exchange all data with the rank at distance 1, 2, 4 ... and add: log2 p full messages."""
    group = _fold(world, data)
    if group.takes_part:
        received = np.empty_like(data)
        distance = 1
        while distance < group.size:
            partner = group.rank_of(group.index ^ distance)
            world.Sendrecv(data, dest=partner, recvbuf=received, source=partner)
            data += received
            distance *= 2
    _unfold(world, data, group)


def rabenseifner(world: World, data: Data) -> None:
    """Reduce-scatter by recursive halving, then allgather by recursive doubling.

    2 log2 p messages with the volume of the ring.
    """
    group = _fold(world, data)
    if group.takes_part:
        _halve_and_double(world, data, group)
    _unfold(world, data, group)


def _halve_and_double(world: World, data: Data, group: _Group) -> None:
    def span(low: int, high: int) -> Data:
        """Return parts ``low`` to ``high`` of the data, one per rank."""
        first, last = (bounds(len(data), part, group.size) for part in (low, high - 1))
        return data[first[0] : last[1]]

    buffer = np.empty(len(data) // 2 + group.size, data.dtype)
    low, distance = 0, group.size // 2
    while distance:
        partner = group.rank_of(group.index ^ distance)
        middle = low + distance
        halves = span(low, middle), span(middle, middle + distance)
        upper = bool(group.index & distance)
        kept, sent = halves[upper], halves[not upper]
        received = buffer[: len(kept)]
        world.Sendrecv(sent, dest=partner, recvbuf=received, source=partner)
        kept += received
        low, distance = middle if upper else low, distance // 2
    distance = 1
    while distance < group.size:
        partner = group.rank_of(group.index ^ distance)
        mine, theirs = low, low ^ distance
        sent, received = span(mine, mine + distance), span(theirs, theirs + distance)
        world.Sendrecv(sent, dest=partner, recvbuf=received, source=partner)
        low, distance = min(mine, theirs), 2 * distance


@dataclass(frozen=True)
class _Group:
    """A power of two of ranks; each of the first ``extra`` also represents its lower neighbour."""

    size: int
    extra: int  # ranks beyond the power of two
    index: int  # of this rank in the group; -1: represented by its neighbour

    @property
    def takes_part(self) -> bool:
        return self.index >= 0

    def rank_of(self, index: int) -> int:
        """Return the rank in the world of an index in the group."""
        return 2 * index + 1 if index < self.extra else index + self.extra


def _fold(world: World, data: Data) -> _Group:
    """Reduce the ranks to a power of two: of the first ones, even ranks add to odd ranks."""
    size = power_below(world.size)
    extra = world.size - size
    if world.rank >= 2 * extra:
        return _Group(size, extra, world.rank - extra)
    if world.rank % 2 == 0:
        world.Send(data, dest=world.rank + 1)
        return _Group(size, extra, -1)
    _add_from(world, data, world.rank - 1)
    return _Group(size, extra, world.rank // 2)


def _unfold(world: World, data: Data, group: _Group) -> None:
    """Send the sum to the represented ranks."""
    if not group.takes_part:
        world.Recv(data, source=world.rank + 1)
    elif world.rank < 2 * group.extra:
        world.Send(data, dest=world.rank - 1)


def _add_from(world: World, data: Data, rank: int) -> None:
    received = np.empty_like(data)
    world.Recv(received, source=rank)
    data += received


class Hierarchical:
    """Reduce within each host, allreduce between one rank per host, broadcast within each host.

    Few messages cross the slow links, but only the first rank of a host uses them.

    Args:
        world: communicator; all its ranks must create this together.
        host: number of this rank's host.
    """

    def __init__(self, world: World, host: int) -> None:
        self.local = world.Split(host, world.rank)
        self.leads = self.local.rank == 0
        self.leaders = world.Split(self.leads, world.rank)  # the other ranks: an unused one

    def __call__(self, world: World, data: Data) -> None:
        """Sum ``data``; ``world`` is the communicator of ``__init__``."""
        _reduce(self.local, data)
        if self.leads:
            rabenseifner(self.leaders, data)
        _broadcast(self.local, data)


def _reduce(world: World, data: Data) -> None:
    """Sum to rank 0 along a binomial tree; data of other ranks are overwritten."""
    distance = 1
    while distance < world.size:
        if world.rank & distance:
            world.Send(data, dest=world.rank - distance)
            return
        if world.rank + distance < world.size:
            _add_from(world, data, world.rank + distance)
        distance *= 2


def _broadcast(world: World, data: Data) -> None:
    """Broadcast rank 0's ``data`` down the same tree."""
    distance = 1
    while distance < world.size and not world.rank & distance:
        distance *= 2
    if world.rank:
        world.Recv(data, source=world.rank - distance)
    while distance > 1:
        distance //= 2
        if world.rank + distance < world.size:
            world.Send(data, dest=world.rank + distance)


# Times of algorithms


@dataclass(frozen=True)
class Selection:
    """How to select an algorithm; ``variables`` select it in a training."""

    origin: str
    variables: dict[str, str]


@dataclass(frozen=True)
class StudyRow:
    """Times of an algorithm at one size and number of ranks.

    The seconds are those of the slowest rank over the repeats. The ratios are median and quartiles
    of its time to that of MPI's default in the same repeat.
    """

    ranks: int  # the first ranks of the job; the others sleep
    bytes: int
    algorithm: str
    repeats: int
    seconds: float  # median
    seconds_min: float
    seconds_max: float
    ratio: float
    ratio_low: float
    ratio_high: float


@dataclass(frozen=True)
class Best:
    """The algorithm with the smallest ratio at one size and number of ranks."""

    ranks: int
    bytes: int
    algorithm: str
    seconds: float
    ratio: float
    clear: bool  # faster than MPI's default in three of four repeats


@dataclass(frozen=True)
class LinkFacts:
    """Latency and bandwidth between ranks; None if time does not depend on size."""

    latency_seconds: float
    bytes_per_second: float | None


@dataclass(frozen=True)
class AllreduceStudy:
    """Times of all algorithms; without rows and link on ranks other than 0."""

    ranks: int
    hosts: int
    cores: int
    gradient_bytes: int
    notes: list[str]
    algorithms: dict[str, Selection]
    rows: list[StudyRow]
    best: list[Best]
    link: LinkFacts | None

    @property
    def counts(self) -> list[int]:
        """Return the numbers of ranks."""
        return sorted({row.ranks for row in self.rows})

    @property
    def sizes(self) -> list[int]:
        """Return the message sizes."""
        return sorted({row.bytes for row in self.rows})

    def names(self, origin: str) -> list[str]:
        """Return the names of the algorithms of an origin."""
        return [name for name, entry in self.algorithms.items() if entry.origin == origin]

    def rows_of(self, ranks: int, nbytes: int) -> dict[str, StudyRow]:
        """Return the row of each algorithm, by name."""
        rows = [row for row in self.rows if (row.ranks, row.bytes) == (ranks, nbytes)]
        return {row.algorithm: row for row in rows}
