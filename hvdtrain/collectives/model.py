"""Model what a collective costs: latency and bandwidth, and what an algorithm makes of them.

    seconds = latency * hops + bytes * volume / bandwidth

Hops are messages that have to wait for one another, volume is how many times its own data a rank
sends. Of an allreduce over p ranks, with m the largest power of two that is not above p:

    ring                hops 2 (p - 1)       volume 2 (p - 1) / p
    tree                hops 2 ceil(log2 p)  volume 2 (p - 1) / p
    recursive doubling  hops log2 m          volume log2 m           } each 2 more
    Rabenseifner        hops 2 log2 m        volume 2 (m - 1) / m    } where m is not p

The tree is what a good library comes to: Rabenseifner's algorithm without the two transfers by
which ranks beyond a power of two take part.

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", Int. J. High Performance Computing Applications 19 (2005), section 4.5 (its third cost,
of adding, is part of our bytes per second); P. Patarasuk, X. Yuan, J. Parallel Distrib. Comput. 69
(2009): no algorithm sends less than the ring.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

LEAST_SHARE = 1e-4  # of a time, that a latency or a transfer has to be


@dataclass(frozen=True)
class Law:
    """How the cost of an allreduce grows with the ranks."""

    name: str
    hops: Callable[[int], float]
    volume: Callable[[int], float]


def least_volume(ranks: int) -> float:
    """Return how many times its own data each rank has to send in an allreduce, at least."""
    return 2 * (ranks - 1) / ranks


def power_below(ranks: int) -> int:
    """Return the largest power of two that is not above ``ranks``."""
    return 1 << (ranks.bit_length() - 1)


def _folding(ranks: int) -> int:
    """Return hops, and volume, of bringing ranks beyond a power of two in and out."""
    return 0 if power_below(ranks) == ranks else 2


def _doublings(ranks: int) -> int:
    return power_below(ranks).bit_length() - 1


RING = Law("ring", lambda ranks: 2.0 * (ranks - 1), least_volume)
TREE = Law("tree", lambda ranks: 2.0 * math.ceil(math.log2(ranks)), least_volume)
RECURSIVE_DOUBLING = Law(
    "recursive doubling",
    lambda ranks: _doublings(ranks) + _folding(ranks),
    lambda ranks: _doublings(ranks) + _folding(ranks),
)
RABENSEIFNER = Law(
    "Rabenseifner",
    lambda ranks: 2 * _doublings(ranks) + _folding(ranks),
    lambda ranks: least_volume(power_below(ranks)) + _folding(ranks),
)


@dataclass(frozen=True)
class Message:
    """What was measured: ``hops`` messages in turn, together ``nbytes`` sent by a rank."""

    hops: float
    nbytes: float
    seconds: float


@dataclass(frozen=True)
class Link:
    """What connects the ranks."""

    latency: float  # seconds of a message without content
    transfer: float  # seconds per byte

    @property
    def bandwidth(self) -> float:
        """Bytes per second; infinite where more bytes have cost nothing."""
        return 1 / self.transfer if self.transfer else math.inf

    def seconds(self, law: Law, ranks: int, nbytes: float) -> float:
        """Return the time of an allreduce of ``nbytes`` by the algorithm of ``law``."""
        return self.latency * law.hops(ranks) + self.transfer * law.volume(ranks) * nbytes


def fit(messages: Sequence[Message]) -> Link:
    """Fit latency and bandwidth: least squares of relative errors, neither below 0.

    Relative, because otherwise the largest message alone would decide.
    """
    from scipy.optimize import nnls

    rows = [[one.hops / one.seconds, one.nbytes / one.seconds] for one in messages]
    # Scaled: seconds per byte are a millionth of seconds per message.
    largest = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [[hops / largest[0], sent / largest[1]] for hops, sent in rows]
    found, _ = nnls(scaled, [1.0] * len(rows))
    # What is a ten-thousandth of every time cannot be told from nothing.
    latency, transfer = (float(one) if one > LEAST_SHARE else 0.0 for one in found)
    return Link(latency / largest[0], transfer / largest[1])


def bandwidths(size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in GB/s of an allreduce of ``size`` bytes.

    Algorithm bandwidth is size / time. Times the least volume it compares to the speed of the links
    at any number of ranks.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md ("AllReduce").
    """
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * least_volume(ranks)
