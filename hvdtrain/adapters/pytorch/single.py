"""The eight steps for PyTorch in one process, without Horovod."""

from __future__ import annotations

from typing_extensions import override

from hvdtrain.adapters.pytorch.adapter import PyTorchAdapter
from hvdtrain.collectives.base import Communicator, SingleRank


class SingleAdapter(PyTorchAdapter):
    """One process, without communication."""

    name = "single"
    runtime = "the single strategy"

    @override
    def connect(self) -> Communicator:
        return SingleRank()
