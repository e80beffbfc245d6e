"""The strategy of Horovod for TensorFlow."""

from __future__ import annotations

import horovod.tensorflow as hvd
from typing_extensions import override

from hvdtrain.adapters.tensorflow.buckets import BucketStrategy
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.horovod_tf import HorovodTensorFlow


class Horovod(BucketStrategy):
    """Horovod sums the buckets."""

    name = "horovod"
    runtime = "Horovod"

    @override
    def connect(self) -> Communicator:
        communicator = HorovodTensorFlow()
        self.adapter.framework.claim_device(hvd.local_rank(), hvd.local_size())
        return communicator

    @override
    def start_timeline(self, file: str) -> None:
        hvd.start_timeline(file, mark_cycles=True)

    @override
    def stop_timeline(self) -> None:
        hvd.stop_timeline()
