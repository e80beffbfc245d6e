"""The eight steps for PyTorch over Horovod."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from typing_extensions import override

from hvdtrain.adapters.common_adapter import Flags
from hvdtrain.adapters.pytorch.bucketed import BucketedAdapter
from hvdtrain.adapters.pytorch.sums import Sums
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.horovod_torch import HorovodTorch, summable
from hvdtrain.config.comm_options import ADASUM, check_nccl
from hvdtrain.system.machine import accelerator

FLAGS = 2 + len(Flags._fields)  # elements after the gradient in a bucket of one parameter


class HorovodAdapter(BucketedAdapter):
    """Horovod sums the buckets, in any order of start."""

    name = "horovod"
    runtime = "Horovod"

    @override
    def connect(self) -> Communicator:
        check_nccl(self.comm_options, used=bool(hvd.nccl_built()) and accelerator.count() > 0)
        return HorovodTorch()

    @override
    def open_sums(self) -> Sums:
        return AdasumSums() if self.comm_options.reduction == ADASUM else HorovodSums()

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


class AdasumSums(Sums):
    """Combines buckets of one gradient each by Adasum; the flags after it are summed.

    Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021.
    """

    @override
    def start(self, bucket: torch.Tensor, name: str) -> Any:
        gradient = hvd.allreduce_async_(bucket[:-FLAGS], name=name, op=hvd.Adasum)
        flags = hvd.allreduce_async_(bucket[-FLAGS:], name=f"{name}.flags", op=hvd.Sum)
        return gradient, flags

    @override
    def wait(self, handle: Any) -> None:
        for request in handle:
            hvd.synchronize(request)
