"""Metrics of an evaluation: each rank adds its local batches, then all ranks combine them.

A mean of means over ranks would be wrong, and many metrics (AUC, R2, mAP) are no mean over samples
at all. So a metric itself implements the exchange between ranks.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import page
from hvdtrain.tasks.dataset import Batch

Array = NDArray[Any]
ReadOutput = Callable[[], tuple[Array, Array]]
"""Copies the model's output of a batch, as float64, and its labels to NumPy arrays."""


class Consumer(Protocol):
    """Receives an evaluation batch by batch: a metric, or the lines of ``--predict``."""

    def update(self, batch: Batch, output: Array) -> None:
        """Add a batch, with ``y`` as a NumPy array, and the model's output, float64."""


class Metric(ABC):
    """A metric; each evaluation works on a copy of the task's.

    Attributes:
        names: names of the numbers in ``result``; ``loss`` and ``samples`` are reserved.
        higher_is_better: whether higher values of the first number are better; it determines the
            best checkpoint.
    """

    names: tuple[str, ...]
    higher_is_better: bool = True

    @abstractmethod
    def update(self, batch: Batch, output: Array) -> None:
        """Add a batch, with ``y`` as a NumPy array, and the model's output, float64."""

    @abstractmethod
    def gather(self, collectives: Communicator) -> None:
        """Combine the samples of all ranks; all ranks must call it together."""

    @abstractmethod
    def result(self) -> dict[str, float]:
        """Return the numbers by name; after ``gather`` the same on all ranks."""

    def shown(self, value: float) -> str:
        """Return a number of ``result``, formatted."""
        return f"{value:.4f}"


class Accuracy(Metric):
    """The fraction of samples whose class has the largest output."""

    names = ("accuracy",)

    def __init__(self) -> None:
        self.sums = np.zeros(2)  # correct samples, all samples

    @override
    def update(self, batch: Batch, output: Array) -> None:
        if output.ndim != 2 or batch.y.shape != output.shape[:1]:
            raise UsageError(
                f"accuracy: labels of the shape {batch.y.shape} and outputs of the shape "
                f"{output.shape} are not classes and their scores: the task must define its "
                f"metrics (metrics=[...], see {page('own')})"
            )
        self.sums += (output.argmax(1) == batch.y).sum(), batch.count

    @override
    def gather(self, collectives: Communicator) -> None:
        self.sums = collectives.sum(self.sums)

    @override
    def result(self) -> dict[str, float]:
        right, count = self.sums
        return {"accuracy": float(right / count)}

    @override
    def shown(self, value: float) -> str:
        return f"{100 * value:.2f} %"


class WholeSet(Metric):
    """A metric that needs all samples at once: every rank holds all labels and outputs.

    Args:
        name: name of the metric.
        compute: function of labels and outputs of the whole set, along the first axis, e.g.
            ``sklearn.metrics.r2_score``; their order depends on the number of ranks.
        higher_is_better: whether higher values are better.
    """

    def __init__(
        self, name: str, compute: Callable[[Array, Array], float], *, higher_is_better: bool = True
    ) -> None:
        self.names, self.compute, self.higher_is_better = (name,), compute, higher_is_better
        self.seen: list[tuple[Array, Array]] = []

    @override
    def update(self, batch: Batch, output: Array) -> None:
        if batch.count:
            self.seen.append((np.asarray(batch.y), output))

    @override
    def gather(self, collectives: Communicator) -> None:
        file = io.BytesIO()
        np.savez(file, *[array for pair in self.seen for array in pair])
        self.seen = []
        for data in collectives.gather_large(file.getvalue()):
            arrays = list(np.load(io.BytesIO(data)).values())
            self.seen += zip(arrays[::2], arrays[1::2], strict=True)

    @override
    def result(self) -> dict[str, float]:
        labels, outputs = (np.concatenate(part) for part in zip(*self.seen, strict=True))
        return {self.names[0]: self.compute(labels, outputs)}
