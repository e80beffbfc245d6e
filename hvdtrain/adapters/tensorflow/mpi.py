"""The eight steps for TensorFlow over MPI alone, for sites where Horovod cannot be built."""

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
        # MPI pairs sums by their order. In a trace it is that of the program: TensorFlow runs what
        # has side effects, as a function of Python has to it, one after the other.
        total = tf.numpy_function(self._sum, [values], values.dtype, stateful=True, name="sum")
        total.set_shape(values.shape)
        return total

    def _sum(self, values: Any) -> Any:
        if values.itemsize == tf.float16.size:
            return self.communicator.sum_halves(values.copy(), _halves(values.dtype))
        return self.communicator.sum_tensor(values.copy(), "")


@functools.cache
def _halves(kind: np.dtype[Any]) -> Halves:
    """Return how MPI sums numbers of ``kind``, which NumPy adds."""
    from hvdtrain.collectives.mpi4py import Halves

    def add(mine: Any, total: Any) -> None:
        added = np.frombuffer(total, kind)
        np.add(added, np.frombuffer(mine, kind), out=added)

    return Halves(add)
