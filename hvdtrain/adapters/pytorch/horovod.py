"""The eight steps for PyTorch over Horovod."""

from __future__ import annotations

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.adapters.common import total_messages
from hvdtrain.adapters.communicator import Bytes, Communicator, Vector
from hvdtrain.adapters.pytorch.buckets import Buckets
from hvdtrain.adapters.pytorch.common import PyTorchAdapter
from hvdtrain.launch import ending
from hvdtrain.steps.sharding import Part, Shards


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

    def __init__(self) -> None:
        super().__init__()
        self._distributions = 0
        self._all_buckets: list[Buckets] = []  # of each optimizer

    def connect(self) -> Communicator:
        """See ``CommonAdapter``."""
        hvd.init()
        ending.disconnect.append(hvd.shutdown)
        return HorovodCollectives()

    def distribute(self, optimizer: torch.optim.Optimizer) -> None:
        """See ``CommonAdapter``."""
        name = f"gradients.{self._distributions}" if self._distributions else "gradients"
        self._distributions += 1
        buckets = Buckets(name, optimizer, _start_sum, hvd.synchronize, lambda: self.part_weight)
        buckets.stop_wanted = lambda: self.stop_wanted
        buckets.waiting = self.waits.during
        buckets.may_skip = lambda: len(self._buckets) == 1
        self._all_buckets = [*self._buckets, buckets]

    @property
    def _buckets(self) -> list[Buckets]:
        """Those of the optimizers that still exist."""
        return [one for one in self._all_buckets if one.optimizer() is not None]

    def begin_part(self, shards: Shards, part: Part) -> None:
        """See ``CommonAdapter``."""
        super().begin_part(shards, part)
        for buckets in self._buckets:
            buckets.begin(empty=not part.count)

    def sum_tensor(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """See ``PyTorchAdapter``."""
        total: torch.Tensor = hvd.allreduce(values.contiguous(), name=name, op=hvd.Sum)
        return total

    @property
    def blocked_seconds(self) -> float | None:
        """See ``CommonAdapter``."""
        if not self._buckets:
            return super().blocked_seconds
        # With a GPU the wait for the sums is also one for what it still computes.
        return None if self.has_gpu else sum(one.blocked_seconds for one in self._buckets)

    @property
    def gradient_messages(self) -> dict[str, int] | None:
        """See ``CommonAdapter``."""
        return total_messages([one.messages for one in self._buckets])

    def start_timeline(self, file: str) -> None:
        """See ``CommonAdapter``."""
        hvd.start_timeline(file, mark_cycles=True)

    def stop_timeline(self) -> None:
        """See ``CommonAdapter``."""
        hvd.stop_timeline()

    @property
    def stop_agreed(self) -> bool:
        """See ``CommonAdapter``."""
        return any(one.stop_agreed for one in self._buckets) if self._buckets else self.stop_wanted


def _start_sum(bucket: torch.Tensor, name: str) -> int:
    handle: int = hvd.allreduce_async_(bucket, name=name, op=hvd.Sum)
    return handle
