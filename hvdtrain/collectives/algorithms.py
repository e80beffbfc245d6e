"""Allreduce from point-to-point messages: the algorithms that libraries choose from.

Each sums ``data``, a NumPy vector of the same length on all ranks, in place, and leaves the same
bits on all ranks, since each element is summed by one rank, or by both of a pair from the same two
numbers. ``model`` says what each costs.

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

from hvdtrain.collectives.model import power_below
from hvdtrain.steps.sharding import bounds

Data = NDArray[Any]
World = Any  # an mpi4py communicator
Algorithm = Callable[[World, Data], None]

MPI_CHOICE = "MPI's choice"  # what a library takes that is not told
OPEN_MPI, OWN = "Open MPI", "hvdtrain"  # who has written an algorithm


def ring(world: World, data: Data) -> None:
    """Sum around a ring: a part per rank travels to be summed, then once more to be known to all.

    2 (p - 1) messages of 1/p of the data: the least to send, and the most to wait for.
    """
    rank, size = world.rank, world.size
    following, previous = (rank + 1) % size, (rank - 1) % size
    parts = [data[slice(*bounds(len(data), one, size))] for one in range(size)]
    buffer = np.empty_like(parts[0])  # the longest
    for step in range(size - 1):
        gone, come = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        received = buffer[: len(come)]
        world.Sendrecv(gone, dest=following, recvbuf=received, source=previous)
        come += received
    for step in range(size - 1):
        gone, come = parts[(rank + 1 - step) % size], parts[(rank - step) % size]
        world.Sendrecv(gone, dest=following, recvbuf=come, source=previous)


def recursive_doubling(world: World, data: Data) -> None:
    """Swap all data with the rank at distance 1, 2, 4 ... and add: log2 p messages of all of it."""
    group = _fold(world, data)
    if group.takes_part:
        received = np.empty_like(data)
        distance = 1
        while distance < group.size:
            partner = group.rank_of(group.place ^ distance)
            world.Sendrecv(data, dest=partner, recvbuf=received, source=partner)
            data += received
            distance *= 2
    _unfold(world, data, group)


def rabenseifner(world: World, data: Data) -> None:
    """Sum ever smaller halves with ranks at half the distance, then swap them back, doubling.

    A reduce-scatter by recursive halving and an allgather by recursive doubling: 2 log2 p messages,
    and no more to send than the ring.
    """
    group = _fold(world, data)
    if group.takes_part:
        _halve_and_double(world, data, group)
    _unfold(world, data, group)


def _halve_and_double(world: World, data: Data, group: _Group) -> None:
    def span(low: int, high: int) -> Data:
        """Return parts ``low`` to ``high`` of the data, of which each rank ends up with one."""
        first, last = (bounds(len(data), part, group.size) for part in (low, high - 1))
        return data[first[0] : last[1]]

    buffer = np.empty(len(data) // 2 + group.size, data.dtype)
    low, distance = 0, group.size // 2
    while distance:
        partner = group.rank_of(group.place ^ distance)
        middle = low + distance
        halves = span(low, middle), span(middle, middle + distance)
        upper = bool(group.place & distance)
        kept, gone = halves[upper], halves[not upper]
        received = buffer[: len(kept)]
        world.Sendrecv(gone, dest=partner, recvbuf=received, source=partner)
        kept += received
        low, distance = middle if upper else low, distance // 2
    distance = 1
    while distance < group.size:
        partner = group.rank_of(group.place ^ distance)
        mine, theirs = low, low ^ distance
        gone, come = span(mine, mine + distance), span(theirs, theirs + distance)
        world.Sendrecv(gone, dest=partner, recvbuf=come, source=partner)
        low, distance = min(mine, theirs), 2 * distance


@dataclass(frozen=True)
class _Group:
    """A power of two of ranks; each of the first ``extra`` stands for its lower neighbour, too."""

    size: int
    extra: int  # ranks beyond the power of two
    place: int  # of this rank in it; -1: its neighbour stands for it

    @property
    def takes_part(self) -> bool:
        return self.place >= 0

    def rank_of(self, place: int) -> int:
        """Return the rank in the world of a place in the group."""
        return 2 * place + 1 if place < self.extra else place + self.extra


def _fold(world: World, data: Data) -> _Group:
    """Bring the ranks down to a power of two: of the first ones, the even add to the odd."""
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
    """Give the sum to the ranks that others have stood for."""
    if not group.takes_part:
        world.Recv(data, source=world.rank + 1)
    elif world.rank < 2 * group.extra:
        world.Send(data, dest=world.rank - 1)


def _add_from(world: World, data: Data, rank: int) -> None:
    received = np.empty_like(data)
    world.Recv(received, source=rank)
    data += received


class Hierarchical:
    """Sum within each host, then between one rank per host, then tell the others on the host.

    Few messages cross the slow links; but the first rank of a host does its host's share alone.

    Args:
        world: all its ranks make this together.
        host: of this rank: those that give the same number are on one host.
    """

    def __init__(self, world: World, host: int) -> None:
        self.local = world.Split(host, world.rank)
        self.leads = self.local.rank == 0
        self.leaders = world.Split(self.leads, world.rank)  # the others: one of theirs, not used

    def __call__(self, world: World, data: Data) -> None:
        """Sum ``data``; ``world`` is the one that this was made for."""
        _reduce(self.local, data)
        if self.leads:
            rabenseifner(self.leaders, data)
        _broadcast(self.local, data)


def _reduce(world: World, data: Data) -> None:
    """Sum to rank 0 along a binomial tree; what the others hold then is of no use."""
    distance = 1
    while distance < world.size:
        if world.rank & distance:
            world.Send(data, dest=world.rank - distance)
            return
        if world.rank + distance < world.size:
            _add_from(world, data, world.rank + distance)
        distance *= 2


def _broadcast(world: World, data: Data) -> None:
    """Hand rank 0's ``data`` down the same tree."""
    distance = 1
    while distance < world.size and not world.rank & distance:
        distance *= 2
    if world.rank:
        world.Recv(data, source=world.rank - distance)
    while distance > 1:
        distance //= 2
        if world.rank + distance < world.size:
            world.Send(data, dest=world.rank + distance)
