"""The eight steps for PyTorch over Horovod."""

from __future__ import annotations

from typing import Any

import horovod.torch as hvd
import torch
from typing_extensions import override

from hvdtrain.adapters.pytorch.bucketed import BucketedAdapter
from hvdtrain.adapters.pytorch.buckets import Sums
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.horovod_torch import HorovodTorch
from hvdtrain.config.levers import check_nccl


class HorovodAdapter(BucketedAdapter):
    """Horovod sums the buckets, whatever the order in which the ranks start them."""

    name = "horovod"
    runtime = "Horovod"

    @override
    def connect(self) -> Communicator:
        check_nccl(self.levers, used=bool(hvd.nccl_built()) and torch.cuda.is_available())
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
    """Horovod pairs the sums of the ranks by name."""

    @override
    def start(self, bucket: torch.Tensor, name: str) -> Any:
        return hvd.allreduce_async_(bucket, name=name, op=hvd.Sum)

    @override
    def wait(self, handle: Any) -> None:
        hvd.synchronize(handle)
