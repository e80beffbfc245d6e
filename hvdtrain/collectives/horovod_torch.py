"""Collectives of Horovod on PyTorch tensors."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch
from typing_extensions import override

from hvdtrain.collectives.base import Bytes, Communicator, Operations, Tensor, Vector, split
from hvdtrain.system.machine import accelerator


def summable(tensor: Tensor) -> Tensor:
    """Return ``tensor``, or a copy in host memory if this Horovod does not support GPUs.

    Without CUDA Horovod hangs with a tensor on a GPU.
    """
    return tensor if hvd.nccl_built() else tensor.cpu()


class HorovodTorch(Communicator):
    """All ranks of Horovod, which is initialized here."""

    def __init__(self) -> None:
        hvd.init()
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()

    @override
    def gather(self, data: bytes) -> list[bytes]:
        # The same names in both frameworks, so that ranks with different frameworks are detected in
        # step 1 instead of hanging.
        lengths = hvd.allgather(torch.tensor([len(data)]), name="hvdtrain.lengths").tolist()
        mine = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        joined = (
            hvd.allgather(mine, name="hvdtrain.data").numpy().tobytes() if sum(lengths) else b""
        )
        return split(joined, lengths)

    @override
    def broadcast(self, data: Bytes) -> Bytes:
        return hvd.broadcast(torch.from_numpy(data), root_rank=0).numpy()

    @override
    def sum(self, values: Vector) -> Vector:
        return hvd.allreduce(torch.from_numpy(values), op=hvd.Sum).numpy()

    @override
    def tensor(self, length: int, value: float) -> Tensor:
        gpus = accelerator.count() if hvd.nccl_built() else 0
        device = f"{accelerator.kind()}:{hvd.local_rank() % gpus}" if gpus else "cpu"
        return torch.full((length,), value, dtype=torch.float32, device=device)

    @override
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        total = hvd.allreduce_(summable(tensor), name=name, op=hvd.Sum)
        return total if total.device == tensor.device else tensor.copy_(total)

    @override
    def operations(self, count: int) -> Operations:
        whole = self.tensor(count, 0.0)
        length = self.part_of(count)
        part, parts = self.tensor(length, 0.0), self.tensor(length * self.size, 0.0)
        return {
            "broadcast": lambda: hvd.broadcast_(whole, 0, name=f"broadcast.{count}"),
            **super().operations(count),
            "allgather": lambda: hvd.allgather(part, name=f"allgather.{count}"),
            "reduce-scatter": lambda: hvd.reducescatter(
                parts, op=hvd.Sum, name=f"reducescatter.{count}"
            ),
            "alltoall": lambda: hvd.alltoall(parts, name=f"alltoall.{count}"),
        }

    @override
    def synchronize(self) -> None:
        accelerator.synchronize()

    @override
    def close(self) -> None:
        hvd.shutdown()
