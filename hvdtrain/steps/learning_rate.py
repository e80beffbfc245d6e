"""Step 4, the learning rate: a pure function of the position in the training.

Scaling with the world size and a warm-up follow Goyal et al., "Accurate, Large Minibatch SGD"
(2017); the square-root rule Krizhevsky, "One weird trick" (2014); the cosine Loshchilov and
Hutter, "SGDR" (2017).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdtrain.errors import UsageError

SCALINGS = ("linear", "sqrt", "none")
SCHEDULES = ("constant", "linear", "cosine", "multistep")


def scale_factor(scaling: str, size: int) -> float:
    """Return the factor by which the learning rate of one rank grows on ``size`` ranks.

    Raises:
        UsageError: an unknown rule.
    """
    factors = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    if scaling not in factors:
        raise UsageError(f"--lr-scaling {scaling}: choose one of {', '.join(SCALINGS)}")
    return factors[scaling]


@dataclass(frozen=True)
class LearningRate:
    """Learning rate over the training; call it with a place in epochs.

    The place is ``epoch + consumed / samples``, so the curve over the data is the same at any
    world size and batch.

    Attributes:
        base: learning rate for one rank.
        factor: what the world size multiplies it by (``scale_factor``).
        epochs: length of the training, in epochs; where ``linear`` and ``cosine`` reach 0.
        warmup_epochs: length of the linear climb from ``base`` to ``base * factor``; with factor
            1 the climb begins at 0, else a warm-up on one rank would do nothing.
        schedule: what follows the warm-up, one of ``SCHEDULES``.
        milestones: for ``multistep``: places, in epochs, from which on ``decay`` multiplies.
        decay: for ``multistep``: the factor at each milestone.
    """

    base: float
    factor: float = 1.0
    epochs: float = 1.0
    warmup_epochs: float = 0.0
    schedule: str = "constant"
    milestones: tuple[float, ...] = ()
    decay: float = 0.1

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UsageError(f"--lr-schedule {self.schedule}: choose one of {', '.join(SCHEDULES)}")
        if self.schedule == "multistep" and not self.milestones:
            raise UsageError("--lr-schedule multistep needs --lr-milestones, such as 30,60,80")

    def __call__(self, place: float) -> float:
        """Return the learning rate at ``place`` epochs from the start of the training."""
        peak = self.base * self.factor
        if place < self.warmup_epochs:
            start = self.base if self.factor > 1 else 0.0
            return start + (peak - start) * place / self.warmup_epochs
        return peak * self._decayed(place)

    def _decayed(self, place: float) -> float:
        if self.schedule == "multistep":
            return float(
                self.decay ** sum(1 for milestone in self.milestones if place >= milestone)
            )
        span = self.epochs - self.warmup_epochs
        done = min(1.0, (place - self.warmup_epochs) / span) if span > 0 else 1.0
        if self.schedule == "linear":
            return 1.0 - done
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0
