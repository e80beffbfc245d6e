"""Step 4, the learning rate, as a pure function of the position in the training.

Linear scaling with the world size and warm-up: Goyal et al., "Accurate, Large Minibatch SGD"
(2017); square-root scaling: Krizhevsky, "One weird trick" (2014); cosine schedule: Loshchilov and
Hutter, "SGDR" (2017); polynomial schedule: of power 2, as in MLPerf's reference for LARS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hvdtrain.errors import UsageError

SCALINGS = ("linear", "sqrt", "none")
SCHEDULES = ("constant", "linear", "cosine", "polynomial", "multistep")


POWER = 2  # of the polynomial schedule


def scale_factor(scaling: str, size: float) -> float:
    """Return the factor of the learning rate for a batch that is ``size`` times larger."""
    factors = {"linear": float(size), "sqrt": math.sqrt(size), "none": 1.0}
    if scaling not in factors:
        raise UsageError(f"--lr-scaling {scaling}: choose from {', '.join(SCALINGS)}")
    return factors[scaling]


@dataclass(frozen=True)
class LearningRate:
    """Learning-rate schedule; call it with the position in epochs to get the learning rate.

    The position is ``epoch + consumed / samples``, so the schedule does not depend on world size
    and batch size.

    Attributes:
        base: learning rate for one rank.
        factor: scaling with the number of data ranks (``scale_factor``).
        epochs: length of the training in epochs; ``linear``, ``cosine`` and ``polynomial`` reach 0
            there.
        warmup_epochs: number of epochs of linear warm-up from ``base`` to ``base * factor``; with
            factor 1 from 0, as otherwise warm-up on one rank would have no effect.
        schedule: schedule after warm-up, one of ``SCHEDULES``.
        milestones: for ``multistep``: epochs at which the learning rate is multiplied by ``decay``.
        decay: for ``multistep``: factor at each milestone.
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
            raise UsageError(f"--lr-schedule {self.schedule}: choose from {', '.join(SCHEDULES)}")
        if self.schedule == "multistep" and not self.milestones:
            raise UsageError("--lr-schedule multistep needs --lr-milestones, e.g. 30,60,80")

    def __call__(self, position: float) -> float:
        """Return the learning rate at ``position`` epochs from the start of the training."""
        peak = self.base * self.factor
        if position < self.warmup_epochs:
            start = self.base if self.factor > 1 else 0.0
            return start + (peak - start) * position / self.warmup_epochs
        return peak * self._decayed(position)

    def _decayed(self, position: float) -> float:
        if self.schedule == "multistep":
            return float(
                self.decay ** sum(1 for milestone in self.milestones if position >= milestone)
            )
        span = self.epochs - self.warmup_epochs
        done = min(1.0, (position - self.warmup_epochs) / span) if span > 0 else 1.0
        if self.schedule == "linear":
            return 1.0 - done
        if self.schedule == "polynomial":
            return (1.0 - done) ** POWER
        if self.schedule == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * done))
        return 1.0
