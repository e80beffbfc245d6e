"""The least squares of the fit: residuals of points, table and priors, and their smallest sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hvdtrain.measure.cost import Costs, Law

UNKNOWN_ERROR = 0.03  # relative, of a point that was measured once
TABLE_ERROR = 0.2  # relative: latency plus bytes over bandwidth is a crude picture of an allreduce

# Priors as (centre, standard deviation). Latency and transfer are logarithms of their ratio to the
# compute time, and a factor of ten either way is no surprise; the others are logits.
LATENCY = (math.log(1e-3), math.log(10))
TRANSFER = (math.log(0.1), math.log(10))
OVERLAP = (0.0, 1.5)
OVERLAP_STARTS = (-2.0, 0.0, 2.0)
FIXED = (-3.0, 1.5)
FARTHEST = 100.0
COMPUTE_WIDTH = 5.0  # around the step of the fewest ranks, as a logarithm: as good as free


@dataclass(frozen=True)
class Step:
    """A measured point."""

    ranks: int
    seconds: float
    """Of a step; mean over the repeats."""
    error: float = UNKNOWN_ERROR
    """Relative standard error of ``seconds``."""


@dataclass(frozen=True)
class Reduction:
    """A row of a table of allreduce times."""

    ranks: int
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Traffic:
    """What a step sums over the ranks."""

    messages: int
    nbytes: int
    """Of all messages together."""


class Problem:
    """The least squares of one law; a vector x holds logarithms and logits of its parameters."""

    def __init__(
        self,
        law: Law,
        steps: Sequence[Step],
        strong: bool,
        reductions: Sequence[Reduction],
        traffic: Traffic | None,
    ) -> None:
        self.law, self.steps, self.strong = law, steps, strong
        self.reductions, self.traffic = reductions, traffic
        self.base = min(step.ranks for step in steps)
        first = next(step.seconds for step in steps if step.ranks == self.base)
        priors = [(math.log(first), COMPUTE_WIDTH), LATENCY, TRANSFER]
        priors += [OVERLAP] if reductions else []
        priors += [FIXED] if strong else []
        self.centre, self.width = (np.array(column) for column in zip(*priors, strict=True))
        times = [step.seconds for step in steps] + [row.seconds for row in reductions]
        self.target = np.log(times)
        self.error = np.array([step.error for step in steps] + [TABLE_ERROR] * len(reductions))

    def costs(self, x: Any) -> Costs:
        """The parameters that ``x`` stands for."""
        x = np.clip(x, -FARTHEST, FARTHEST)  # a step of the search may go anywhere
        compute = math.exp(x[0])
        rest = [1 / (1 + math.exp(-value)) for value in x[3:]]
        overlap = rest.pop(0) if self.reductions else 0.0
        fixed = rest.pop(0) * compute if self.strong else 0.0
        return Costs(compute, compute * math.exp(x[1]), compute * math.exp(x[2]), overlap, fixed)

    def predicted(self, x: Any) -> list[float]:
        """What the model says about everything that was measured; seconds."""
        costs = self.costs(x)
        shares = [self.base / step.ranks if self.strong else 1.0 for step in self.steps]
        steps = [
            costs.parts(self.law, step.ranks, share).total
            for step, share in zip(self.steps, shares, strict=True)
        ]
        if not self.reductions or self.traffic is None:
            return steps
        latency = costs.latency / self.traffic.messages
        per_byte = costs.transfer / self.traffic.nbytes
        return steps + [
            latency * self.law.hops(row.ranks) + per_byte * row.nbytes * self.law.volume(row.ranks)
            for row in self.reductions
        ]

    def best(self) -> Any:
        """The best ``x`` of all, from where the priors and the table point to."""
        starts = [self.centre.copy()]
        if self.reductions and self.traffic:
            # How much is hidden is bounded, which leaves valleys beside the deepest one.
            starts = [self.centre.copy() for _ in OVERLAP_STARTS]
            small = min(self.reductions, key=lambda row: row.nbytes)
            large = max(self.reductions, key=lambda row: row.nbytes)
            latency = small.seconds / self.law.hops(small.ranks) * self.traffic.messages
            per_byte = large.seconds / large.nbytes / self.law.volume(large.ranks)
            for start, overlap in zip(starts, OVERLAP_STARTS, strict=True):
                start[1] = math.log(latency) - start[0]
                start[2] = math.log(per_byte * self.traffic.nbytes) - start[0]
                start[3] = overlap
        return min((self.solve(start) for start in starts), key=self.cost)

    def solve(self, start: Any, widen: float = 1.0, generator: Any = None) -> Any:
        """The best ``x`` near ``start``; with a generator, for points and priors that it moves."""
        target, centre, error = self.target, self.centre, self.error * widen
        if generator is not None:
            target = target + error * generator.standard_normal(len(error))
            centre = centre + self.width * generator.standard_normal(len(centre))

        def residuals(x: Any) -> Any:
            data = (np.log(self.predicted(x)) - target) / error
            return np.concatenate([data, (x - centre) / self.width])

        return least_squares(residuals, start, method="lm").x

    def misfit(self, x: Any) -> float:
        """The factor on the errors with which the points scatter as they should."""
        free = len(self.target) - len(self.centre)
        squares = float(np.sum(((np.log(self.predicted(x)) - self.target) / self.error) ** 2))
        return max(1.0, math.sqrt(squares / free)) if free > 0 else 1.0

    def cost(self, x: Any, widen: float = 1.0) -> float:
        """The sum of squares, priors included, that tells how well the law does."""
        data = (np.log(self.predicted(x)) - self.target) / (self.error * widen)
        return float(np.sum(data**2) + np.sum(((x - self.centre) / self.width) ** 2))
