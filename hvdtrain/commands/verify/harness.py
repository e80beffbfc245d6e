"""Define what the eight checks use on a rank: the adapter and plain framework code."""

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
"""JSON values measured by one rank."""

WIDTHS = (6, 7, 5, 8, 6, 4, 7, 2)  # inputs, layers of the network, outputs
TENSORS = 2 * len(WIDTHS) - 2
ROUNDING = 1e-9  # of the largest value; far above what the order of a float64 sum changes


@dataclass(frozen=True)
class Processor:
    """The device that a rank computes on."""

    gpu: str | None  # identifier, unique among the GPUs of the host; None on a CPU
    threads: int  # on a CPU; 0 on a GPU


class FrameworkProbe(ABC):
    """A framework's plain code, without hvdtrain's optimizer and collectives.

    Networks are small and of float64; a loss is the mean over the samples of the squared errors.
    """

    def __init__(self, adapter: CommonAdapter) -> None:
        self.adapter = adapter

    @property
    def device(self) -> Any:
        """The adapter's device, in the framework's type; known after ``pin_device``."""
        return self.adapter.device

    @abstractmethod
    def processor(self) -> Processor:
        """Return the device that the framework reports."""

    @abstractmethod
    def network(self, seed: int, *, buffers: bool = False) -> Any:
        """Build a network, its weights drawn from ``seed``; ``buffers``: with a BatchNorm layer."""

    @abstractmethod
    def sgd(self, model: Any) -> Any:
        """Build gradient descent at rate 1: an update subtracts exactly the gradient."""

    @abstractmethod
    def adam(self, model: Any) -> Any:
        """Build an optimizer that has state."""

    @abstractmethod
    def update(self, model: Any, optimizer: Any, x: Array, y: Array) -> None:
        """Make one update as a user's loop does; ``x`` and ``y`` may be empty."""

    @abstractmethod
    def gradient(self, model: Any, x: Array, y: Array) -> Array:
        """Return the gradient of the loss over all of ``x`` as one vector, without an update."""

    @abstractmethod
    def parameters(self, model: Any) -> Array:
        """Return the trainable parameters as one vector."""

    @abstractmethod
    def set_parameters(self, model: Any, values: Array) -> None:
        """Set the trainable parameters to a vector from ``parameters``."""

    @abstractmethod
    def state(self, model: Any, optimizer: Any) -> list[Array]:
        """Return parameters, buffers and optimizer state, tensor by tensor."""

    @abstractmethod
    def applied_rates(self, rates: list[float]) -> list[float]:
        """Return the learning rates at which the trainer's task really updates, for ``rates``.

        Each is computed from one update of a weight whose gradient is known.
        """


@dataclass(frozen=True)
class Probe:
    """The adapter and the framework code that a check uses on this rank.

    The eight methods of ``adapter`` are verified. ``adapter.world`` is the true world, even if
    ``initialize`` returned a false one, so that a false world fails only row 1.
    """

    adapter: CommonAdapter
    framework: FrameworkProbe
    claimed: World  # by ``initialize``

    @property
    def rank(self) -> int:
        """This rank, according to the runtime."""
        return self.adapter.communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks that the runtime connects."""
        return self.adapter.communicator.size


@dataclass(frozen=True)
class Check:
    """The measurement of a step, made on every rank, and the judgement of all results."""

    measure: Callable[[Probe], Facts]
    judge: Callable[[list[Facts]], Row]


def samples(seed: int, count: int) -> tuple[Array, Array]:
    """Draw ``count`` inputs and targets of the network; equal on all ranks for equal ``seed``."""
    draw = np.random.default_rng([seed, count])
    return draw.standard_normal((count, WIDTHS[0])), draw.standard_normal((count, WIDTHS[-1]))


def weights(seed: int) -> list[tuple[Array, Array]]:
    """Return matrix (inputs, outputs) and bias of each layer of the network."""
    draw = np.random.default_rng(seed)
    pairs = itertools.pairwise(WIDTHS)
    return [(draw.standard_normal(pair) / 2, draw.standard_normal(pair[1]) / 2) for pair in pairs]


def largest(values: Array) -> float:
    """Return the largest absolute value; nan if any value is nan."""
    return float(np.max(np.abs(values), initial=0.0))
