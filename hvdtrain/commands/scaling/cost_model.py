"""Model the cost of a training step on p ranks, and predict it from a fit. Pure arithmetic.

    step(p)    = compute * (1 + slowdown) + exposed(p)
    reduce(p)  = latency * hops(p) + transfer * volume(p)
    exposed(p) = reduce(p) - min(overlap * reduce(p), 2/3 compute)

The gradients are summed in n messages with M bytes in total. With the latency a of a message and
the time b per byte, ``latency`` is a * n and ``transfer`` is b * M. Hops and volume are those of a
ring; see ``collectives/cost.py`` for the formulas and their source.

The gradients of the last layers are summed while those of the first are computed, so a fraction of
the reduction, ``overlap``, is hidden, but at most the time of the backward pass: two thirds of the
compute time, because it takes twice the work of the forward pass.

``slowdown`` is the relative increase of the compute time on several ranks, which share memory and
caches or wait for the last rank; it is assumed constant beyond the measured numbers of ranks. Not
modelled: links shared by ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from hvdtrain.collectives.cost import ring_hops, ring_volume

BACKWARD = 2 / 3  # of the compute time
RANKS = tuple(2**power for power in range(4, 13))  # 16 ... 4096: predicted by default
LEAST_LIMIT = 0.05  # fraction of a step: a smaller cost is not a limit
LOW, HIGH = 2.5, 97.5  # percentiles of a 95 % range


@dataclass(frozen=True)
class Parts:
    """Seconds of a step by part; latency and transfer exclude what computing hides."""

    compute: float
    slowdown: float
    latency: float
    transfer: float

    @property
    def local(self) -> float:
        """Seconds of computing, slowdown included."""
        return self.compute + self.slowdown

    @property
    def exposed(self) -> float:
        """Seconds of the reduction that computing does not hide."""
        return self.latency + self.transfer

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.local + self.exposed


@dataclass(frozen=True)
class Costs:
    """The parameters of the model; seconds per step."""

    compute: float  # of one rank on its batch: data, forward, backward, update
    latency: float  # of all messages of a step, per hop
    transfer: float  # to send the gradients of one rank once
    overlap: float = 0.0  # fraction of the reduction that computing can hide
    fixed: float = 0.0  # part of ``compute`` that does not depend on the batch per rank
    slowdown: float = 0.0  # relative increase of the compute time on several ranks

    def parts(self, ranks: int, share: float = 1.0) -> Parts:
        """Return the seconds of one update.

        ``share``: the batch per rank, relative to the batch of ``compute``.
        """
        compute = self.fixed + (self.compute - self.fixed) * share
        slowdown = compute * self.slowdown
        latency, transfer = self.latency * ring_hops(ranks), self.transfer * ring_volume(ranks)
        reduction = latency + transfer
        if not reduction:
            return Parts(compute, slowdown, 0.0, 0.0)
        exposed = 1 - min(self.overlap, BACKWARD * compute / reduction)
        return Parts(compute, slowdown, latency * exposed, transfer * exposed)

    def step(self, ranks: int, base: int, *, strong: bool) -> Parts:
        """Return the seconds of one update in a study whose ``compute`` is for ``base`` ranks.

        ``strong``: the global batch is constant, so the batch per rank shrinks with more ranks.
        """
        costs = self if ranks > base else replace(self, slowdown=0.0)
        return costs.parts(ranks, base / ranks if strong else 1.0)


@dataclass(frozen=True)
class Traffic:
    """The gradient messages of a step: their number, and their size in total."""

    messages: int
    nbytes: int


@dataclass(frozen=True)
class Fit:
    """The costs fitted to the measured points."""

    strong: bool  # strong scaling: constant global batch
    base: int  # smallest number of ranks; the model's efficiencies are relative to it
    costs: Costs
    samples: tuple[Costs, ...]  # drawn from the covariance of the fit
    misfit: float  # factor by which the errors had to be widened for the model to fit; 1: none

    def parts(self, ranks: int) -> Parts:
        """Return the seconds of a step at ``ranks``."""
        return self.costs.step(ranks, self.base, strong=self.strong)

    def efficiency(self, ranks: int) -> Forecast:
        """Return the efficiency at ``ranks``, relative to that at ``base``."""
        middle, *drawn = (self._efficiency(costs, ranks) for costs in (self.costs, *self.samples))
        low, high = np.percentile(drawn or [middle], [LOW, HIGH]).tolist()
        return Forecast(middle, min(low, middle), max(high, middle))

    def _efficiency(self, costs: Costs, ranks: int) -> float:
        at_base = costs.step(self.base, self.base, strong=self.strong).total
        share = self.base / ranks if self.strong else 1.0
        return at_base * share / costs.step(ranks, self.base, strong=self.strong).total


@dataclass(frozen=True)
class Forecast:
    """A number with its 95 % range, if the model holds."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for a number of ranks; the parts are seconds of a step.

    ``limit`` is the largest cost besides useful computing: ``latency``, ``bandwidth``,
    ``slowdown`` or ``fixed`` (the part of computing that does not shrink with more ranks); empty
    if it is less than ``LEAST_LIMIT`` of the step.
    """

    ranks: int
    efficiency: Forecast
    parts: Parts
    limit: str


def predict(fit: Fit, ranks: int) -> Prediction:
    """Return the prediction for ``ranks``."""
    parts = fit.parts(ranks)
    costs = {
        "latency": parts.latency,
        "bandwidth": parts.transfer,
        "slowdown": parts.slowdown,
        "fixed": min(fit.costs.fixed, parts.compute),
    }
    limit = max(costs, key=lambda name: costs[name])
    notable = costs[limit] >= LEAST_LIMIT * parts.total
    return Prediction(ranks, fit.efficiency(ranks), parts, limit if notable else "")
