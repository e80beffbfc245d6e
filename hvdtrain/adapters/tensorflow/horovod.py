"""The eight steps for TensorFlow over Horovod."""

from __future__ import annotations

import horovod.tensorflow as hvd
from typing_extensions import override

from hvdtrain.adapters.tensorflow.bucketed import BucketedAdapter
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.horovod_tf import HorovodTensorFlow


class HorovodAdapter(BucketedAdapter):
    """Horovod sums the buckets."""

    name = "horovod"
    runtime = "Horovod"

    @override
    def connect(self) -> Communicator:
        communicator = HorovodTensorFlow()
        self.claim_device(hvd.local_rank(), hvd.local_size())
        return communicator

    @override
    def start_timeline(self, file: str) -> None:
        hvd.start_timeline(file, mark_cycles=True)

    @override
    def stop_timeline(self) -> None:
        hvd.stop_timeline()
