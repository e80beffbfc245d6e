"""The strategy of one process, for any framework, without Horovod."""

from __future__ import annotations

from typing_extensions import override

from hvdtrain.adapters.strategy import BaseStrategy
from hvdtrain.collectives.base import Communicator, SingleRank


class Single(BaseStrategy):
    """One process, without communication."""

    name = "single"
    runtime = "the single strategy"

    @override
    def connect(self) -> Communicator:
        self.adapter.framework.claim_device(0, 1)
        return SingleRank()
