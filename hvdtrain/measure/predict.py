"""What a fit foretells: efficiency at more ranks, what limits it, what a remedy would bring."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from hvdtrain.measure.cost import Costs, Law, Parts, efficiency
from hvdtrain.measure.fit import Fit
from hvdtrain.measure.problem import Traffic

RANKS = tuple(2**power for power in range(4, 13))  # 16 ... 4096
LOW, MIDDLE, HIGH = 2.5, 50.0, 97.5  # percentiles: the median and 95 %


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


def forecast(fit: Fit, value: Callable[[Costs, Law], float]) -> Forecast:
    """The distribution of ``value`` over the samples of the fit."""
    values = [value(costs, law) for law, costs in fit.samples]
    low, middle, high = np.percentile(values, [LOW, MIDDLE, HIGH])
    return Forecast(float(middle), float(low), float(high))


def efficiency_at(fit: Fit, ranks: int) -> Forecast:
    """The efficiency at ``ranks``, relative to the fewest ranks measured."""
    return forecast(
        fit, lambda costs, law: efficiency(costs, law, ranks, fit.base, strong=fit.strong)
    )


def step_at(fit: Fit, ranks: int) -> Forecast:
    """Seconds of a step at ``ranks``."""
    share = fit.base / ranks if fit.strong else 1.0
    return forecast(fit, lambda costs, law: costs.parts(law, ranks, share).total)


def parts_at(fit: Fit, ranks: int) -> Parts:
    """Seconds of a step at ``ranks``, taken apart: the mean over the samples."""
    share = fit.base / ranks if fit.strong else 1.0
    parts = [costs.parts(law, ranks, share) for law, costs in fit.samples]
    # Each sample weighs by its shares: one with an endless step must not drown the others.
    shares = np.mean(
        [[p.compute / p.total, p.latency / p.total, p.transfer / p.total] for p in parts], 0
    )
    total = step_at(fit, ranks).middle
    return Parts(*(float(total * one) for one in shares))


def limit(fit: Fit, ranks: int) -> str:
    """What costs most at ``ranks`` beside computing.

    Returns:
        ``latency``, ``bandwidth``, ``fixed`` (the part of computing that more ranks do not
        shrink), or nothing where it is less than a twentieth of the step.
    """
    parts = parts_at(fit, ranks)
    costs = {
        "latency": parts.latency,
        "bandwidth": parts.transfer,
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


def _changes(strong: bool, messages: int | None) -> list[_Change]:
    """The remedies that make sense where so many messages a step are sent (None: not known)."""
    found = [
        _Change(
            "gradients in fp16",
            "--compression fp16: half the bytes (the conversion is not counted)",
            lambda costs: replace(costs, transfer=costs.transfer / 2),
        )
    ]
    if not strong:  # there the batch is given
        found += [
            _Change(
                "batch of a rank x 4",
                "--batch-size, as far as memory and accuracy allow",
                lambda costs: replace(costs, compute=costs.computing(4.0)),
            ),
            _Change(
                "accumulate 4 batches",
                "--accumulate-steps 4: as far as accuracy allows, in the memory of one batch",
                lambda costs: costs,
                passes=4,
            ),
        ]
    if messages is None:
        found.append(
            _Change(
                "half as many messages",
                "larger fusions (HOROVOD_FUSION_THRESHOLD)",
                lambda costs: replace(costs, latency=costs.latency / 2),
            )
        )
    elif messages > 1:
        found.append(
            _Change(
                f"1 message, not {messages}",
                "one fusion of all gradients; but then computing hides nothing",
                lambda costs: replace(costs, latency=costs.latency / messages, overlap=0.0),
            )
        )
    return found


def remedies(fit: Fit, traffic: Traffic | None, ranks: Sequence[int] = RANKS) -> list[Remedy]:
    """What could be changed, the most helpful at the last of ``ranks`` first.

    Args:
        fit: the fitted costs.
        traffic: what a step reduces, as far as it is known.
        ranks: numbers of ranks to foretell.
    """
    found = []
    for change in _changes(fit.strong, traffic.messages if traffic else None):
        expected = tuple(_changed(fit, change, number) for number in ranks)
        found.append(Remedy(change.name, change.what, expected))
    return sorted(found, key=lambda remedy: -remedy.efficiencies[-1].middle)


def _changed(fit: Fit, change: _Change, ranks: int) -> Forecast:
    return forecast(
        fit,
        lambda costs, law: efficiency(
            change.costs(costs), law, ranks, fit.base, strong=fit.strong, passes=change.passes
        ),
    )
