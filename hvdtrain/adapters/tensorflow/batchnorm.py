"""BatchNorm over the global batch for TensorFlow.

Source: Ioffe and Szegedy, "Batch Normalization" (2015), with the mean and the variance taken over
the samples of all ranks. Horovod's own layer has no CPU version for Keras 3.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.adapters.framework import SumOverRanks
from hvdtrain.steps.world import World

Reduce = Callable[[Any], Any]
"""tensor -> its sum over all ranks, differentiable."""


def convert(model: Any, sum_tensor: SumOverRanks, world: World, framework: Any) -> None:
    """Make the BatchNorm layers of ``model`` use the statistics of the global batch.

    In training every rank must then run the model forward and backward in each step, with the loss
    weighted by ``optimizer.scale_loss`` before the backward pass.
    """
    for number, layer in enumerate(_layers(model)):
        reduce = differentiable(f"batchnorm.{number}", sum_tensor)
        layer.__class__ = _synchronized(type(layer), reduce, world, framework)


def statistics(model: Any) -> list[Any]:
    """Return the running statistics of BatchNorm that each rank updates from its own samples."""
    layers = [each for each in _layers(model) if each.built and not hasattr(each, "over_ranks")]
    return [value for each in layers for value in (each.moving_mean, each.moving_variance)]


def _layers(model: Any) -> list[Any]:
    layers = model._flatten_layers(include_self=False)
    return [layer for layer in layers if isinstance(layer, keras.layers.BatchNormalization)]


def _synchronized(base: type, reduce: Reduce, world: World, framework: Any) -> type:
    class Synchronized(base):
        over_ranks = True

        def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
            if not training or not self.trainable:
                return super().call(inputs, training=training)
            if mask is not None:
                raise NotImplementedError("--sync-batchnorm does not support masks")
            return normalize(self, inputs, reduce, world, framework.stand_in)

    Synchronized.__name__ = Synchronized.__qualname__ = base.__name__
    return Synchronized


def differentiable(name: str, sum_over_ranks: SumOverRanks) -> Reduce:
    """Return a function: the sum over ranks, whose gradient is the sum of the ranks' gradients."""

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def reduce(values: Any) -> Any:
        def gradient(upstream: Any) -> Any:
            return sum_over_ranks(upstream, f"{name}.backward")

        return sum_over_ranks(values, f"{name}.forward"), gradient

    return reduce


def normalize(layer: Any, inputs: Any, reduce: Reduce, world: World, stand_in: Any = False) -> Any:
    """Return the output of a BatchNorm layer in training, and update its running statistics.

    The ``inputs`` are of shape (n, ..., channels) with the channels at ``layer.axis``; a
    ``stand_in`` counts as none.
    Each rank computes count, mean and squared deviations of its part. All ranks gather the three of
    each rank, by a sum in which the others have zeros, and merge them exactly in float64 (Chan,
    Golub and LeVeque, 1979): a sum of squares would cancel if the mean is large.
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
    row = tf.concat([count[None], tf.cast(local, tf.float64), spread], 0)
    row = tf.where(stand_in, tf.zeros_like(row), row)
    rows = reduce(tf.pad(row[None], [[world.rank, world.size - 1 - world.rank], [0, 0]]))
    counts, means, squares = tf.split(rows, [1, *[local.shape[0]] * 2], 1)
    samples = tf.reduce_sum(counts)
    total = tf.maximum(samples, 1.0)  # all ranks may have a stand-in, in a pass of an accumulation
    mean = tf.reduce_sum(counts * means, 0) / total
    variance = tf.reduce_sum(squares + counts * tf.square(means - mean), 0) / total
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
        before = tf.cast(running, tf.float64)
        after = before * layer.momentum + value * (1 - layer.momentum)
        running.assign(tf.cast(tf.where(samples > 0, after, before), running.dtype))
