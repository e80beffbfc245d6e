"""The strategy of MPI only for TensorFlow, for sites on which Horovod cannot be built."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.tensorflow.buckets import BucketStrategy

if TYPE_CHECKING:  # importing it starts MPI, for which the variables of step 1 come first
    from hvdtrain.collectives.mpi4py import Halves, Mpi4py


class Mpi(BucketStrategy):
    """MPI sums the buckets in host memory."""

    name = "mpi"
    runtime = "MPI"

    @override
    def connect(self) -> Mpi4py:
        from hvdtrain.collectives.mpi4py import Mpi4py

        self._mpi = Mpi4py()
        self.adapter.framework.claim_device(self._mpi.local_rank, self._mpi.local_size)
        return self._mpi

    @override
    def sum_tensor(self, values: Any, name: str) -> Any:
        # MPI matches sums by order. In a traced function it is program order: TensorFlow runs
        # operations with side effects, such as Python functions, sequentially.
        total = tf.numpy_function(self._sum, [values], values.dtype, stateful=True, name="sum")
        total.set_shape(values.shape)
        return total

    def _sum(self, values: Any) -> Any:
        if values.itemsize == tf.float16.size:
            return self._mpi.sum_halves(values.copy(), _halves(values.dtype))
        return self._mpi.sum_tensor(values.copy(), "")


@functools.cache
def _halves(kind: np.dtype[Any]) -> Halves:
    """Return an MPI operation that sums numbers of ``kind`` by NumPy."""
    from hvdtrain.collectives.mpi4py import Halves

    def add(mine: Any, total: Any) -> None:
        added = np.frombuffer(total, kind)
        np.add(added, np.frombuffer(mine, kind), out=added)

    return Halves(add)
