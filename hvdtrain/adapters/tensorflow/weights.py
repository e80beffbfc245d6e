"""``weight_loss`` in TensorFlow: updates by losses that are means over counted items.

A count is kept in a variable until the next update takes it: both calls may be made in a traced
function or outside. The update may be one pass of an accumulation by Keras.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError

NONE = -1.0  # no count: the update is weighted by samples
UNUSED = (
    "weight_loss: the count of the last call was not used: call it once before each `apply` of an "
    "optimizer of distribute_optimizer, and already before a function with `apply` is first called"
)
MIXED = (
    "weight_loss: some passes of an update are weighted and some are not "
    "(gradient_accumulation_steps): call it before each `apply`, or before none"
)
SCALED = (
    "weight_loss does not support gradient_accumulation_steps with a LossScaleOptimizer: "
    "accumulate the gradients in the loop, or use another precision"
)


class LossWeights:
    """The count of this rank's next update."""

    def __init__(self) -> None:
        self._count: Any = None  # a variable would start TensorFlow's runtime

    @property
    def used(self) -> bool:
        """Whether there was ever a count; an update that is traced before has no weights."""
        return self._count is not None

    def set(self, count: Any) -> None:
        """Set the ``count``, a number or a scalar tensor; one that is invalid becomes nan."""
        if self._count is None:
            self._count = _variable("loss_count")
        # TensorFlow would keep a tensor of each Python number.
        count = tf.cast(count if tf.is_tensor(count) else np.asarray(count), tf.float64)
        if count.shape != ():
            raise UsageError(
                f"weight_loss: the count has the shape {tuple(count.shape)}: it must be one number,"
                " e.g. tf.reduce_sum(mask)"
            )
        _refuse(self._count != NONE, UNUSED)
        self._count.assign(tf.where((count >= 0) & (count < np.inf), count, np.nan))

    def get(self) -> Any:
        """Return the count, ``NONE`` without one, a scalar in fp64."""
        return tf.identity(self._count)

    def drop(self) -> None:
        """Remove a count that no update has taken."""
        if self._count is not None:
            self._count.assign(np.float64(NONE))

    def clear(self, total: Any) -> None:
        """Remove the count, once ``total``, what became of it, is known."""
        with tf.control_dependencies([total]):
            self._count.assign(np.float64(NONE))


class Accumulation:
    """The passes of an ``optimizer`` with ``gradient_accumulation_steps``, weighted by counts.

    Keras updates with their sum, divided by their number.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._counts: Any = None  # their sum in the passes of the current update; NONE: unweighted

    def weighted(self, gradients: Sequence[Any], variables: Sequence[Any], total: Any) -> list[Any]:
        """Return the ``gradients`` of a pass, weighted by its share of the passes so far.

        Args:
            gradients: mean gradients over ``total`` items of all ranks, one per variable, or None.
            variables: the variables.
            total: number of items of this pass; ``NONE``: this pass is unweighted.
        """
        optimizer: Any = self._optimizer()
        inner = getattr(optimizer, "inner_optimizer", optimizer)
        steps = inner.gradient_accumulation_steps
        if not steps:
            return list(gradients)
        if inner is not optimizer:  # which may leave out a pass
            raise UsageError(SCALED)
        if self._counts is None:
            self._counts = _variable("loss_counts")
            with tf.init_scope():
                if not optimizer.built:
                    optimizer.build(list(variables))
        is_weighted = total != NONE
        is_first = optimizer._iterations.value % steps == 0
        unused = tf.where(is_weighted, np.float64(0), NONE)
        before = tf.where(is_first, unused, self._counts)
        _refuse((before != NONE) != is_weighted, MIXED)
        counts = tf.where(is_weighted, before + total, NONE)
        self._counts.assign(counts)
        # What Keras has added up counts with the share of the passes before this one.
        kept = tf.where(is_weighted, tf.math.divide_no_nan(before, counts), 1)
        for value in optimizer._accumulated_gradients:
            if value is not None:
                value.assign(value.value * tf.cast(kept, value.dtype))
        factor = tf.where(is_weighted, tf.math.divide_no_nan(steps * total, counts), 1)
        return [None if each is None else times(each, factor) for each in gradients]


def times(values: Any, weight: Any) -> Any:
    """Return ``values`` times ``weight``; a weight of 0 replaces any number by 0."""
    if tf.is_tensor(weight):  # tf.cast would round a number to float32
        weight = tf.cast(weight, values.dtype)
    return tf.math.multiply_no_nan(values, weight)


def _variable(name: str) -> Any:
    with tf.init_scope(), tf.device("/CPU:0"):
        return tf.Variable(NONE, dtype=tf.float64, trainable=False, name=name)


def _refuse(condition: Any, message: str) -> None:
    """Raise ``UsageError`` if ``condition`` is true; a traced function: when it is run."""
    if tf.executing_eagerly():
        if condition:
            raise UsageError(message)
    else:
        tf.debugging.Assert(tf.logical_not(condition), [message])
