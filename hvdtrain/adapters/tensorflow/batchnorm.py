"""BatchNorm over the global batch for TensorFlow.

Source: Ioffe and Szegedy, "Batch Normalization" (2015), with the mean and the variance taken over
the samples of all ranks. Horovod's own layer has no CPU version for Keras 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

Sum = Callable[[Any, str], Any]
"""(tensor, name) -> its sum over all ranks, not differentiable."""


def convert(model: Any, sum_over_ranks: Sum) -> int:
    """Make the BatchNorm layers of ``model`` use the statistics of the global batch.

    In training every rank must then run the model forward and backward in each step, even on an
    empty part, with the loss weighted by ``optimizer.scale_loss`` before the backward pass.
    """
    layers = [
        layer
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    for number, layer in enumerate(layers):
        layer.__class__ = _synchronized(type(layer), f"batchnorm.{number}", sum_over_ranks)
    return len(layers)


def _synchronized(base: type, name: str, sum_over_ranks: Sum) -> type:
    reduce = differentiable(name, sum_over_ranks)

    class Synchronized(base):
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            if not training or not self.trainable:
                return super().call(inputs, training=training)
            if mask is not None:
                raise NotImplementedError("--sync-batchnorm does not support masks")
            return normalize(self, inputs, reduce)

    Synchronized.__name__ = Synchronized.__qualname__ = base.__name__
    return Synchronized


def differentiable(name: str, sum_over_ranks: Sum) -> Callable[[Any], Any]:
    """Return a function: the sum over ranks, whose gradient is the sum of the ranks' gradients."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(values: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return sum_over_ranks(upstream, f"{name}.backward")

        return sum_over_ranks(values, f"{name}.forward"), gradient

    return reduce


def normalize(layer: Any, inputs: Any, reduce: Callable[[Any], Any]) -> Any:
    """Return the output of a BatchNorm layer in training, and update its running statistics.

    The ``inputs`` are of shape (n, ..., channels) with the channels at ``layer.axis``; n may be 0.
    Each rank computes the mean and squared deviations of its local part; count, sum and sum of
    squares are merged in float64, in which the cancellation does not matter.
    """
    rank = inputs.shape.rank
    axes = [axis for axis in range(rank) if axis != layer.axis % rank]
    x = tf.cast(inputs, layer.variable_dtype)
    count = tf.cast(tf.size(x), tf.float64) / x.shape[layer.axis]
    local = tf.math.divide_no_nan(tf.reduce_sum(x, axes), tf.cast(count, x.dtype))
    shape = [-1 if axis == layer.axis % rank else 1 for axis in range(rank)]
    spread = tf.cast(
        tf.reduce_sum(tf.math.squared_difference(x, tf.reshape(local, shape)), axes), tf.float64
    )
    local = tf.cast(local, tf.float64)
    total = reduce(tf.concat([local * count, spread + local * local * count, count[None]], 0))
    sums, squares, samples = tf.split(total, [local.shape[0], local.shape[0], 1])
    mean = sums / samples
    variance = tf.maximum(squares / samples - mean * mean, 0.0)
    _update(layer, mean, variance, samples)
    scale = tf.math.rsqrt(variance + layer.epsilon)  # tf.cast would round it to float32
    if layer.scale:
        scale *= tf.cast(layer.gamma, tf.float64)
    offset = -mean * scale
    if layer.center:
        offset += tf.cast(layer.beta, tf.float64)
    scale, offset = tf.cast(scale, x.dtype), tf.cast(offset, x.dtype)
    return tf.cast(x * tf.reshape(scale, shape) + tf.reshape(offset, shape), layer.compute_dtype)


def _update(layer: Any, mean: Any, variance: Any, samples: Any) -> None:
    if getattr(layer, "unbiased", False):  # torch's running variance
        variance = variance * samples / tf.maximum(samples - 1.0, 1.0)
    for running, value in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        kept = tf.cast(running, tf.float64) * layer.momentum
        running.assign(tf.cast(kept + value * (1 - layer.momentum), running.dtype))
