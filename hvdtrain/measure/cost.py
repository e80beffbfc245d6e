"""What a training step costs on p ranks: a model of few numbers. Pure arithmetic, no measurement.

    step(p)    = compute * (1 + slowdown) + exposed(p)
    reduce(p)  = latency * hops(p) + transfer * volume(p)
    exposed(p) = reduce(p) - min(overlap * reduce(p), 2/3 compute)

The gradients are summed in a few messages, n of them, of together M bytes. With the latency a of a
message and the time b for a byte, ``latency`` is a * n and ``transfer`` is b * M. Hops and volume
are those of the algorithm:

    ring    hops 2 (p - 1)       volume 2 (p - 1) / p
    tree    hops 2 ceil(log2 p)  volume 2 (p - 1) / p

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", Int. J. High Performance Computing Applications 19 (2005), section 4.5: the ring, and
Rabenseifner's recursive halving and doubling, our tree (its third cost, of adding, is part of our
b); P. Patarasuk, X. Yuan, J. Parallel Distrib. Comput. 69 (2009): no algorithm sends less.
While the gradients of the last layers are summed, those of the first are still computed, so a part
of the sum, ``overlap``, is hidden, but no more than the backward pass lasts: two thirds of the
compute time, since it takes twice the work of the forward pass.

``slowdown`` is what computing takes longer where there is more than one rank, because ranks share
memory and caches or wait for the last one; it is taken to be the same for all numbers of ranks
beyond those that were measured. Not in the model: links that ranks share.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

BACKWARD = 2 / 3  # of the compute time


@dataclass(frozen=True)
class Law:
    """How the cost of an allreduce grows with the ranks."""

    name: str
    hops: Callable[[int], float]
    """Messages that follow one another, on p ranks."""
    volume: Callable[[int], float]
    """How many times its own data a rank sends, on p ranks."""


def _volume(ranks: int) -> float:
    return 2 * (ranks - 1) / ranks


RING = Law("ring", lambda ranks: 2.0 * (ranks - 1), _volume)
TREE = Law("tree", lambda ranks: 2.0 * math.ceil(math.log2(ranks)), _volume)
LAWS = (RING, TREE)


@dataclass(frozen=True)
class Costs:
    """The numbers of the model; seconds a step."""

    compute: float
    """Of one rank on its batch, everything but the reduction: data, forward, backward, update."""
    latency: float
    """Of all messages of a step, for each hop."""
    transfer: float
    """To send a rank's gradients once."""
    overlap: float = 0.0
    """Share of the reduction that computing can hide."""
    fixed: float = 0.0
    """Part of ``compute`` that stays when the batch of a rank changes."""
    slowdown: float = 0.0
    """By how much longer computing takes beside other ranks; a fraction."""

    def alone(self) -> Costs:
        """The costs where there are no more ranks than ``compute`` was measured on."""
        return replace(self, slowdown=0.0)

    def computing(self, share: float = 1.0) -> float:
        """Seconds of computing on ``share`` times the batch that ``compute`` is for."""
        return self.fixed + (self.compute - self.fixed) * share

    def parts(self, law: Law, ranks: int, share: float = 1.0, passes: int = 1) -> Parts:
        """What one update takes.

        Args:
            law: the algorithm of the reduction.
            ranks: how many, at least 1.
            share: the batch of a rank (of one pass), in those that ``compute`` is for.
            passes: batches whose gradients are accumulated for one update.
        """
        once = self.computing(share)
        slowdown = passes * once * self.slowdown
        waiting, sending = self.latency * law.hops(ranks), self.transfer * law.volume(ranks)
        reduce = waiting + sending
        if not reduce:
            return Parts(passes * once, slowdown, 0.0, 0.0)
        # Only the last pass's backward runs while gradients are summed.
        seen = 1 - min(self.overlap, BACKWARD * once / reduce)
        return Parts(passes * once, slowdown, waiting * seen, sending * seen)


@dataclass(frozen=True)
class Parts:
    """Seconds of a step; latency and transfer as far as computing does not hide them."""

    compute: float
    slowdown: float
    latency: float
    transfer: float

    @property
    def local(self) -> float:
        """Seconds of computing, as slow as it is."""
        return self.compute + self.slowdown

    @property
    def exposed(self) -> float:
        """Seconds of the reduction that computing does not hide."""
        return self.latency + self.transfer

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.local + self.exposed


def efficiency(
    costs: Costs, law: Law, ranks: int, base: int, *, strong: bool, passes: int = 1
) -> float:
    """Efficiency at ``ranks`` relative to ``base`` ranks, as ``efficiency.points`` defines it.

    Args:
        costs: of the batch that a rank has at ``base``.
        law: the algorithm of the reduction.
        ranks: how many.
        base: the number of ranks that counts as 1.
        strong: the batch of all ranks stays, so that of a rank shrinks with the ranks; else the
            batch of a rank stays.
        passes: batches accumulated for one update.
    """
    share = base / ranks if strong else 1.0
    first = costs.alone().parts(law, base, 1.0, passes).total
    if ranks <= base:
        costs = costs.alone()
    return first * share / costs.parts(law, ranks, share, passes).total
