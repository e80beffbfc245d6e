"""The collectives of Horovod on TensorFlow tensors."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.collectives.base import Bytes, Communicator, Tensor, Vector, split


def _named_gather(name: str, dtype: Any) -> Any:
    """Return Horovod's allgather of a vector under the name that ``horovod_torch`` uses.

    A rank that trains with the other framework is then told so in step 1, instead of waiting for
    ever. Only a traced operation keeps its name.
    """

    def gather(values: Any) -> Any:
        return hvd.allgather(values, name=name, ignore_name_scope=True)

    # Nothing here depends on a value; AutoGraph would take half a second to find that out.
    return tf.function(gather, [tf.TensorSpec([None], dtype)], autograph=False)


_gather_lengths = _named_gather("allgather.hvdtrain.lengths", tf.int64)
_gather_data = _named_gather("allgather.hvdtrain.data", tf.uint8)


class HorovodTensorFlow(Communicator):
    """All ranks of Horovod, which starting this one starts; bytes and vectors stay on the CPU."""

    def __init__(self) -> None:
        hvd.init()
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()

    @override
    def gather(self, data: bytes) -> list[bytes]:
        with tf.device("/CPU:0"):
            lengths = _gather_lengths(tf.constant([len(data)], tf.int64)).numpy()
            mine = tf.constant(np.frombuffer(data, np.uint8))
            joined = _gather_data(mine).numpy().tobytes() if lengths.sum() else b""
        return split(joined, lengths)

    @override
    def broadcast(self, data: Bytes) -> Bytes:
        with tf.device("/CPU:0"):
            result: Bytes = hvd.broadcast(tf.constant(data), root_rank=0).numpy()
        return result

    @override
    def sum(self, values: Vector) -> Vector:
        with tf.device("/CPU:0"):
            result: Vector = hvd.allreduce(tf.constant(values), op=hvd.Sum).numpy()
        return result

    @override
    def tensor(self, length: int, value: float) -> Tensor:
        return tf.fill([length], tf.constant(value, tf.float32))

    @override
    def sum_tensor(self, tensor: Tensor, name: str) -> Tensor:
        # A bare name is the same whatever function the operation was traced into.
        return hvd.mpi_ops._allreduce(tensor, name=name, op=hvd.Sum, ignore_name_scope=True)

    @override
    def close(self) -> None:
        hvd.shutdown()
