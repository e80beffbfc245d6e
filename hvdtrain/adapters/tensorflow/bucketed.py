"""Step 5 for TensorFlow over any library that sums a tensor: the optimizer sums the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.common import GradientSums
from hvdtrain.adapters.tensorflow.buckets import Buckets
from hvdtrain.adapters.tensorflow.common import TensorFlowAdapter
from hvdtrain.adapters.tensorflow.distributed import Reduction, distribute
from hvdtrain.config.comm_options import ADASUM
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.system.runtime.waits import SUM

TYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}


class BucketedAdapter(TensorFlowAdapter):
    """Each rank holds the whole model; ``sum_tensor`` sums the gradients, bucket by bucket."""

    def __init__(self) -> None:
        super().__init__()
        self._buckets: list[Buckets] = []  # of each optimizer
        self._assigned: tuple[float, bool] | None = None  # weight and stop request in the variables
        self._sums = 0  # number of sums before the current part

    def combine(self, values: Any, name: str) -> Any:
        """Return Adasum of the ranks' ``values``, a gradient (source: PyTorch's adapter)."""
        raise NotImplementedError(f"{self.name} has no Adasum")

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        number = len(self._buckets)
        name = f"gradients.{number}" if number else "gradients"
        with tf.device("/CPU:0"):
            kind = TYPES.get(self.comm_options.compression)
            buckets = Buckets(name, self.sum_tensor, kind, self.comm_options.bucket_bytes)
        if self.comm_options.reduction == ADASUM:
            buckets.combine = self.combine
        self._buckets.append(buckets)
        self.waits.traced.append(buckets.traced_calls)
        self._assigned = None
        if self._shards is None:  # without shards all ranks weigh the same
            buckets.weight.assign(self.comm_options.weight(self.part_weight))
        distribute(optimizer, PartSum(self, buckets))
        return model, optimizer

    @override
    def begin_part(self, shards: Shards, part: Part) -> None:
        super().begin_part(shards, part)
        if not self._buckets:
            return
        sums = sum(int(buckets.sums) for buckets in self._buckets)
        if sums > self._sums and shards.current:
            shards.use()  # a traced function has used it
        self._sums = sums
        values = (self.comm_options.weight(part.weight), self.stop_wanted)
        if values != self._assigned:  # most parts of an epoch have the same weight
            self._assigned = values
            for buckets in self._buckets:
                buckets.weight.assign(values[0])
                buckets.stop.assign(float(self.stop_wanted))

    @property
    @override
    def gradient_sums(self) -> Sequence[GradientSums]:
        return self._buckets


class PartSum(Reduction):
    """Sums the gradients of the ranks' current parts."""

    def __init__(self, adapter: BucketedAdapter, buckets: Buckets) -> None:
        self.adapter, self.buckets = adapter, buckets
        self._weighted = False  # the loss, in the current trace or update

    @override
    def scale_loss(self, loss: Any) -> Any:
        # If it is called, as by model.fit, it saves a pass over all gradients.
        self._weighted = True
        return loss * tf.cast(self.buckets.weight, loss.dtype)

    @override
    def sum(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        _ = self.adapter.part_weight  # raises if it is unknown
        weighted, self._weighted = self._weighted, False
        # A traced function, which runs this code only once, counts its sums itself.
        with self.adapter.waits.during(SUM) if tf.executing_eagerly() else nullcontext():
            return self.buckets.sum(gradients, variables, weighted=weighted)
