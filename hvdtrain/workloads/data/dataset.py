"""A dataset as the trainer wants it: batches of the samples that it names by index."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.steps.sharding import Indices, Part


@dataclass(frozen=True)
class Batch:
    """A batch of samples in the framework's tensors; it may be empty.

    Attributes:
        x: what the model is given, such as images, uint8 or float.
        y: what its output is compared with, such as class indices; as long as there are samples.
    """

    x: Any
    y: Any

    @property
    def count(self) -> int:
        """How many samples there are."""
        return len(self.y)

    def pin_memory(self) -> Batch:
        """Return it where a GPU copies it from by itself; PyTorch's loaders call this."""
        return Batch(self.x.pin_memory(), self.y.pin_memory())

    def __getitem__(self, samples: slice) -> Batch:
        """Return a batch of some of the samples."""
        return Batch(self.x[samples], self.y[samples])


Augment = Callable[[Part], NDArray[Any]]
"""Makes the inputs of a part of the training, by seed, epoch and sample alone."""


class Dataset(ABC):
    """A labelled dataset in the framework's tensors, fetched by index.

    Attributes:
        samples: how many there are.
        digest: the same where the samples are the same, in the same order; empty: not known.
    """

    samples: int
    digest = ""

    @abstractmethod
    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        """Yield each part with its samples, augmented, in order; may read ahead."""

    @abstractmethod
    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Batch]:
        """Yield the samples of each batch of indices, not augmented."""

    def close(self) -> None:  # noqa: B027 (most data has nothing to end)
        """End worker processes, if there are any."""


def digest_of(*arrays: NDArray[Any]) -> str:
    """Return the SHA-256 of the bytes of ``arrays``."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


class Indexed(Dataset):
    """Data of which any samples can be had at once: nothing is read ahead."""

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
