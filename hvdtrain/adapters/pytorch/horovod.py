"""The strategy of Horovod for PyTorch."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from typing_extensions import override

from hvdtrain.adapters.pytorch.buckets import BucketStrategy, Sums
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.horovod_torch import HorovodTorch, summable


class Horovod(BucketStrategy):
    """Horovod sums the buckets, in any order of start."""

    name = "horovod"
    runtime = "Horovod"
    unsummed = (torch.complex64,)

    @override
    def connect(self) -> Communicator:
        return HorovodTorch()

    @override
    def open_sums(self) -> Sums:
        return HorovodSums()

    @override
    def start_timeline(self, file: str) -> None:
        hvd.start_timeline(file, mark_cycles=True)

    @override
    def stop_timeline(self) -> None:
        hvd.stop_timeline()


class HorovodSums(Sums):
    """Sums by Horovod, which matches those of different ranks by name."""

    @override
    def start(self, bucket: torch.Tensor, name: str) -> Any:
        tensor = summable(bucket)
        return hvd.allreduce_async_(tensor, name=name, op=hvd.Sum), tensor, bucket

    @override
    def wait(self, handle: Any) -> None:
        request, tensor, bucket = handle
        hvd.synchronize(request)
        if tensor is not bucket:
            bucket.copy_(tensor)
