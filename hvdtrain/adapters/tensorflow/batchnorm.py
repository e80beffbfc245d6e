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

    In training every rank must then run the model forward and backward in each step, also on an
    empty part, with the loss weighted by ``optimizer.scale_loss`` before the backward pass.

    Returns:
        How many layers there are.
    """
    layers = [
        layer
        for layer in model._flatten_layers(include_self=False)
        if isinstance(layer, keras.layers.BatchNormalization)
    ]
    for number, layer in enumerate(layers):
        layer.__class__ = _synchronized(type(layer), f"batchnorm.{number}", sum_over_ranks)
    return len(layers)


def _synchronized(own: type, name: str, sum_over_ranks: Sum) -> type:
    reduce = differentiable(name, sum_over_ranks)

    class Synchronized(own):
        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            if not training or not self.trainable:
                return super().call(inputs, training=training)
            if mask is not None:
                raise NotImplementedError("--sync-batchnorm does not know masks")
            return normalize(self, inputs, reduce)

    Synchronized.__name__ = Synchronized.__qualname__ = own.__name__
    return Synchronized


def differentiable(name: str, sum_over_ranks: Sum) -> Callable[[Any], Any]:
    """Return the sum over ranks as a function whose gradient is the sum of the ranks' gradients."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(values: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return sum_over_ranks(upstream, f"{name}.backward")

        return sum_over_ranks(values, f"{name}.forward"), gradient

    return reduce


def normalize(layer: Any, inputs: Any, reduce: Callable[[Any], Any]) -> Any:
    """Return the output of a BatchNorm layer in training; also updates its running statistics.

    Each rank computes the mean and the sum of squares about it of its own part; count, sum and
    sum of squares are merged in float64, where the cancellation does not matter.

    Args:
        layer: the layer, for its weights, momentum and epsilon.
        inputs: shape (n, ..., channels) with the channels at ``layer.axis``; n may be 0.
        reduce: a differentiable sum over all ranks.
    """
    rank = inputs.shape.rank
    axes = [axis for axis in range(rank) if axis != layer.axis % rank]
    x = tf.cast(inputs, layer.variable_dtype)
    count = tf.cast(tf.size(x), tf.float64) / x.shape[layer.axis]
    own_mean = tf.math.divide_no_nan(tf.reduce_sum(x, axes), tf.cast(count, x.dtype))
    shape = [-1 if axis == layer.axis % rank else 1 for axis in range(rank)]
    spread = tf.cast(
        tf.reduce_sum(tf.math.squared_difference(x, tf.reshape(own_mean, shape)), axes), tf.float64
    )
    own_mean = tf.cast(own_mean, tf.float64)
    total = reduce(
        tf.concat([own_mean * count, spread + own_mean * own_mean * count, count[None]], 0)
    )
    sums, squares, samples = tf.split(total, [own_mean.shape[0], own_mean.shape[0], 1])
    mean = sums / samples
    variance = tf.maximum(squares / samples - mean * mean, 0.0)
    _update(layer, mean, variance, samples)
    scale = tf.math.rsqrt(variance + tf.cast(layer.epsilon, tf.float64))
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
