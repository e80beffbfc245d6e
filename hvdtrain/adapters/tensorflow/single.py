"""The eight steps for TensorFlow in one process, without Horovod."""

from __future__ import annotations

from hvdtrain.adapters.communicator import Alone, Communicator
from hvdtrain.adapters.tensorflow.common import TensorFlowAdapter


class SingleAdapter(TensorFlowAdapter):
    """One process: what the other ranks would do is nothing."""

    name = "single"
    runtime = "the single strategy"

    def connect(self) -> Communicator:
        """See ``CommonAdapter``."""
        self.claim_device(0, 1)
        return Alone()

    @property
    def stop_agreed(self) -> bool:
        """See ``CommonAdapter``."""
        return self.stop_wanted
