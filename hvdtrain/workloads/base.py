"""What the trainer asks of a task; one class a framework fulfils it for every workload."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.steps.sharding import Indices, Part


@dataclass(frozen=True)
class TaskOptions:
    """How to build and run a task.

    Attributes:
        model: name of the network.
        precision: ``fp64``, ``fp32``, ``bf16`` or ``fp16``; of the forward pass.
        seed: of the initial weights, dropout and augmentation.
        optimizer: ``sgd``, ``adam`` or ``adamw``.
        momentum: of SGD.
        weight_decay: L2 penalty (decoupled with ``adamw``).
        dropout: one fraction for all dropouts; None keeps the model's own.
        image_size: side of a square image, in pixels.
        workers: processes (threads in TensorFlow) that read images ahead.
        device: where to compute, in the framework's own words.
    """

    model: str
    precision: str = "fp32"
    seed: int = 0
    optimizer: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.0
    dropout: float | None = None
    image_size: int = 224
    workers: int = 1
    device: Any = "cpu"


@dataclass(frozen=True)
class Loaded:
    """A batch of samples in the framework's tensors; either may be empty along the first axis.

    Attributes:
        x: images, uint8 or float.
        y: labels, int64, shape (count,).
    """

    x: Any
    y: Any


class Data(ABC):
    """A labelled dataset in the framework's tensors, fetched by index.

    Attributes:
        samples: how many there are.
        digest: the same where the samples are the same, in the same order; empty: not known.
    """

    samples: int
    digest = ""

    @abstractmethod
    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Loaded]]:
        """Each part with its samples, augmented, in order; may read ahead."""

    @abstractmethod
    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Loaded]:
        """The samples of each batch of indices, not augmented."""

    def close(self) -> None:  # noqa: B027 (most data has nothing to end)
        """End worker processes, if there are any."""


def digest_of(*arrays: NDArray[Any]) -> str:
    """The SHA-256 of the bytes of ``arrays``."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Indexed(Data):
    """Data of which any samples can be had at once: nothing is read ahead."""

    @abstractmethod
    def fetch(self, indices: Indices) -> Loaded:
        """The samples with these indices."""

    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Loaded]]:
        """See ``Data``."""
        for part in parts:
            yield part, self.fetch(part.indices)

    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Loaded]:
        """See ``Data``."""
        for indices in batches:
            yield self.fetch(indices)


@dataclass(frozen=True)
class NotFinite:
    """Why no rank has made an update: the gradients of the global batch are not finite.

    Attributes:
        parameter: the first one whose gradient is not finite; the same on all ranks.
        own: what this rank has contributed, such as ``its loss is nan``; empty: nothing known.
    """

    parameter: str
    own: str


class Task(ABC):
    """A model with its data, optimizer and loss; everything that happens in one process.

    Attributes:
        model: the network, in its framework's own class.
        optimizer: likewise.
        train: samples to train on.
        test: samples to evaluate on; None where there are none.
        options: what it was built with.
        notes: lines that a user should see before the training.
        needs_empty_forward: an empty batch takes the forward and backward pass too, because the
            other ranks wait in it.
        not_finite: why the last ``update`` changed nothing; None: it did.
    """

    model: Any
    optimizer: Any
    train: Data
    test: Data | None = None
    options: TaskOptions
    notes: tuple[str, ...] = ()
    needs_empty_forward = False
    not_finite: NotFinite | None = None

    @abstractmethod
    def update(self, batch: Loaded, *, learning_rate: float, seed: int) -> Any:
        """One training step: forward, backward, optimizer.

        Args:
            batch: what to train on; may be empty, and the optimizer takes its step all the same.
            learning_rate: of this step.
            seed: of the dropout in this step.

        Returns:
            The mean loss over the batch, a scalar tensor (0 for an empty batch); not waited for.

        Where the gradients are not finite, ``not_finite`` tells so on every rank, and none has
        changed its weights. (Loss scaling, of fp16, has its own way: it leaves such steps out and
        scales by less.)
        """

    @abstractmethod
    def evaluate(self, batch: Loaded) -> tuple[float, int]:
        """Sum of the losses over the batch, and how many were classified rightly."""

    @abstractmethod
    def parameter_norm(self) -> float:
        """The L2 norm over all trainable parameters, summed in float64."""

    @abstractmethod
    def loss_values(self, losses: list[Any]) -> list[float]:
        """What ``update`` returned, as numbers; waits for the device."""
