"""The eight steps for PyTorch in one process, without Horovod."""

from __future__ import annotations

from hvdtrain.adapters.communicator import Alone, Communicator
from hvdtrain.adapters.pytorch.common import PyTorchAdapter


class SingleAdapter(PyTorchAdapter):
    """One process: what the other ranks would do is nothing."""

    name = "single"
    runtime = "the single strategy"

    def connect(self) -> Communicator:
        """See ``CommonAdapter``."""
        return Alone()

    @property
    def stop_agreed(self) -> bool:
        """See ``CommonAdapter``."""
        return self.stop_wanted
