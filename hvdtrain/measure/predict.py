"""What a fit foretells: efficiency at more ranks, what limits it, what a remedy would bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import numpy as np

from hvdtrain.measure.cost import Costs, Parts, efficiency
from hvdtrain.measure.fit import Fit
from hvdtrain.measure.problem import Traffic
from hvdtrain.training.options import NOT_BUILT

RANKS = tuple(2**power for power in range(4, 13))  # 16 ... 4096
NOTABLE = 0.02  # slowdown of computing that is worth a word
LOW, MIDDLE, HIGH = 2.5, 50.0, 97.5  # percentiles: the median and 95 %
# The mean over all samples would not fit the median: rings and trees differ too much at many ranks.
AROUND = 0.4, 0.6


@dataclass(frozen=True)
class Forecast:
    """A number with the range that holds it with 95 %, as far as the model is right."""

    middle: float
    low: float
    high: float


@dataclass(frozen=True)
class Remedy:
    """Something to change, and the efficiencies that the model then expects."""

    name: str
    what: str
    """How to do it, in words."""
    efficiencies: tuple[Forecast, ...]
    """One for each number of ranks asked for."""


def _forecast(values: Sequence[float]) -> Forecast:
    low, middle, high = np.percentile(values, [LOW, MIDDLE, HIGH])
    return Forecast(float(middle), float(low), float(high))


def efficiency_at(fit: Fit, ranks: int) -> Forecast:
    """The efficiency at ``ranks``, relative to the fewest ranks measured."""
    return _forecast(
        [
            fit.at_base * efficiency(costs, law, ranks, fit.base, strong=fit.strong)
            for law, costs in fit.samples
        ]
    )


def _parts(fit: Fit, ranks: int) -> list[Parts]:
    """A step at ``ranks``, taken apart, for each sample."""
    share = fit.base / ranks if fit.strong else 1.0
    beside = ranks > fit.base
    return [
        (costs if beside else costs.alone()).parts(law, ranks, share) for law, costs in fit.samples
    ]


def step_at(fit: Fit, ranks: int) -> Forecast:
    """Seconds of a step at ``ranks``."""
    return _forecast([parts.total for parts in _parts(fit, ranks)])


def parts_at(fit: Fit, ranks: int) -> Parts:
    """Seconds of the step of ``step_at``, taken apart: as the samples around the median have it."""
    parts = sorted(_parts(fit, ranks), key=lambda one: one.total)
    last = len(parts) - 1
    around = parts[int(AROUND[0] * last) : int(AROUND[1] * last) + 1]
    shares = np.mean([np.array(astuple(one)) / one.total for one in around], 0)
    return Parts(*(shares * step_at(fit, ranks).middle).tolist())


def limit(fit: Fit, ranks: int) -> str:
    """What costs most at ``ranks`` beside the computing that has to be done.

    Returns:
        ``latency``, ``bandwidth``, ``slowdown`` or ``fixed`` (the part of computing that more
        ranks do not shrink), or nothing where it is less than a twentieth of the step.
    """
    parts = parts_at(fit, ranks)
    costs = {
        "latency": parts.latency,
        "bandwidth": parts.transfer,
        "slowdown": parts.slowdown,
        "fixed": min(fit.best.costs.fixed, parts.compute),
    }
    name = max(costs, key=lambda key: costs[key])
    return name if costs[name] >= 0.05 * parts.total else ""


@dataclass(frozen=True)
class _Change:
    """How a remedy changes the costs."""

    name: str
    what: str
    costs: Callable[[Costs], Costs]
    passes: int = 1


def _option(words: str) -> str:
    """How hvdtrain's trainers spell what Horovod itself can do, if they can."""
    name = words.split()[0].removeprefix("--")
    return " (not yet in hvdtrain)" if name in NOT_BUILT else f" ({words})"


def _changes(fit: Fit, messages: int | None) -> list[_Change]:
    """The remedies that make sense where so many messages a step are sent (None: not known)."""
    found = [
        _Change(
            "gradients in fp16",
            f"Compression.fp16{_option('--compression fp16')}, the conversion not counted",
            lambda costs: replace(costs, transfer=costs.transfer / 2),
        )
    ]
    if not fit.strong:  # there the batch is given
        found += [
            _Change(
                "batch per rank x 4",
                "--batch-size, as far as memory and accuracy allow",
                lambda costs: replace(costs, compute=costs.computing(4.0)),
            ),
            _Change(
                "accumulate 4 batches",
                f"backward_passes_per_step=4{_option('--accumulate-steps 4')}, if accuracy allows",
                lambda costs: costs,
                passes=4,
            ),
        ]
    if fit.best.costs.slowdown >= NOTABLE:
        found.append(
            _Change(
                "computing as fast as alone",
                "fewer ranks per host, each bound to cores of its own",
                lambda costs: costs.alone(),
            )
        )
    return [*found, *_fewer(messages)]


def _fewer(messages: int | None) -> list[_Change]:
    """The remedy of sending fewer messages a step, where there is more than one."""
    if messages is None:
        return [
            _Change(
                "half as many messages",
                "larger fusions (HOROVOD_FUSION_THRESHOLD)",
                lambda costs: replace(costs, latency=costs.latency / 2),
            )
        ]
    if messages <= 1:
        return []
    return [
        _Change(
            f"1 message, not {messages}",
            "one fusion of all gradients; but then computing hides nothing",
            lambda costs: replace(costs, latency=costs.latency / messages, overlap=0.0),
        )
    ]


def remedies(fit: Fit, traffic: Traffic | None, ranks: Sequence[int] = RANKS) -> list[Remedy]:
    """What could be changed, the most helpful at the last of ``ranks`` first.

    Args:
        fit: the fitted costs.
        traffic: what a step reduces, as far as it is known.
        ranks: numbers of ranks to foretell.
    """
    found = []
    for change in _changes(fit, traffic.messages if traffic else None):
        expected = tuple(_changed(fit, change, number) for number in ranks)
        found.append(Remedy(change.name, change.what, expected))
    return sorted(found, key=lambda remedy: -remedy.efficiencies[-1].middle)


def _changed(fit: Fit, change: _Change, ranks: int) -> Forecast:
    return _forecast(
        [
            fit.at_base
            * efficiency(
                *(change.costs(costs), law, ranks, fit.base),
                strong=fit.strong,
                passes=change.passes,
            )
            for law, costs in fit.samples
        ]
    )
