"""The eight steps for TensorFlow over Horovod."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from hvdtrain.adapters.common import total_messages
from hvdtrain.adapters.communicator import Bytes, Communicator, Vector
from hvdtrain.adapters.tensorflow.buckets import Buckets
from hvdtrain.adapters.tensorflow.common import TensorFlowAdapter
from hvdtrain.launch import ending
from hvdtrain.launch.waits import SUM
from hvdtrain.steps.sharding import Part, Shards


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

    def __init__(self) -> None:
        super().__init__()
        self._buckets: list[Buckets] = []  # of each optimizer
        self._told: tuple[float, bool] | None = None  # weight and wish to stop in the variables
        self._sums = 0  # made when the current part began

    def connect(self) -> Communicator:
        """See ``CommonAdapter``."""
        hvd.init()
        ending.disconnect.append(hvd.shutdown)
        self.claim_device(hvd.local_rank(), hvd.local_size())
        return HorovodCollectives()

    def distribute(self, optimizer: Any) -> None:
        """See ``CommonAdapter``."""
        number = len(self._buckets)
        name = f"gradients.{number}" if number else "gradients"
        with tf.device("/CPU:0"):
            buckets = Buckets(name, self.sum_tensor)
        self._buckets.append(buckets)
        self._told = None
        if self._shards is None:  # without shards all ranks weigh the same
            buckets.weight.assign(self.part_weight)
        adapter, own = self, type(optimizer)

        class Distributed(own):  # type: ignore[misc,valid-type]
            weighted = False  # the loss, in the trace or the update at hand

            def scale_loss(self, loss: Any) -> Any:
                # Where it is called, as by model.fit, it saves a pass over all gradients.
                self.weighted = True
                return super().scale_loss(loss) * tf.cast(buckets.weight, loss.dtype)

            def apply(self, grads: Any, trainable_variables: Any = None) -> None:
                if trainable_variables is None:
                    trainable_variables = self._trainable_variables
                variables = list(trainable_variables)
                _ = adapter.part_weight  # raises where it is not known
                weighted, self.weighted = self.weighted, False
                # A trace, which is made once, tells nothing of the updates.
                counted = adapter.waits.during(SUM) if tf.executing_eagerly() else nullcontext()
                with counted:
                    sums = buckets.sum(list(grads), variables, weighted=weighted)
                super().apply(sums, variables)

        Distributed.__name__ = Distributed.__qualname__ = own.__name__
        optimizer.__class__ = Distributed

    def begin_part(self, shards: Shards, part: Part) -> None:
        """See ``CommonAdapter``."""
        super().begin_part(shards, part)
        if not self._buckets:
            return
        sums = sum(int(one.sums) for one in self._buckets)
        if sums > self._sums and shards.current:
            shards.use()  # a trace has used it
        self._sums = sums
        told = (part.weight, self.stop_wanted)
        if told != self._told:  # most parts of an epoch weigh the same
            self._told = told
            for buckets in self._buckets:
                buckets.weight.assign(part.weight)
                buckets.stop.assign(float(self.stop_wanted))

    def sum_tensor(self, values: Any, name: str) -> Any:
        """See ``TensorFlowAdapter``."""
        # A bare name is the same whatever function the operation was traced into.
        return hvd.mpi_ops._allreduce(values, name=name, op=hvd.Sum, ignore_name_scope=True)

    @property
    def blocked_seconds(self) -> float | None:
        """See ``CommonAdapter``."""
        if not self._buckets:
            return super().blocked_seconds
        waits = [one.blocked_seconds for one in self._buckets]
        # A GPU's operations count as done when they are begun.
        return None if self.has_gpu or None in waits else sum(wait or 0.0 for wait in waits)

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
        if not self._buckets:
            return self.stop_wanted
        return any(one.agreed.numpy() > 0 for one in self._buckets)
