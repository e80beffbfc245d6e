"""The least squares of the fit: residuals of points, table and priors, and their smallest sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from hvdtrain.measure.cost import Costs, Law, Parts

UNKNOWN_ERROR = 0.03  # relative, of a point that was measured once
PART_ERROR = 0.03  # relative, at least, of a part of a step: who came last is an estimate
TABLE_ERROR = 0.2  # relative: latency plus bytes over bandwidth is a crude picture of an allreduce

# Priors as (centre, standard deviation). Latency and transfer are logarithms of their ratio to the
# compute time, and a factor of ten either way is no surprise; the others are logits.
LATENCY = (math.log(1e-3), math.log(10))
TRANSFER = (math.log(0.1), math.log(10))
OVERLAP = (0.0, 1.5)
OVERLAP_STARTS = (-2.0, 0.0, 2.0)
FIXED = (-3.0, 1.5)
SLOWDOWN = (math.log(0.1), math.log(10))  # a logarithm
FARTHEST = 100.0
SHORTEST = 1e-7  # seconds: less cannot be measured
COMPUTE_WIDTH = 5.0  # around the step of the fewest ranks, as a logarithm: as good as free


@dataclass(frozen=True)
class Step:
    """A measured point."""

    ranks: int
    seconds: float
    """Of a step; mean over the repeats."""
    error: float = UNKNOWN_ERROR
    """Relative standard error of ``seconds``."""
    exposed: float | None = None
    """Those of ``seconds`` in which the ranks communicate and do not compute; None: not known."""
    exposed_error: float = UNKNOWN_ERROR
    """Relative standard error of ``exposed``."""


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
        self.law, self.strong = law, strong
        self.reductions, self.traffic = reductions, traffic
        self.steps = sorted(steps, key=lambda step: step.ranks)
        self.divided = all(step.exposed is not None for step in steps)
        self.base, first = self.steps[0].ranks, self.steps[0].seconds
        priors = [(math.log(first), COMPUTE_WIDTH), LATENCY, TRANSFER]
        priors += [OVERLAP] if reductions else []
        priors += [FIXED] if strong else [SLOWDOWN] if self.divided else []
        self.centre, self.width = (np.array(column) for column in zip(*priors, strict=True))
        seen = self._seen() + [(row.seconds, TABLE_ERROR) for row in reductions]
        self.target = np.log([seconds for seconds, _ in seen])
        self.error = np.array([error for _, error in seen])

    def _local_steps(self) -> list[Step]:
        """The steps whose computing is fitted.

        Where the batch of a rank stays, computing slows down with the ranks of a host in a way of
        its own; what counts for more ranks is how slow it is at last.
        """
        return self.steps if self.strong else [self.steps[0], self.steps[-1]]

    def _seen(self) -> list[tuple[float, float]]:
        """What was measured of the steps: seconds and their relative errors."""
        if not self.divided:
            return [(step.seconds, step.error) for step in self.steps]
        local = [(step.seconds - (step.exposed or 0.0), step.error) for step in self._local_steps()]
        return local + [
            (max(step.exposed or 0.0, SHORTEST), max(step.exposed_error, PART_ERROR))
            for step in self.steps
            if step.ranks > 1
        ]

    def costs(self, x: Any) -> Costs:
        """The parameters that ``x`` stands for."""
        x = np.clip(x, -FARTHEST, FARTHEST)  # a step of the search may go anywhere
        compute, rest = math.exp(x[0]), list(x[3:])
        overlap = _fraction(rest.pop(0)) if self.reductions else 0.0
        fixed = _fraction(rest.pop(0)) * compute if self.strong else 0.0
        slowdown = math.exp(rest.pop(0)) if rest else 0.0
        latency, transfer = (compute * math.exp(value) for value in x[1:3])
        return Costs(compute, latency, transfer, overlap, fixed, slowdown)

    def _parts(self, costs: Costs, step: Step) -> Parts:
        share = self.base / step.ranks if self.strong else 1.0
        known = costs if step.ranks > self.base else costs.alone()
        return known.parts(self.law, step.ranks, share)

    def predicted(self, x: Any) -> list[float]:
        """What the model says about everything that was measured; seconds."""
        costs = self.costs(x)
        if self.divided:
            steps = [self._parts(costs, step).local for step in self._local_steps()]
            shared = [step for step in self.steps if step.ranks > 1]
            steps += [max(self._parts(costs, step).exposed, SHORTEST) for step in shared]
        else:
            steps = [self._parts(costs, step).total for step in self.steps]
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


def _fraction(value: float) -> float:
    """From a logit."""
    return 1 / (1 + math.exp(-value))
