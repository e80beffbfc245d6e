"""Collectives of Horovod on TensorFlow tensors."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.collectives.base import Bytes, Communicator, Tensor, Vector, split


def _named_gather(name: str, dtype: Any) -> Any:
    """Return Horovod's allgather of a vector with the same name as in ``horovod_torch``.

    So ranks with different frameworks are detected in step 1 instead of hanging. Only a traced
    operation keeps its name.
    """

    def gather(values: Any) -> Any:
        return hvd.allgather(values, name=name, ignore_name_scope=True)

    # AutoGraph is not needed, and would take half a second.
    return tf.function(gather, [tf.TensorSpec([None], dtype)], autograph=False)


class HorovodTensorFlow(Communicator):
    """Ranks of Horovod, which is initialized here; bytes and vectors stay on the CPU."""

    def __init__(self) -> None:
        hvd.init()
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()
        self._gather_lengths = _named_gather("allgather.hvdtrain.lengths", tf.int64)
        self._gather_data = _named_gather("allgather.hvdtrain.data", tf.uint8)

    @override
    def gather(self, data: bytes) -> list[bytes]:
        with tf.device("/CPU:0"):
            lengths = self._gather_lengths(tf.constant([len(data)], tf.int64)).numpy()
            mine = tf.constant(np.frombuffer(data, np.uint8))
            joined = self._gather_data(mine).numpy().tobytes() if lengths.sum() else b""
        return split(joined, lengths)

    @override
    def broadcast(self, data: Bytes) -> Bytes:
        with tf.device("/CPU:0"):
            sent = hvd.broadcast(tf.constant(data), 0)
        return sent.numpy()

    @override
    def sum(self, values: Vector) -> Vector:
        with tf.device("/CPU:0"):
            total = hvd.allreduce(tf.constant(values), op=hvd.Sum)
        return total.numpy()

    @override
    def tensor(self, length: int, value: float) -> Tensor:
        return tf.fill([length], tf.constant(value, tf.float32))

    @override
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        # Without scope the name does not depend on the function in which it is traced.
        return hvd.mpi_ops._allreduce(tensor, name=name, op=hvd.Sum, ignore_name_scope=True)

    @override
    def close(self) -> None:
        hvd.shutdown()
