"""Model the cost of a training step on p ranks, and predict it from a fit. Pure arithmetic.

    step(p)    = compute * (1 + slowdown) + exposed(p)
    reduce(p)  = latency * hops(p) + transfer * volume(p)
    exposed(p) = reduce(p) - min(overlap * reduce(p), 2/3 compute)

The gradients are summed in n messages with M bytes in total. With the latency a of a message and
the time b per byte, ``latency`` is a * n and ``transfer`` is b * M. Hops and volume are those of a
ring or a tree; see ``collectives/cost.py`` for the formulas and their source.

The gradients of the last layers are summed while those of the first are computed, so a fraction of
the reduction, ``overlap``, is hidden, but at most the time of the backward pass: two thirds of the
compute time, because it takes twice the work of the forward pass.

``slowdown`` is the relative increase of the compute time on several ranks, which share memory and
caches or wait for the last rank; it is assumed constant beyond the measured numbers of ranks. Not
modelled: links shared by ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdtrain.collectives.cost import RING, TREE, Law

LAWS = (RING, TREE)
BACKWARD = 2 / 3  # of the compute time
RANKS = tuple(2**power for power in range(4, 13))  # 16 ... 4096: predicted by default
NOTABLE = 0.02  # smallest slowdown that is reported
LEAST_LIMIT = 0.05  # fraction of a step: a smaller cost is not a limit
LOW, HIGH = 2.5, 97.5  # percentiles of a 95 % range
LEAST_WEIGHT = 0.05  # of a law whose range is part of that of a prediction


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

    def without_slowdown(self) -> Costs:
        """Return the costs on at most as many ranks as ``compute`` was measured on."""
        return replace(self, slowdown=0.0)

    def compute_seconds(self, share: float = 1.0) -> float:
        """Return the compute time for ``share`` times the batch of ``compute``."""
        return self.fixed + (self.compute - self.fixed) * share

    def parts(self, law: Law, ranks: int, share: float = 1.0, passes: int = 1) -> Parts:
        """Return the seconds of one update that accumulates the gradients of ``passes`` batches.

        ``share``: the batch per rank and pass, relative to the batch of ``compute``.
        """
        compute = self.compute_seconds(share)
        slowdown = passes * compute * self.slowdown
        latency, transfer = self.latency * law.hops(ranks), self.transfer * law.volume(ranks)
        reduction = latency + transfer
        if not reduction:
            return Parts(passes * compute, slowdown, 0.0, 0.0)
        # Gradients are summed only during the backward pass of the last batch.
        exposed = 1 - min(self.overlap, BACKWARD * compute / reduction)
        return Parts(passes * compute, slowdown, latency * exposed, transfer * exposed)

    def step(self, law: Law, ranks: int, base: int, *, strong: bool, passes: int = 1) -> Parts:
        """Return the seconds of one update in a study whose ``compute`` is for ``base`` ranks.

        ``strong``: the global batch is constant, so the batch per rank shrinks with more ranks.
        """
        costs = self if ranks > base else self.without_slowdown()
        return costs.parts(law, ranks, base / ranks if strong else 1.0, passes)

    def efficiency(
        self, law: Law, ranks: int, base: int, *, strong: bool, passes: int = 1
    ) -> float:
        """Return the efficiency at ``ranks`` relative to ``base``; arguments as for ``step``."""
        at_base = self.step(law, base, base, strong=strong, passes=passes).total
        share = base / ranks if strong else 1.0
        return at_base * share / self.step(law, ranks, base, strong=strong, passes=passes).total


@dataclass(frozen=True)
class Traffic:
    """The gradient messages of a step: their number, and their size in total."""

    messages: int
    nbytes: int


@dataclass(frozen=True)
class Candidate:
    """The fit of one law."""

    law: Law
    costs: Costs
    weight: float  # its likelihood, normalized over the laws
    samples: tuple[Costs, ...]  # fits to measurements drawn anew from their errors


@dataclass(frozen=True)
class Fit:
    """The costs fitted to the measured points."""

    strong: bool  # strong scaling: constant global batch
    base: int  # smallest number of ranks fitted; the model's efficiencies are relative to it
    candidates: tuple[Candidate, ...]  # the best first
    misfit: float  # factor by which the errors had to be widened for the best law to fit; 1: none
    at_base: float = 1.0  # measured efficiency; below 1 if fewer ranks were measured, not fitted

    @property
    def best(self) -> Candidate:
        """The law that fits best."""
        return self.candidates[0]

    def forecast(self, value: Callable[[Law, Costs], float]) -> Forecast:
        """Return ``value`` of the best fit, with the range over each law that fits."""
        middle = value(self.best.law, self.best.costs)
        bounds = [middle]
        for candidate in self.candidates:
            if candidate.weight >= LEAST_WEIGHT and candidate.samples:
                values = [value(candidate.law, costs) for costs in candidate.samples]
                bounds += np.percentile(values, [LOW, HIGH]).tolist()
        return Forecast(middle, min(bounds), max(bounds))


@dataclass(frozen=True)
class Forecast:
    """A number with its 95 % range, if the model holds."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for a number of ranks; the parts are seconds of ``step_at``.

    ``limit`` is the largest cost besides useful computing: ``latency``, ``bandwidth``,
    ``slowdown`` or ``fixed`` (the part of computing that does not shrink with more ranks); empty
    if it is less than ``LEAST_LIMIT`` of the step.
    """

    ranks: int
    efficiency: Forecast
    parts: Parts
    limit: str


@dataclass(frozen=True)
class Remedy:
    """A change that would help, how to make it, and the resulting efficiencies by ranks."""

    name: str
    action: str
    efficiencies: tuple[Forecast, ...]


def efficiency_at(fit: Fit, ranks: int, passes: int = 1) -> Forecast:
    """Return the efficiency at ``ranks``, relative to the smallest number of ranks measured."""

    def efficiency(law: Law, costs: Costs) -> float:
        value = costs.efficiency(law, ranks, fit.base, strong=fit.strong, passes=passes)
        return fit.at_base * value

    return fit.forecast(efficiency)


def step_at(fit: Fit, ranks: int) -> Forecast:
    """Return the seconds of a step at ``ranks``."""
    return fit.forecast(
        lambda law, costs: costs.step(law, ranks, fit.base, strong=fit.strong).total
    )


def predict(fit: Fit, ranks: int) -> Prediction:
    """Return the prediction for ``ranks``."""
    parts = fit.best.costs.step(fit.best.law, ranks, fit.base, strong=fit.strong)
    costs = {
        "latency": parts.latency,
        "bandwidth": parts.transfer,
        "slowdown": parts.slowdown,
        "fixed": min(fit.best.costs.fixed, parts.compute),
    }
    limit = max(costs, key=lambda name: costs[name])
    notable = costs[limit] >= LEAST_LIMIT * parts.total
    return Prediction(ranks, efficiency_at(fit, ranks), parts, limit if notable else "")


@dataclass(frozen=True)
class _Change:
    """A possible remedy: its effect on the costs, or on the number of batches per update."""

    name: str
    action: str
    applies: Callable[[Fit, Traffic | None], bool] = lambda fit, traffic: True
    costs: Callable[[Costs, int], Costs] = lambda costs, messages: costs
    passes: int = 1


CHANGES = (
    _Change(
        "gradients in fp16",
        "Compression.fp16 (--compression fp16), excluding the conversion",
        costs=lambda costs, messages: replace(costs, transfer=costs.transfer / 2),
    ),
    _Change(
        "batch per rank x 4",
        "--batch-size, as far as memory and accuracy allow",
        lambda fit, traffic: not fit.strong,  # strong scaling fixes the batch
        lambda costs, messages: replace(costs, compute=costs.compute_seconds(4.0)),
    ),
    _Change(
        "accumulate 4 batches",
        "backward_passes_per_step=4 (--accumulate-steps 4), if accuracy allows",
        lambda fit, traffic: not fit.strong,
        passes=4,
    ),
    _Change(
        "no slowdown of computing",
        "fewer ranks per host, each bound to separate cores",
        lambda fit, traffic: fit.best.costs.slowdown >= NOTABLE,
        lambda costs, messages: costs.without_slowdown(),
    ),
    _Change(
        "half as many messages",
        "larger fusions (HOROVOD_FUSION_THRESHOLD)",
        lambda fit, traffic: traffic is None,
        lambda costs, messages: replace(costs, latency=costs.latency / 2),
    ),
    _Change(
        "1 message, not {messages}",
        "all gradients fused into one message, without overlap with computing",
        lambda fit, traffic: traffic is not None and traffic.messages > 1,
        lambda costs, messages: replace(costs, latency=costs.latency / messages, overlap=0.0),
    ),
)


def remedies(fit: Fit, traffic: Traffic | None, ranks: Sequence[int] = RANKS) -> list[Remedy]:
    """Return the applicable changes, the most helpful at the last of ``ranks`` first.

    ``traffic``: the gradient messages of a step, if known.
    """
    messages = traffic.messages if traffic else 1
    applicable = []
    for change in (change for change in CHANGES if change.applies(fit, traffic)):
        candidates = tuple(
            replace(
                candidate,
                costs=change.costs(candidate.costs, messages),
                samples=tuple(change.costs(costs, messages) for costs in candidate.samples),
            )
            for candidate in fit.candidates
        )
        changed = replace(fit, candidates=candidates)
        efficiencies = tuple(efficiency_at(changed, number, change.passes) for number in ranks)
        name = change.name.format(messages=messages)
        applicable.append(Remedy(name, change.action, efficiencies))
    return sorted(applicable, key=lambda remedy: -remedy.efficiencies[-1].middle)
