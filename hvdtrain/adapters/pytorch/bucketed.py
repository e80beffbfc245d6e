"""Step 5 for PyTorch over any library that sums tensors asynchronously."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from hvdtrain.adapters.pytorch.buckets import Buckets, Sums
from hvdtrain.adapters.pytorch.common import PyTorchAdapter
from hvdtrain.adapters.pytorch.compression import TYPES, Compressed
from hvdtrain.steps.sharding import Part, Shards


class BucketedAdapter(PyTorchAdapter):
    """Each rank holds the whole model; gradients are summed in buckets during backward."""

    def __init__(self) -> None:
        super().__init__()
        self._distributions = 0
        self._all_buckets: list[Buckets] = []  # of each optimizer

    @abstractmethod
    def open_sums(self) -> Sums:
        """Return the sums for the buckets of another optimizer; all ranks call it together."""

    @override
    def distribute(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        name = f"gradients.{self._distributions}" if self._distributions else "gradients"
        self._distributions += 1
        sums, kind = self.open_sums(), TYPES.get(self.comm_options.compression)
        sums = Compressed(sums, kind) if kind else sums
        full = self.comm_options.bucket_bytes
        weight = self.comm_options.weight
        buckets = Buckets(name, optimizer, sums, lambda: weight(self.part_weight), full)
        buckets.stop_wanted = lambda: self.stop_wanted
        buckets.waiting = self.waits.during
        buckets.may_skip = lambda: len(self.gradient_sums) == 1
        self._all_buckets = [*self.gradient_sums, buckets]
        self.waits.before = self.end_part
        return model, optimizer

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        try:
            for buckets in self.gradient_sums:
                buckets.summing = False
            yield
        finally:
            for buckets in self.gradient_sums:
                buckets.summing = True

    @property
    @override
    def gradient_sums(self) -> list[Buckets]:
        # Of the optimizers that still exist.
        return [buckets for buckets in self._all_buckets if buckets.optimizer() is not None]

    @override
    def begin_part(self, shards: Shards, part: Part) -> None:
        super().begin_part(shards, part)
        for buckets in self.gradient_sums:
            buckets.begin(empty=not part.count)

    @override
    def end_part(self) -> None:
        for buckets in self.gradient_sums:
            buckets.whole()
