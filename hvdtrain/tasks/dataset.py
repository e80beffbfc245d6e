"""The trainer's interface to a dataset: batches of samples, selected by index."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices, Part
from hvdtrain.system.output.text import plural


@dataclass(frozen=True)
class Batch:
    """A batch of n samples in the framework's tensors.

    Attributes:
        x: inputs of the model, e.g. images, uint8 or float, shape (n, ...).
        y: targets, e.g. class indices, shape (n, ...).
        shares: share of each sample in its mixture with the next one (``--mixup``), shape (n,);
            ``x`` and ``y`` then have a sample more. None: not mixed.
        boxes: top, bottom, left and right edge of the part of each input that is erased
            (``--random-erase``), as fractions of its sides, shape (len(x), 4). None: not erased.
        stand_in: whether the only sample is a stand-in of weight 0, as this rank has none.
    """

    x: Any
    y: Any
    shares: Any = None
    boxes: Any = None
    stand_in: bool = False

    @property
    def count(self) -> int:
        """Number of samples; 0 for a stand-in."""
        return 0 if self.stand_in else len(self.y if self.shares is None else self.shares)

    def pin_memory(self) -> Batch:
        """Return the batch in pinned memory; called by PyTorch's loaders."""
        return Batch(self.x.pin_memory(), self.y.pin_memory())

    def __getitem__(self, samples: slice) -> Batch:
        """Return a batch of some of the samples; of none, the first one as a stand-in."""
        # Not of tensors, which a traced function of TensorFlow cannot compare here.
        none = isinstance(samples.stop, int) and samples.start == samples.stop
        samples = slice(0, 1) if none else samples
        mixed = self.shares is not None
        wide = slice(samples.start, samples.stop + 1) if mixed else samples
        return Batch(
            self.x[wide],
            self.y[wide],
            self.shares[samples] if mixed else None,
            None if self.boxes is None else self.boxes[wide],
            self.stand_in or none,
        )


Augment = Callable[[Part], NDArray[Any]]
"""part -> its augmented inputs, a function of seed, epoch and sample."""


class Dataset(ABC):
    """A labelled dataset in the framework's tensors, fetched by index."""

    samples: int  # number of samples
    digest = ""  # of the samples in order; empty: unknown

    @abstractmethod
    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        """Yield each part with its samples, augmented, in order; may read ahead."""

    @abstractmethod
    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Batch]:
        """Yield the samples of each batch of indices, not augmented."""

    def close(self) -> None:  # noqa: B027 (most data has nothing to end)
        """End the worker processes, if any."""


def digest_of(*arrays: NDArray[Any]) -> str:
    """Return the SHA-256 of the bytes of ``arrays``."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def unknown_class(label: int, classes: int) -> UsageError:
    """Return the error for a label that is not one of ``classes``, the outputs of the model."""
    return UsageError(
        f"the data of the task has the label {label}, and its model {plural(classes, 'output')}: "
        f"labels must be from 0 to {classes - 1}"
    )


class Indexed(Dataset):
    """A dataset with immediate access to any samples, which are not read ahead."""

    @abstractmethod
    def fetch(self, indices: Indices) -> Batch:
        """Return the samples with these indices."""

    @override
    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        for part in parts:
            yield part, self.fetch(part.indices)

    @override
    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Batch]:
        for indices in batches:
            yield self.fetch(indices)


class InMemoryBase(Indexed):
    """A dataset in the memory of the device; a subclass is that of a framework.

    Args:
        images: inputs of the samples, shape (n, ...).
        labels: targets of the samples, shape (n, ...).
        device: device of the tensors, as the framework names it.
        augment: returns the images of a training step; default: those in memory.
    """

    def __init__(
        self,
        images: NDArray[Any],
        labels: NDArray[Any],
        device: Any,
        augment: Augment | None = None,
    ) -> None:
        self.device, self.augment = device, augment
        self.images, self.labels = self.tensor(np.array(images)), self.tensor(np.array(labels))
        self.samples, self.digest = len(labels), digest_of(labels, images)

    @abstractmethod
    def tensor(self, array: NDArray[Any]) -> Any:
        """Return an array as a tensor on the device, which may share its memory."""

    def send(self, array: NDArray[Any]) -> Any:
        """Return an array of a batch as a tensor on the device, asynchronously if possible."""
        return self.tensor(array)

    @override
    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        for part, batch in super().training(parts):
            if self.augment:
                batch = Batch(self.send(self.augment(part)), batch.y)
            yield part, batch
