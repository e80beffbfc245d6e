"""The eight steps for PyTorch over Horovod."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from typing_extensions import override

from hvdtrain.adapters.pytorch.buckets import Buckets
from hvdtrain.adapters.pytorch.common import PyTorchAdapter
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.horovod_torch import HorovodTorch
from hvdtrain.steps.sharding import Part, Shards


class HorovodAdapter(PyTorchAdapter):
    """Each rank holds the whole model; Horovod sums the gradients."""

    name = "horovod"
    runtime = "Horovod"

    def __init__(self) -> None:
        super().__init__()
        self._distributions = 0
        self._all_buckets: list[Buckets] = []  # of each optimizer

    @override
    def connect(self) -> Communicator:
        return HorovodTorch()

    @override
    def distribute(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        name = f"gradients.{self._distributions}" if self._distributions else "gradients"
        self._distributions += 1
        buckets = Buckets(name, optimizer, _start_sum, hvd.synchronize, lambda: self.part_weight)
        buckets.stop_wanted = lambda: self.stop_wanted
        buckets.waiting = self.waits.during
        buckets.may_skip = lambda: len(self.gradient_sums) == 1
        self._all_buckets = [*self.gradient_sums, buckets]
        return model, optimizer

    @property
    @override
    def gradient_sums(self) -> list[Buckets]:
        # Of the optimizers that still exist.
        return [one for one in self._all_buckets if one.optimizer() is not None]

    @override
    def begin_part(self, shards: Shards, part: Part) -> None:
        super().begin_part(shards, part)
        for buckets in self.gradient_sums:
            buckets.begin(empty=not part.count)

    @override
    def start_timeline(self, file: str) -> None:
        hvd.start_timeline(file, mark_cycles=True)

    @override
    def stop_timeline(self) -> None:
        hvd.stop_timeline()


def _start_sum(bucket: torch.Tensor, name: str) -> int:
    handle: int = hvd.allreduce_async_(bucket, name=name, op=hvd.Sum)
    return handle
