"""The eight steps for TensorFlow over MPI only, for sites on which Horovod cannot be built."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.tensorflow.bucketed import BucketedAdapter

if TYPE_CHECKING:  # importing it starts MPI, for which the variables of step 1 come first
    from hvdtrain.collectives.mpi4py import Halves, Mpi4py


class MpiAdapter(BucketedAdapter):
    """MPI sums the buckets in host memory."""

    name = "mpi"
    runtime = "MPI"
    communicator: Mpi4py

    @override
    def connect(self) -> Mpi4py:
        from hvdtrain.collectives.mpi4py import Mpi4py

        communicator = Mpi4py()
        self.claim_device(communicator.local_rank, communicator.local_size)
        return communicator

    @override
    def sum_tensor(self, values: Any, name: str) -> Any:
        # MPI matches sums by order. In a traced function it is program order: TensorFlow runs
        # operations with side effects, such as Python functions, sequentially.
        total = tf.numpy_function(self._sum, [values], values.dtype, stateful=True, name="sum")
        total.set_shape(values.shape)
        return total

    def _sum(self, values: Any) -> Any:
        if values.itemsize == tf.float16.size:
            return self.communicator.sum_halves(values.copy(), _halves(values.dtype))
        return self.communicator.sum_tensor(values.copy(), "")


@functools.cache
def _halves(kind: np.dtype[Any]) -> Halves:
    """Return an MPI operation that sums numbers of ``kind`` by NumPy."""
    from hvdtrain.collectives.mpi4py import Halves

    def add(mine: Any, total: Any) -> None:
        added = np.frombuffer(total, kind)
        np.add(added, np.frombuffer(mine, kind), out=added)

    return Halves(add)
