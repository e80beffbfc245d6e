"""Model what a training step costs on p ranks, and predict from a fit of it. Pure arithmetic.

    step(p)    = compute * (1 + slowdown) + exposed(p)
    reduce(p)  = latency * hops(p) + transfer * volume(p)
    exposed(p) = reduce(p) - min(overlap * reduce(p), 2/3 compute)

The gradients are summed in n messages of together M bytes. With the latency a of a message and the
time b for a byte, ``latency`` is a * n and ``transfer`` is b * M. Hops and volume are those of a
ring and of a tree: ``collectives/model.py`` has them, and their source.

The gradients of the last layers are summed while those of the first are computed, so a part of the
reduction, ``overlap``, is hidden, but no more than the backward pass lasts: two thirds of the
compute time, since it takes twice the work of the forward pass.

``slowdown`` is by how much longer computing takes on several ranks, because they share memory and
caches or wait for the last one; it is taken to be the same for all numbers of ranks beyond those
that were measured. Not in the model: links that ranks share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from hvdtrain.collectives.model import RING, TREE, Law

LAWS = (RING, TREE)
BACKWARD = 2 / 3  # of the compute time
RANKS = tuple(2**power for power in range(4, 13))  # 16 ... 4096, which are predicted
NOTABLE = 0.02  # slowdown of computing that is worth a word
LEAST_LIMIT = 0.05  # of a step: what costs less limits nothing
LOW, MIDDLE, HIGH = 2.5, 50.0, 97.5  # percentiles: the median and 95 %
# The mean over all samples would not fit the median: rings and trees differ too much at many ranks.
AROUND = 0.4, 0.6


@dataclass(frozen=True)
class Parts:
    """Seconds of a step; latency and transfer as far as computing does not hide them."""

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
    """The numbers of the model; seconds per step."""

    compute: float  # of one rank on its batch: data, forward, backward, update
    latency: float  # of all messages of a step, per hop
    transfer: float  # to send the gradients of one rank once
    overlap: float = 0.0  # share of the reduction that computing can hide
    fixed: float = 0.0  # part of ``compute`` that stays when the batch per rank changes
    slowdown: float = 0.0  # by how much longer computing takes beside other ranks; a fraction

    def alone(self) -> Costs:
        """Return the costs on no more ranks than ``compute`` was measured on."""
        return replace(self, slowdown=0.0)

    def computing(self, share: float = 1.0) -> float:
        """Return the seconds of computing on ``share`` times the batch that ``compute`` is for."""
        return self.fixed + (self.compute - self.fixed) * share

    def parts(self, law: Law, ranks: int, share: float = 1.0, passes: int = 1) -> Parts:
        """Return what one update takes, of ``passes`` batches whose gradients are accumulated.

        ``share``: the batch per rank and pass, in units of the one that ``compute`` is for.
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

    def step(self, law: Law, ranks: int, base: int, *, strong: bool, passes: int = 1) -> Parts:
        """Return what one update takes in a study where ``compute`` is for ``base`` ranks.

        ``strong``: the global batch stays, so the batch per rank shrinks as the ranks grow.
        """
        costs = self if ranks > base else self.alone()
        return costs.parts(law, ranks, base / ranks if strong else 1.0, passes)

    def efficiency(
        self, law: Law, ranks: int, base: int, *, strong: bool, passes: int = 1
    ) -> float:
        """Return the efficiency at ``ranks`` relative to ``base``; arguments as of ``step``."""
        first = self.step(law, base, base, strong=strong, passes=passes).total
        share = base / ranks if strong else 1.0
        return first * share / self.step(law, ranks, base, strong=strong, passes=passes).total


@dataclass(frozen=True)
class Traffic:
    """What a step sums over the ranks: messages, and the bytes of all of them together."""

    messages: int
    nbytes: int


@dataclass(frozen=True)
class Candidate:
    """The best fit of one law; ``weight``: how likely it is against the others, 1 for all."""

    law: Law
    costs: Costs
    weight: float


@dataclass(frozen=True)
class Fit:
    """What the measured points say about the costs."""

    strong: bool  # the global batch stayed
    base: int  # the fewest ranks fitted, to which the efficiencies of the model are relative
    candidates: tuple[Candidate, ...]  # the best first
    samples: tuple[tuple[Law, Costs], ...]  # that fit within the errors, all equally likely
    misfit: float  # by how much the errors had to be widened for the best law to fit; 1: not at all
    at_base: float = 1.0  # measured; less than 1 where fewer ranks were measured, but not fitted

    @property
    def best(self) -> Candidate:
        """The law that fits best."""
        return self.candidates[0]


@dataclass(frozen=True)
class Forecast:
    """A number with the range that holds it with 95 %, as far as the model is right."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """What the fit predicts at a number of ranks; the parts are seconds of ``step_at``.

    ``limit`` is what costs most beside the computing that has to be done: ``latency``,
    ``bandwidth``, ``slowdown`` or ``fixed`` (the part of computing that more ranks do not shrink);
    nothing where it is less than ``LEAST_LIMIT`` of the step.
    """

    ranks: int
    efficiency: Forecast
    parts: Parts
    limit: str


@dataclass(frozen=True)
class Remedy:
    """What to change and how, and the efficiency then, for each number of ranks asked for."""

    name: str
    what: str
    efficiencies: tuple[Forecast, ...]


def _forecast(values: Sequence[float]) -> Forecast:
    low, middle, high = np.percentile(values, [LOW, MIDDLE, HIGH])
    return Forecast(float(middle), float(low), float(high))


def efficiency_at(fit: Fit, ranks: int, passes: int = 1) -> Forecast:
    """Return the efficiency at ``ranks``, relative to the fewest ranks measured."""
    values = [
        costs.efficiency(law, ranks, fit.base, strong=fit.strong, passes=passes)
        for law, costs in fit.samples
    ]
    return _forecast([fit.at_base * value for value in values])


def _steps(fit: Fit, ranks: int) -> list[Parts]:
    """Return a step at ``ranks`` for each sample, the shortest first."""
    steps = [costs.step(law, ranks, fit.base, strong=fit.strong) for law, costs in fit.samples]
    return sorted(steps, key=lambda one: one.total)


def step_at(fit: Fit, ranks: int) -> Forecast:
    """Return the seconds of a step at ``ranks``."""
    return _forecast([one.total for one in _steps(fit, ranks)])


def predict(fit: Fit, ranks: int) -> Prediction:
    """Return what the fit predicts at ``ranks``."""
    steps = _steps(fit, ranks)
    low, high = (int(share * (len(steps) - 1)) for share in AROUND)
    shares = np.mean([np.array(astuple(one)) / one.total for one in steps[low : high + 1]], axis=0)
    parts = Parts(*(shares * step_at(fit, ranks).middle).tolist())
    fixed = min(fit.best.costs.fixed, parts.compute)
    costs = {"latency": parts.latency, "bandwidth": parts.transfer}
    costs |= {"slowdown": parts.slowdown, "fixed": fixed}
    limit = max(costs, key=lambda name: costs[name])
    notable = costs[limit] >= LEAST_LIMIT * parts.total
    return Prediction(ranks, efficiency_at(fit, ranks), parts, limit if notable else "")


@dataclass(frozen=True)
class _Change:
    """A remedy before it is worked out: what it does to the costs, or to the batches per update."""

    name: str
    what: str
    applies: Callable[[Fit, Traffic | None], bool] = lambda fit, traffic: True
    costs: Callable[[Costs, int], Costs] = lambda costs, messages: costs
    passes: int = 1


CHANGES = (
    _Change(
        "gradients in fp16",
        "Compression.fp16 (--compression fp16), the conversion not counted",
        costs=lambda costs, messages: replace(costs, transfer=costs.transfer / 2),
    ),
    _Change(
        "batch per rank x 4",
        "--batch-size, as far as memory and accuracy allow",
        lambda fit, traffic: not fit.strong,  # there the batch is given
        lambda costs, messages: replace(costs, compute=costs.computing(4.0)),
    ),
    _Change(
        "accumulate 4 batches",
        "backward_passes_per_step=4 (--accumulate-steps 4), if accuracy allows",
        lambda fit, traffic: not fit.strong,
        passes=4,
    ),
    _Change(
        "computing as fast as alone",
        "fewer ranks per host, each bound to cores of its own",
        lambda fit, traffic: fit.best.costs.slowdown >= NOTABLE,
        lambda costs, messages: costs.alone(),
    ),
    _Change(
        "half as many messages",
        "larger fusions (HOROVOD_FUSION_THRESHOLD)",
        lambda fit, traffic: traffic is None,
        lambda costs, messages: replace(costs, latency=costs.latency / 2),
    ),
    _Change(
        "1 message, not {messages}",
        "one fusion of all gradients; but then computing hides nothing",
        lambda fit, traffic: traffic is not None and traffic.messages > 1,
        lambda costs, messages: replace(costs, latency=costs.latency / messages, overlap=0.0),
    ),
)


def remedies(fit: Fit, traffic: Traffic | None, ranks: Sequence[int] = RANKS) -> list[Remedy]:
    """Return what could be changed, the most helpful at the last of ``ranks`` first.

    ``traffic`` is what a step reduces, as far as it is known.
    """
    messages = traffic.messages if traffic else 1
    found = []
    for one in (change for change in CHANGES if change.applies(fit, traffic)):
        samples = tuple((law, one.costs(costs, messages)) for law, costs in fit.samples)
        changed = replace(fit, samples=samples)
        at = tuple(efficiency_at(changed, number, one.passes) for number in ranks)
        found.append(Remedy(one.name.format(messages=messages), one.what, at))
    return sorted(found, key=lambda remedy: -remedy.efficiencies[-1].middle)
