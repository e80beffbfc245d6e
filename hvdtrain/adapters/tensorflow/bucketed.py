"""Adapters that sum the gradients over the ranks in buckets: Horovod's and mpi4py's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.common_adapter import Flags, GradientSums, RankHooks
from hvdtrain.adapters.tensorflow.adapter import TensorFlowAdapter
from hvdtrain.adapters.tensorflow.buckets import TYPES, Buckets, distribute
from hvdtrain.steps.sharding import Part, Shards


class BucketedAdapter(TensorFlowAdapter):
    """Each rank holds the whole model; ``sum_tensor`` sums the gradients, bucket by bucket."""

    def __init__(self) -> None:
        super().__init__()
        self._buckets: list[Buckets] = []  # of each optimizer
        self._assigned: tuple[float, Flags] | None = None  # weight and flags in the variables
        self._sums = 0  # number of sums before the current part

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        number = len(self._buckets)
        name = f"gradients.{number}" if number else "gradients"
        hooks = RankHooks(weight=lambda: self.part_weight, waits=self.waits.during)
        with tf.device("/CPU:0"):
            buckets = Buckets(
                name,
                self.sum_tensor,
                hooks,
                kind=TYPES.get(self.comm_options.compression),
                agreed=self._buckets[0].agreed if self._buckets else None,
            )
        self._buckets.append(buckets)
        self.waits.traced.append(buckets.traced_calls)
        self._assigned = None
        if self._shards is None:  # without shards all ranks weigh the same
            buckets.weight.assign(self.part_weight)
        distribute(optimizer, buckets)
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
        values = (part.weight, self.flags)
        if values != self._assigned:  # most parts of an epoch have the same weight
            self._assigned = values
            for buckets in self._buckets:
                buckets.weight.assign(np.asarray(values[0]))  # see TFTask.update
                buckets.send(values[1])

    @property
    @override
    def gradient_sums(self) -> Sequence[GradientSums]:
        return self._buckets
