"""What the eight checks work with on a rank: the adapter, and plain framework code beside it."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.commands.verify.rows import Row
from hvdtrain.steps.world import World

Array = NDArray[Any]
Facts = dict[str, Any]
"""JSON values that one rank measured."""

WIDTHS = (6, 7, 5, 8, 6, 4, 7, 2)  # inputs, layers of the network, outputs
TENSORS = 2 * len(WIDTHS) - 2
ROUNDING = 1e-9  # of the largest value: what the order of a float64 sum may change, and much more


@dataclass(frozen=True)
class Processor:
    """What a rank really computes on."""

    gpu: str | None  # what tells it from the other GPUs of its host; None on a CPU
    threads: int  # on a CPU; 0 on a GPU


class Kit(ABC):
    """A framework's own code, without hvdtrain's optimizer and collectives.

    Networks are of float64 and small; a loss is the mean over the samples of the squared errors.
    """

    def __init__(self, adapter: CommonAdapter) -> None:
        self.adapter = adapter

    @property
    def device(self) -> Any:
        """Where the adapter computes, in the framework's words; known once it is pinned."""
        return self.adapter.device

    @abstractmethod
    def processor(self) -> Processor:
        """Return what the framework computes on, as the framework says."""

    @abstractmethod
    def network(self, seed: int, *, buffers: bool = False) -> Any:
        """Build a network, its weights drawn from ``seed``; ``buffers``: with a BatchNorm layer."""

    @abstractmethod
    def sgd(self, model: Any) -> Any:
        """Build gradient descent at rate 1: an update subtracts the gradient and nothing else."""

    @abstractmethod
    def adam(self, model: Any) -> Any:
        """Build an optimizer with a state of its own."""

    @abstractmethod
    def update(self, model: Any, optimizer: Any, x: Array, y: Array) -> None:
        """Make one update as a user's loop does; ``x`` and ``y`` may be empty."""

    @abstractmethod
    def gradient(self, model: Any, x: Array, y: Array) -> Array:
        """Return the gradient of the loss over all of ``x`` as one vector; update nothing."""

    @abstractmethod
    def parameters(self, model: Any) -> Array:
        """Return the trainable parameters as one vector."""

    @abstractmethod
    def set_parameters(self, model: Any, values: Array) -> None:
        """Put back what ``parameters`` gave."""

    @abstractmethod
    def state(self, model: Any, optimizer: Any) -> list[Array]:
        """Return parameters, buffers and optimizer state, tensor by tensor."""

    @abstractmethod
    def applied_rates(self, rates: list[float]) -> list[float]:
        """Return the learning rates at which the trainer's task really updates, given ``rates``.

        One weight, a known gradient, one update for each rate; the weight tells the rate.
        """


@dataclass(frozen=True)
class Bench:
    """What a check measures with.

    The eight methods of ``adapter`` are what is verified; ``adapter.world`` is true here, whatever
    ``initialize`` said, so that a false world shows in one row.
    """

    adapter: CommonAdapter
    kit: Kit
    claimed: World  # by ``initialize``

    @property
    def rank(self) -> int:
        """This rank, as the runtime counts."""
        return self.adapter.communicator.rank

    @property
    def size(self) -> int:
        """How many ranks the runtime connects."""
        return self.adapter.communicator.size


@dataclass(frozen=True)
class Check:
    """What every rank measures of a step, and the row that follows from what all have found."""

    measure: Callable[[Bench], Facts]
    judge: Callable[[list[Facts]], Row]


def samples(seed: int, count: int) -> tuple[Array, Array]:
    """Draw ``count`` inputs and targets of the network, the same for a seed on every rank."""
    draw = np.random.default_rng([seed, count])
    return draw.standard_normal((count, WIDTHS[0])), draw.standard_normal((count, WIDTHS[-1]))


def weights(seed: int) -> list[tuple[Array, Array]]:
    """Return matrix (inputs, outputs) and offset of each layer of the network."""
    draw = np.random.default_rng(seed)
    pairs = itertools.pairwise(WIDTHS)
    return [(draw.standard_normal(pair) / 2, draw.standard_normal(pair[1]) / 2) for pair in pairs]


def largest(values: Array) -> float:
    """Return the largest absolute value; nan where there is a nan."""
    return float(np.max(np.abs(values), initial=0.0))
