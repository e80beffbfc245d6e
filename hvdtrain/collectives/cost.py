"""Cost of collectives: latency and bandwidth, and the hops and the volume of an allreduce.

    seconds = latency * hops + bytes * volume / bandwidth

Sources: R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations
in MPICH", Int. J. High Performance Computing Applications 19 (2005), section 4.5 (its computation
cost is part of the bytes per second here); P. Patarasuk, X. Yuan, J. Parallel Distrib. Comput. 69
(2009): no algorithm sends less than the ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MIN_SHARE = 1e-4  # minimum share of a time for a latency or a transfer to be significant


def ring_hops(ranks: int) -> int:
    """Return the sequential messages of an allreduce around a ring."""
    return 2 * (ranks - 1)


def ring_volume(ranks: int) -> float:
    """Return the data sent by a rank in units of the message size, the minimum of an allreduce."""
    return 2 * (ranks - 1) / ranks


@dataclass(frozen=True)
class Link:
    """Latency and bandwidth of a collective."""

    latency: float  # seconds of an empty message
    transfer: float  # seconds per byte

    @property
    def bandwidth(self) -> float:
        """Return bytes per second; infinite if time does not depend on size."""
        return 1 / self.transfer if self.transfer else math.inf


def fit(times: Sequence[tuple[int, float]]) -> Link:
    """Fit latency and bandwidth by non-negative least squares of relative errors.

    With absolute errors only the largest message would be significant.

    Args:
        times: message sizes in bytes, and seconds.
    """
    rows = [[1 / seconds, nbytes / seconds] for nbytes, seconds in times]
    # Scaled, as seconds per byte are a millionth of seconds per message.
    largest = [max(column) or 1.0 for column in zip(*rows, strict=True)]
    scaled = [[rate / largest[0], sent / largest[1]] for rate, sent in rows]
    shares = _non_negative_shares(scaled)
    # A ten-thousandth of every time is not significant.
    latency, transfer = (share if share > MIN_SHARE else 0.0 for share in shares)
    return Link(latency / largest[0], transfer / largest[1])


def _non_negative_shares(rows: Sequence[Sequence[float]]) -> tuple[float, float]:
    """Return x, y >= 0 that minimize the sum of (a x + b y - 1)^2 over the rows (a, b).

    The minimum over the quadrant is that of the plane, or is on an axis.
    """
    aa, ab, bb = (sum(row[i] * row[j] for row in rows) for i, j in ((0, 0), (0, 1), (1, 1)))
    a, b = (sum(row[i] for row in rows) for i in (0, 1))
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        x, y = (a * bb - b * ab) / determinant, (b * aa - a * ab) / determinant
        if x >= 0 and y >= 0:
            return x, y
    axes = ((a / aa if aa else 0.0, 0.0), (0.0, b / bb if bb else 0.0))
    return min(axes, key=lambda xy: sum((r[0] * xy[0] + r[1] * xy[1] - 1) ** 2 for r in rows))


def bandwidths(size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in GB/s of an allreduce of ``size`` bytes.

    Algorithm bandwidth is size / time. Bus bandwidth is this times the minimum volume, comparable
    to the link speed for any number of ranks.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md ("AllReduce").
    """
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * ring_volume(ranks)
