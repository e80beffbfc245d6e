"""Step 5 for TensorFlow: an optimizer that sums the gradients of all ranks before it updates.

Two methods of the object are replaced, not its class: so it is saved as the original one.

``Buckets`` sums them in a few large buckets. A bucket is one flat tensor, so Horovod starts few
collectives, and the order of summation is fixed: results are bit-equal from run to run. The buckets
run from the last layer to the first, in the order of the backward pass, so the sum of one overlaps
the computation of the next.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters import partition
from hvdtrain.adapters.framework import UNKNOWN, Flags, Rank
from hvdtrain.adapters.strategy import BaseStrategy
from hvdtrain.adapters.tensorflow.weights import NONE, Accumulation, LossWeights, times
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.system.runtime.waits import SUM, TracedCalls

TYPES = {"fp16": tf.float16, "bf16": tf.bfloat16}

Reduce = Callable[[Any, str], Any]
"""(flat tensor, name) -> its sum over all ranks."""


class GradientReduction(ABC):
    """Reduction of the gradients of one optimizer, inside a traced function or outside."""

    @abstractmethod
    def sum(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """Return the gradients to apply, one per variable; those passed may be None."""

    def scale_loss(self, loss: Any) -> Any:
        """Return ``loss`` scaled for the gradients; called by ``optimizer.scale_loss``."""
        return loss


class Alone(GradientReduction):
    """The gradients of one process, which has nothing to sum: those over no items are zeros.

    Args:
        optimizer: the optimizer.
        loss_weights: count of the next update.
    """

    def __init__(self, optimizer: Any, loss_weights: LossWeights) -> None:
        self.loss_weights, self._accumulation = loss_weights, Accumulation(optimizer)

    @override
    def sum(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        if not self.loss_weights.used:
            return list(gradients)
        count = self.loss_weights.get()
        self.loss_weights.clear(count)
        known = [index for index, gradient in enumerate(gradients) if gradient is not None]
        dense = [_dense(gradients[index], variables[index]) for index in known]
        weighed = tf.cond(
            (count > 0) | (count == NONE),
            lambda: dense,
            lambda: [times(gradient, count) for gradient in dense],  # 0 or nan
        )
        result = list(gradients)
        for index, gradient in zip(known, weighed, strict=True):
            result[index] = gradient
        return self._accumulation.weighted(result, variables, count)


class Buckets(GradientReduction):
    """Sums the gradients of an optimizer over the ranks, inside a traced function or outside.

    Every rank must call ``sum`` for the same variables.

    Args:
        name: name of the optimizer, the same on all ranks.
        reduce: function that sums a tensor over all ranks, under the same name on all of them.
        adapter: function that returns the adapter of this rank.
        loss_weights: count of the next update; None: all are weighted by samples.
    """

    def __init__(
        self,
        name: str,
        reduce: Reduce,
        adapter: Callable[[], Rank],
        loss_weights: LossWeights | None = None,
    ) -> None:
        self.name, self.reduce, self.adapter = name, reduce, adapter
        self.loss_weights = loss_weights or LossWeights()
        self.weight = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="part_weight")
        self.sums = tf.Variable(0, dtype=tf.int64, trainable=False, name="sums")  # made so far
        # In traced functions, which Python does not see.
        begun = tf.Variable(0, dtype=tf.int64, trainable=False, name="sums_begun")
        done = tf.Variable(0, dtype=tf.int64, trainable=False, name="sums_done")
        self.begun, self.done = begun, done
        # Whoever calls it keeps only the counters alive, not the optimizer.
        self.traced_calls = lambda: TracedCalls(int(begun), int(done))
        # Sent with the buckets: this rank's flags; and their sums over all ranks. A loop without
        # `shard_data` may never set them: then a save is not over before it is waited for.
        unknown = [float(flag) for flag in UNKNOWN]
        self._mine = tf.Variable(unknown, trainable=False, name="flags")
        self.agreed = tf.Variable(unknown, trainable=False, name="flags_agreed")
        self._reset()

    def another(self, name: str, kind: Any, optimizer: Any) -> Buckets:
        """Return the sums of another ``optimizer``, with the same variables of this rank.

        Its gradients are sent and summed in the 16-bit type ``kind``; None: in their own. See
        ``adapters/pytorch/sums.py`` for overflows.
        """
        copied = copy.copy(self)
        copied._reset(kind)
        copied.name = name
        copied._accumulation = Accumulation(optimizer)
        return copied

    def _reset(self, kind: Any = None) -> None:
        self.kind = kind
        self._accumulation: Accumulation | None = None
        self.messages: dict[str, int] | None = None  # of a step: count and bytes
        self._blocked = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="blocked")
        self._watched = False
        self._weighted = False  # the loss, in the current trace or update

    @override
    def scale_loss(self, loss: Any) -> Any:
        # If it is called, as by model.fit, it saves a pass over all gradients.
        self._weighted = True
        return loss * tf.cast(self.weight, loss.dtype)

    @override
    def sum(
        self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any = None
    ) -> list[Any]:
        """Sum the gradients, times ``weight``, over all ranks.

        Args:
            gradients: one per variable; None: zeros.
            variables: the variables, in the same order on all ranks.
            weight: weight of this rank, a number or a tensor; None: the variable of that name,
                unless ``scale_loss`` has already multiplied the loss by it. A weight of 0 replaces
                any gradient by zeros: the mean over no samples is not a number.
        """
        total = None
        if weight is None:
            _ = self.adapter().loss_weight  # raises if it is unknown
            weight = None if self._weighted else self.weight
            self._weighted = False
            if self.loss_weights.used:
                weight, total = self._share(weight)
        # A traced function, which runs this code only once, counts its sums itself.
        with self.adapter().waits.during(SUM) if tf.executing_eagerly() else nullcontext():
            result = self._sum(gradients, variables, weight)
        if total is None or self._accumulation is None:
            return result
        return self._accumulation.weighted(result, variables, total)

    def _share(self, weight: Any) -> tuple[Any, Any]:
        """Return the weight of this rank by the count of ``weight_loss``, and that of all ranks.

        Without one, they are ``weight`` and ``NONE``; None: the loss was weighted by samples.
        """
        count = self.loss_weights.get()
        mine = tf.where(self.weight > 0, count, np.float64(0))  # any count of a stand-in is 0
        counted = count != NONE
        total = tf.cond(counted, lambda: self.exchange(mine[None], "loss_count")[0], lambda: count)
        self.loss_weights.clear(total)
        share = tf.math.divide_no_nan(mine, total)
        if weight is None:
            share, weight = tf.math.divide_no_nan(share, self.weight), np.float64(1)
        return tf.where(counted, share, weight), total

    def exchange(self, numbers: Any, name: str, reduce: Reduce | None = None) -> Any:
        """Return the sums of a vector of ``numbers`` over the ranks, in a message of its own."""
        with tf.control_dependencies([numbers]):
            self.begun.assign_add(1)
        total = (reduce or self.reduce)(numbers, f"{self.name}.{name}")
        with tf.control_dependencies([total]):
            self.done.assign_add(1)
        return total

    def _sum(self, gradients: Sequence[Any], variables: Sequence[Any], weight: Any) -> list[Any]:
        dense = [_dense(g, v) for g, v in zip(gradients, variables, strict=True)]
        result: list[Any] = [None] * len(dense)
        ready, done = [], []
        for number, group in enumerate(groups := self._groups(dense)):
            flat = self._flat([tf.reshape(dense[index], [-1]) for index in group], weight)
            sent = tf.cast(flat, self.kind or flat.dtype)
            ready.append(flat)
            done.append(tf.cast(self.reduce(sent, f"{self.name}.{number}"), flat.dtype))
            lengths = [dense[index].shape.num_elements() for index in group]
            *pieces, flags = tf.split(done[-1], [*lengths, len(Flags._fields)])
            for index, piece in zip(group, pieces, strict=True):
                result[index] = tf.reshape(piece, dense[index].shape)
            if number == len(groups) - 1:
                self.sums.assign_add(1)
                self.agreed.assign(tf.cast(flags, tf.float32))
        # Outside of a traced function, each sum completes before the next one begins.
        if tf.inside_function():
            self._observe(ready, done)
        return result

    def _flat(self, parts: list[Any], weight: Any) -> Any:
        """Return a bucket: the flat gradients times ``weight``, and the flags."""
        # The flags in every bucket are of a variable: a bucket of only constants would be summed
        # once, when TensorFlow folds constants, and never again.
        flags = tf.cast(self._mine, parts[0].dtype)
        if weight is not None:
            return tf.concat([*(times(part, weight) for part in parts), flags], 0)
        # The loss was weighted, without a pass over the gradients; but 0 times nan is nan.
        zeros = [tf.zeros_like(part) for part in parts]
        return tf.concat([*tf.cond(self.weight > 0, lambda: parts, lambda: zeros), flags], 0)

    def _groups(self, dense: Sequence[Any]) -> list[list[int]]:
        """Return the indices of the gradients of each bucket; update ``messages``."""
        lengths = [gradient.shape.num_elements() for gradient in dense]
        sizes = [length * g.dtype.size for length, g in zip(lengths, dense, strict=True)]
        kinds = [(gradient.dtype, size) for gradient, size in zip(dense, sizes, strict=True)]
        groups = partition.buckets(kinds)
        sent = self.kind.size * sum(lengths) if self.kind else sum(sizes)
        self.messages = {"count": len(groups), "bytes": sent}
        return groups

    def _observe(self, ready: list[Any], done: list[Any]) -> None:
        """Count the sums, and add the time from last gradient to last sum, in each traced run."""
        clock = _has_clock()
        with tf.control_dependencies(ready):
            self.begun.assign_add(1)
            start = tf.timestamp() if clock else 0.0
        with tf.control_dependencies(done):
            self.done.assign_add(1)
            end = tf.timestamp() if clock else 0.0
        if clock:
            self._blocked.assign_add(end - start)
            self._watched = True

    @property
    def blocked_seconds(self) -> float | None:
        """Total seconds that this rank has waited for sums; None: not measured."""
        return float(self._blocked.numpy()) if self._watched else None

    def send(self, flags: Flags) -> None:
        """Send the ``flags`` of this rank with the next sums."""
        self._mine.assign([float(flag) for flag in flags])

    @property
    def flags(self) -> Flags:
        """The flags of all ranks at the last step: whether any rank had set it."""
        return Flags(*(bool(value > 0) for value in self.agreed.numpy()))


def _has_clock() -> bool:
    """Return whether a traced function can read the clock: not if it must be deterministic."""
    try:
        with tf.init_scope():
            tf.timestamp()
    except tf.errors.FailedPreconditionError:
        return False
    return True


def _dense(gradient: Any, variable: Any) -> Any:
    if gradient is None:
        return tf.zeros(variable.shape, variable.dtype)
    gradient = tf.convert_to_tensor(gradient)  # the sparse gradient of an embedding too
    return tf.ensure_shape(gradient, variable.shape)


def distribute(optimizer: Any, reduction: GradientReduction) -> None:
    """Make ``optimizer`` apply the gradients that ``reduction`` returns, from now on."""
    optimizer._hvdtrain = reduction
    for method in _METHODS:
        setattr(optimizer, method.__name__, MethodType(method, optimizer))


def reduction_of(optimizer: Any) -> GradientReduction | None:
    """Return the reduction of a distributed optimizer; None for an original one."""
    return getattr(optimizer, "_hvdtrain", None)


def undistribute(optimizer: Any) -> None:
    """Restore the original methods of a distributed optimizer."""
    del optimizer._hvdtrain
    for method in _METHODS:
        delattr(optimizer, method.__name__)


def scale_loss(self: Any, loss: Any) -> Any:
    """Return the loss scaled by the optimizer, then by its reduction."""
    return self._hvdtrain.scale_loss(type(self).scale_loss(self, loss))


def apply(self: Any, grads: Any, trainable_variables: Any = None) -> None:
    """Apply the gradients that the reduction returns."""
    if trainable_variables is None:
        trainable_variables = self._trainable_variables
    variables = list(trainable_variables)
    type(self).apply(self, self._hvdtrain.sum(list(grads), variables), variables)


_METHODS = (scale_loss, apply)  # of a distributed optimizer


class BucketStrategy(BaseStrategy):
    """Each rank holds the whole model; ``sum_tensor`` sums the gradients, bucket by bucket."""

    def __init__(self, adapter: Rank) -> None:
        super().__init__(adapter)
        # Of each optimizer, in order.
        self._buckets: weakref.WeakValueDictionary[int, Buckets] = weakref.WeakValueDictionary()
        self._first: Buckets | None = None  # whose variables all have
        self._numbers = itertools.count()
        self._assigned: tuple[float, Flags] | None = None  # weight and flags in the variables
        self._sums = 0  # number of sums before the current part

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        adapter = self.adapter
        with tf.device("/CPU:0"):
            if self._first is None:
                framework: Any = adapter.framework
                first = self._first = Buckets(
                    "gradients", self.sum_tensor, lambda: adapter, framework.loss_weights
                )
                adapter.waits.traced.append(first.traced_calls)
                adapter.read_flags = lambda: first.flags
            number, kind = next(self._numbers), TYPES.get(adapter.comm_options.compression)
            buckets = self._first.another(
                f"gradients.{number}" if number else "gradients", kind, optimizer
            )
        self._buckets[number] = buckets
        if adapter.shards is None:  # without shards all ranks weigh the same
            buckets.weight.assign(adapter.loss_weight)
        distribute(optimizer, buckets)
        return model, optimizer

    @override
    def begin_part(self, shards: Shards, part: Part) -> None:
        if self._first is None:
            return
        sums = int(self._first.sums)
        if sums > self._sums and shards.current:
            shards.use()  # a traced function has used it
        self._sums = sums
        values = (part.weight, self.adapter.flags)
        if values != self._assigned:  # most parts of an epoch have the same weight
            self._assigned = values
            self._first.weight.assign(np.asarray(values[0]))  # see TFTask.update
            self._first.send(values[1])

    @property
    @override
    def gradient_sums(self) -> Sequence[Any]:
        return list(self._buckets.values())
