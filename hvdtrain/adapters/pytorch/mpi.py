"""The strategy of MPI only for PyTorch, for sites on which Horovod cannot be built."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from hvdtrain.adapters.pytorch.buckets import BucketStrategy, Sums
from hvdtrain.adapters.pytorch.sums import TYPES

if TYPE_CHECKING:  # importing it starts MPI, for which the variables of step 1 come first
    from hvdtrain.collectives.mpi4py import Halves, Mpi4py


class Mpi(BucketStrategy):
    """MPI sums the buckets by non-blocking allreduces, in host memory."""

    name = "mpi"
    runtime = "MPI"
    unsummed = (torch.float16, torch.complex64)

    @override
    def connect(self) -> Mpi4py:
        from hvdtrain.collectives.mpi4py import Mpi4py

        self._mpi = Mpi4py()
        return self._mpi

    @override
    def open_sums(self) -> Sums:
        return MpiSums(self._mpi, TYPES.get(self.adapter.comm_options.compression))

    @override
    def sum_tensor(self, values: torch.Tensor, name: str) -> torch.Tensor:
        total = self._mpi.sum_tensor(values.detach().cpu().numpy(), name)
        return torch.from_numpy(total).to(values.device)


class MpiSums(Sums):
    """Sums by MPI, which matches those of different ranks by order, on a separate communicator.

    ``half`` is the 16-bit type of the buckets; None: fp32 or fp64.
    """

    in_order = True

    def __init__(self, communicator: Mpi4py, half: torch.dtype | None) -> None:
        self._sums = communicator.open_sums()
        self._halves = _halves(half) if half else None

    @override
    def start(self, bucket: torch.Tensor, name: str) -> Any:
        host = bucket.cpu()  # the bucket itself if it is in host memory
        message = host.view(torch.int16) if self._halves else host  # NumPy has no bfloat16
        return self._sums.start(message.numpy(), self._halves), host, bucket

    @override
    def wait(self, handle: Any) -> None:
        request, host, bucket = handle
        request.Wait()
        if host is not bucket:
            bucket.copy_(host)

    @override
    def progress(self) -> None:
        self._sums.progress()


@functools.cache
def _halves(kind: torch.dtype) -> Halves:
    """Return an MPI operation that sums numbers of ``kind`` by PyTorch."""
    from hvdtrain.collectives.mpi4py import Halves

    def add(mine: Any, total: Any) -> None:
        torch.frombuffer(total, dtype=kind).add_(torch.frombuffer(mine, dtype=kind))

    return Halves(add)
