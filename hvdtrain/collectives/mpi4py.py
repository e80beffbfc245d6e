"""Collectives of MPI, in host memory.

Importing this module initializes MPI; set its environment variables before.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from typing_extensions import override

from hvdtrain.collectives.base import Bytes, Communicator, Operations, Tensor, Vector, split

SPIN = 0.001  # seconds of polling; most waits are shorter
NAP = 0.001  # seconds between tests afterwards


class Mpi4py(Communicator):
    """All ranks of ``MPI.COMM_WORLD``."""

    def __init__(self) -> None:
        self.world = MPI.COMM_WORLD
        self.rank: int = self.world.rank
        self.size: int = self.world.size
        host = self.world.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank: int = host.rank
        self.local_size: int = host.size
        host.Free()

    @override
    def gather(self, data: bytes) -> list[bytes]:
        # mpi4py's `allgather` would unpickle them.
        lengths = np.empty(self.size, np.int64)
        self.world.Allgather(np.array([len(data)]), lengths)
        joined = np.empty(lengths.sum(), np.uint8)
        self.world.Allgatherv(np.frombuffer(data, np.uint8), (joined, lengths))
        return split(joined.tobytes(), lengths.tolist())

    @override
    def wait_for_all(self) -> None:
        # MPI's own barrier would poll on a core that other ranks may need.
        barrier = self.world.Ibarrier()
        spun = time.perf_counter() + SPIN
        while not barrier.Test():
            if time.perf_counter() > spun:
                time.sleep(NAP)

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

    @override
    def operations(self, count: int) -> Operations:
        world, root = self.world, self.is_root
        whole, received = self.tensor(count, 0.0), self.tensor(count, 0.0)
        part = self.tensor(self.part_of(count), 0.0)
        parts, others = np.tile(part, self.size), np.tile(part, self.size)
        following, previous = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        return {
            "broadcast": lambda: world.Bcast(whole),
            "scatter": lambda: world.Scatter(parts if root else None, part),
            "gather": lambda: world.Gather(part, parts if root else None),
            "reduce": lambda: world.Reduce(whole, received if root else None),
            **super().operations(count),
            "allgather": lambda: world.Allgather(part, parts),
            "reduce-scatter": lambda: world.Reduce_scatter_block(parts, part),
            "alltoall": lambda: world.Alltoall(parts, others),
            "send and receive": lambda: world.Sendrecv(
                whole, dest=following, recvbuf=received, source=previous
            ),
        }

    def open_sums(self) -> NonBlockingSums:
        """Return non-blocking sums; all ranks call it together."""
        return NonBlockingSums(self.world.Dup())

    def sum_halves(self, tensor: Tensor, halves: Halves) -> Tensor:
        """Sum 16-bit floats over all ranks, in place."""
        message, operation = halves.of(tensor)
        self.world.Allreduce(MPI.IN_PLACE, message, operation)
        return tensor


class Halves:
    """Sums of 16-bit floats, for which MPI has no standard type.

    Args:
        add: function that adds its first buffer to its second one.
    """

    def __init__(self, add: Callable[[Any, Any], None]) -> None:
        self._type = MPI.BYTE.Create_contiguous(2).Commit()
        self._sum = MPI.Op.Create(lambda mine, total, _: add(mine, total), commute=True)

    def of(self, values: np.ndarray[Any, Any]) -> tuple[Any, MPI.Op]:
        """Return ``values`` as an MPI buffer, and the operation that sums it."""
        return [values.view(np.uint8), values.size, self._type], self._sum


class NonBlockingSums:
    """Non-blocking sums over all ranks, which must start them in the same order.

    MPI transfers data only during its calls, so call ``progress`` during the computation.
    """

    def __init__(self, communicator: MPI.Comm) -> None:
        self._communicator = communicator
        self._running: list[MPI.Request] = []

    def start(self, values: np.ndarray[Any, Any], halves: Halves | None = None) -> MPI.Request:
        """Start summing ``values`` in place; ``halves`` for 16-bit floats."""
        message, operation = halves.of(values) if halves else (values, MPI.SUM)
        request = self._communicator.Iallreduce(MPI.IN_PLACE, message, operation)
        self._running.append(request)
        return request

    def progress(self) -> None:
        """Progress the running sums."""
        if self._running and MPI.Request.Testall(self._running):
            self._running.clear()
