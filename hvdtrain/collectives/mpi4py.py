"""The collectives of MPI itself, on host memory.

Importing this module starts MPI; set what it reads from the environment before.
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI
from typing_extensions import override

from hvdtrain.collectives.base import Bytes, Communicator, Tensor, Vector


class Mpi4py(Communicator):
    """All ranks of ``MPI.COMM_WORLD``."""

    def __init__(self) -> None:
        self.world = MPI.COMM_WORLD
        self.rank: int = self.world.rank
        self.size: int = self.world.size

    @override
    def gather(self, data: bytes) -> list[bytes]:
        gathered: list[bytes] = self.world.allgather(data)
        return gathered

    @override
    def broadcast(self, data: Bytes) -> Bytes:
        received = data.copy()
        self.world.Bcast(received, root=0)
        return received

    @override
    def sum(self, values: Vector) -> Vector:
        total = np.empty_like(values)
        self.world.Allreduce(values, total)
        return total

    @override
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        self.world.Allreduce(MPI.IN_PLACE, tensor)
        return tensor
