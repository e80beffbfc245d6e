"""Losses of Keras as one process has them, whatever they are divided by.

A rank's losses and gradients are weighted by its samples. But a masked loss (``mask_zero``,
``ignore_class``) is a mean over unmasked items, and one with the reduction
``mean_with_sample_weight`` over the sum of weights. So Keras's reduction is corrected for the
divisors of all ranks, each loss by itself: the outputs of a model may have different ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tensorflow as tf
from keras.src.losses import loss as keras_loss  # the reduction is not public

from hvdtrain.keras.optimizer import StepSum

OF_WEIGHTS, SUM, NONE = "mean_with_sample_weight", "sum", (None, "none")  # reductions


@contextmanager
def corrected(step_sum: StepSum, count: Any, *, sums: bool, together: Any = None) -> Iterator[None]:
    """Correct losses that are reduced within the block, by numbers of all ranks.

    Their mean over the ranks, weighted by samples, is then the loss of one process.

    Args:
        step_sum: gradient sum of the model.
        count: number of samples of this rank's batch; 0: its losses are those of a stand-in.
        sums: whether a sum is one over all ranks; not if the block may divide it.
        together: tensor, whether all ranks make this step, the same on all; None: they do.
    """
    original, numbers = keras_loss.reduce_weighted_values, itertools.count()

    def sum_over_ranks(mine: Any) -> Any:
        name = f"loss.{next(numbers)}"
        if together is None:
            return step_sum.exchange(mine, name)
        return tf.cond(together, lambda: step_sum.exchange(mine, name), lambda: mine)

    def reduce(
        values: Any,
        sample_weight: Any = None,
        mask: Any = None,
        reduction: str | None = "sum_over_batch_size",
        **more: Any,
    ) -> Any:
        loss = original(values, sample_weight, mask, reduction, **more)
        divisor = _divisor(values, sample_weight, mask, reduction)
        if divisor is None or (reduction == SUM and not sums):
            return loss
        mine = tf.stack([tf.cast(divisor, tf.float64), tf.cast(count, tf.float64)])
        mine = tf.stop_gradient(tf.where(count > 0, mine, np.float64(0)))
        total = sum_over_ranks(mine)
        factor = tf.math.divide_no_nan(total[1], mine[1])
        if reduction != SUM:
            factor *= tf.math.divide_no_nan(mine[0], total[0])
        return loss * tf.cast(factor, loss.dtype)

    keras_loss.reduce_weighted_values = reduce
    try:
        yield
    finally:
        keras_loss.reduce_weighted_values = original


def _divisor(values: Any, sample_weight: Any, mask: Any, reduction: str | None) -> Any:
    """Return what Keras divides ``values`` by, or 0 if it sums them; None: by their number."""
    if reduction in NONE or not len(getattr(values, "shape", ())):  # which it leaves as they are
        return None
    if reduction == SUM:
        return 0.0
    weights = keras_loss.apply_mask(
        sample_weight if reduction == OF_WEIGHTS else None, mask, dtype="float64", reduction=SUM
    )
    return None if weights is None else tf.reduce_sum(tf.cast(weights, tf.float64))
