"""The eight steps for TensorFlow in one process, without Horovod."""

from __future__ import annotations

from typing_extensions import override

from hvdtrain.adapters.tensorflow.adapter import TensorFlowAdapter
from hvdtrain.collectives.base import Communicator, SingleRank


class SingleAdapter(TensorFlowAdapter):
    """One process, without communication."""

    name = "single"
    runtime = "the single strategy"

    @override
    def connect(self) -> Communicator:
        self.claim_device(0, 1)
        return SingleRank()
