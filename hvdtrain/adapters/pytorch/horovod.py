"""The eight steps for PyTorch over Horovod."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.adapters.communicator import Bytes, Communicator, Vector
from hvdtrain.adapters.pytorch.buckets import Buckets
from hvdtrain.adapters.pytorch.common import PyTorchAdapter
from hvdtrain.launch import ending


class HorovodCollectives(Communicator):
    """Horovod's collectives on CPU tensors."""

    def __init__(self) -> None:
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()

    def gather(self, data: bytes) -> list[bytes]:
        """See ``Communicator``."""
        # Names that both frameworks use: a rank that trains with the other one is then told so in
        # step 1, instead of waiting for ever.
        lengths = hvd.allgather(torch.tensor([len(data)]), name="hvdtrain.lengths").tolist()
        mine = torch.from_numpy(np.frombuffer(bytearray(data), np.uint8))
        joined = (
            hvd.allgather(mine, name="hvdtrain.data").numpy().tobytes() if sum(lengths) else b""
        )
        ends = np.cumsum(lengths)
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def broadcast(self, data: Bytes) -> Bytes:
        """See ``Communicator``."""
        result: Bytes = hvd.broadcast(torch.from_numpy(data), root_rank=0).numpy()
        return result

    def sum(self, values: Vector) -> Vector:
        """See ``Communicator``."""
        result: Vector = hvd.allreduce(torch.from_numpy(values), op=hvd.Sum).numpy()
        return result


class HorovodAdapter(PyTorchAdapter):
    """Each rank holds the whole model; Horovod sums the gradients."""

    name = "horovod"
    runtime = "Horovod"
    _buckets: Buckets | None = None

    def connect(self) -> Communicator:
        """See ``CommonAdapter``."""
        hvd.init()
        ending.disconnect.append(hvd.shutdown)
        return HorovodCollectives()

    def distribute_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """See ``Adapter``."""
        if self.world.size == 1:
            return optimizer
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self._buckets = Buckets(parameters, _start_sum, hvd.synchronize, self.gradient_factor)
        self._buckets.stop_wanted = lambda: self.stop_wanted
        optimizer.register_step_pre_hook(self._buckets.before_step)
        return optimizer

    def sum_tensor(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """See ``PyTorchAdapter``."""
        total: torch.Tensor = hvd.allreduce(values.contiguous(), name=name, op=hvd.Sum)
        return total

    def reduce_gradients(self) -> None:
        """See ``PyTorchAdapter``."""
        if self._buckets:
            self._buckets.finish()

    @property
    def blocked_seconds(self) -> float | None:
        """See ``CommonAdapter``."""
        if self._buckets is None:
            return super().blocked_seconds
        # With a GPU the wait for the sums is also one for what it still computes.
        return None if self.has_gpu else self._buckets.blocked_seconds

    @property
    def gradient_messages(self) -> dict[str, int] | None:
        """See ``CommonAdapter``."""
        return self._buckets.messages if self._buckets else None

    def start_timeline(self, file: str) -> None:
        """See ``CommonAdapter``."""
        hvd.start_timeline(file, mark_cycles=True)

    def stop_timeline(self) -> None:
        """See ``CommonAdapter``."""
        hvd.stop_timeline()

    @property
    def stop_agreed(self) -> bool:
        """See ``CommonAdapter``."""
        return self._buckets.stop_agreed if self._buckets else self.stop_wanted


def _start_sum(bucket: torch.Tensor, name: str) -> int:
    handle: int = hvd.allreduce_async_(bucket, name=name, op=hvd.Sum)
    return handle
