"""The eight steps for TensorFlow over Horovod."""

from __future__ import annotations

from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.adapters.communicator import Bytes, Communicator, Vector
from hvdtrain.adapters.tensorflow.buckets import Buckets
from hvdtrain.adapters.tensorflow.common import TensorFlowAdapter
from hvdtrain.launch import ending


def _named_gather(name: str, dtype: Any) -> Any:
    """Horovod's allgather of a vector under the name that the PyTorch adapter's gather has.

    A rank that trains with the other framework is then told so in step 1, instead of waiting for
    ever. Only a traced operation keeps its name.
    """

    def gather(values: Any) -> Any:
        return hvd.allgather(values, name=name, ignore_name_scope=True)

    return tf.function(gather, input_signature=[tf.TensorSpec([None], dtype)])


_gather_lengths = _named_gather("allgather.hvdtrain.lengths", tf.int64)
_gather_data = _named_gather("allgather.hvdtrain.data", tf.uint8)


class HorovodCollectives(Communicator):
    """Horovod's collectives on CPU tensors."""

    def __init__(self) -> None:
        self.rank: int = hvd.rank()
        self.size: int = hvd.size()

    def gather(self, data: bytes) -> list[bytes]:
        """See ``Communicator``."""
        with tf.device("/CPU:0"):
            lengths = _gather_lengths(tf.constant([len(data)], tf.int64)).numpy()
            mine = tf.constant(np.frombuffer(data, np.uint8))
            joined = _gather_data(mine).numpy().tobytes() if lengths.sum() else b""
        ends = np.cumsum(lengths)
        return [joined[end - length : end] for end, length in zip(ends, lengths, strict=True)]

    def broadcast(self, data: Bytes) -> Bytes:
        """See ``Communicator``."""
        with tf.device("/CPU:0"):
            result: Bytes = hvd.broadcast(tf.constant(data), root_rank=0).numpy()
        return result

    def sum(self, values: Vector) -> Vector:
        """See ``Communicator``."""
        with tf.device("/CPU:0"):
            result: Vector = hvd.allreduce(tf.constant(values), op=hvd.Sum).numpy()
        return result


class HorovodAdapter(TensorFlowAdapter):
    """Each rank holds the whole model; Horovod sums the gradients."""

    name = "horovod"
    runtime = "Horovod"
    _buckets: Buckets | None = None

    def connect(self) -> Communicator:
        """See ``CommonAdapter``."""
        hvd.init()
        ending.disconnect.append(hvd.shutdown)
        self.claim_device(hvd.local_rank(), hvd.local_size())
        return HorovodCollectives()

    def distribute_optimizer(self, optimizer: Any) -> Any:
        """See ``Adapter``."""
        if self.world.size == 1:
            return optimizer
        with tf.device("/CPU:0"):
            self._buckets = Buckets(self.sum_tensor)
            self._weight = tf.Variable(self.part_weight, dtype=tf.float64, trainable=False)
        adapter, own = self, type(optimizer)

        class Distributed(own):  # type: ignore[misc,valid-type]
            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                if trainable_variables is None:
                    trainable_variables = self._trainable_variables
                variables = list(trainable_variables)
                super().apply(adapter.sum_gradients(list(grads), variables), variables)

        Distributed.__name__ = Distributed.__qualname__ = own.__name__
        optimizer.__class__ = Distributed
        return optimizer

    def sum_gradients(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        """The gradients of the global batch, from those of this rank's part; all ranks together."""
        if self._buckets is None:
            return gradients
        return self._buckets.sum(gradients, variables, self.gradient_factor())

    def sum_tensor(self, values: Any, name: str) -> Any:
        """See ``TensorFlowAdapter``."""
        # A bare name is the same whatever function the operation was traced into.
        return hvd.mpi_ops._allreduce(values, name=name, op=hvd.Sum, ignore_name_scope=True)

    def note_stop(self) -> None:
        """See ``TensorFlowAdapter``."""
        if self._buckets is not None and self.stop_wanted != self._stop_noted:
            self._stop_noted = self.stop_wanted
            self._buckets.stop.assign(float(self.stop_wanted))

    @property
    def blocked_seconds(self) -> float | None:
        """See ``CommonAdapter``."""
        if self._buckets is None:
            return super().blocked_seconds
        # A GPU's operations count as done when they are begun.
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
        return bool(self._buckets.agreed.numpy() > 0) if self._buckets else self.stop_wanted
