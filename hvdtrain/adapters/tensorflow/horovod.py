"""The eight steps for TensorFlow over Horovod."""

from __future__ import annotations

import os
from typing import Any

import horovod.tensorflow as hvd
from typing_extensions import override

from hvdtrain.adapters.tensorflow.bucketed import BucketedAdapter
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.horovod_tf import HorovodTensorFlow
from hvdtrain.config.comm_options import check_nccl
from hvdtrain.system.machine import gpus


class HorovodAdapter(BucketedAdapter):
    """Horovod sums the buckets."""

    name = "horovod"
    runtime = "Horovod"

    @override
    def connect(self) -> Communicator:
        check_nccl(
            self.comm_options, used=bool(hvd.nccl_built()) and gpus.count_gpus(os.environ) > 0
        )
        communicator = HorovodTensorFlow()
        self.claim_device(hvd.local_rank(), hvd.local_size())
        return communicator

    @override
    def combine(self, values: Any, name: str) -> Any:
        return hvd.mpi_ops._allreduce(values, name=name, op=hvd.Adasum, ignore_name_scope=True)

    @override
    def start_timeline(self, file: str) -> None:
        hvd.start_timeline(file, mark_cycles=True)

    @override
    def stop_timeline(self) -> None:
        hvd.stop_timeline()
