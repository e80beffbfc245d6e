"""Adapters that sum the gradients over the ranks in buckets: Horovod's and mpi4py's."""

from __future__ import annotations

import itertools
import weakref
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
        # Of each optimizer, in order.
        self._buckets: weakref.WeakValueDictionary[int, Buckets] = weakref.WeakValueDictionary()
        self._first: Buckets | None = None  # whose variables all have
        self._numbers = itertools.count()
        self._assigned: tuple[float, Flags] | None = None  # weight and flags in the variables
        self._sums = 0  # number of sums before the current part

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        with tf.device("/CPU:0"):
            if self._first is None:
                hooks = RankHooks(weight=lambda: self.part_weight, waits=self.waits.during)
                self._first = Buckets("gradients", self.sum_tensor, hooks)
                self.waits.traced.append(self._first.traced_calls)
            number, kind = next(self._numbers), TYPES.get(self.comm_options.compression)
            buckets = self._first.another(f"gradients.{number}" if number else "gradients", kind)
        self._buckets[number] = buckets
        if self._shards is None:  # without shards all ranks weigh the same
            buckets.weight.assign(self.part_weight)
        distribute(optimizer, buckets)
        return model, optimizer

    @override
    def begin_part(self, shards: Shards, part: Part) -> None:
        super().begin_part(shards, part)
        if self._first is None:
            return
        sums = int(self._first.sums)
        if sums > self._sums and shards.current:
            shards.use()  # a traced function has used it
        self._sums = sums
        values = (part.weight, self.flags)
        if values != self._assigned:  # most parts of an epoch have the same weight
            self._assigned = values
            self._first.weight.assign(np.asarray(values[0]))  # see TFTask.update
            self._first.send(values[1])

    @property
    @override
    def gradient_sums(self) -> Sequence[GradientSums]:
        return list(self._buckets.values())
