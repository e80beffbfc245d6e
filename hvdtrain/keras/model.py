"""Preparation of a compiled model for distributed training, before its step is traced.

Every callback of this package prepares its model.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.adapters.tensorflow.distributed import distribute, reduction_of, undistribute
from hvdtrain.keras import data as shards
from hvdtrain.keras import session
from hvdtrain.keras.optimizer import StepSum


def prepare(model: Any) -> None:
    """Turn off XLA, agree on overflows, and weight each batch by its samples.

    XLA does not support Horovod. A loss-scale optimizer that ``compile`` has wrapped around the
    distributed one would check one rank's gradients for overflows; it must check their sum, so it
    becomes the distributed optimizer.
    """
    optimizer = model.optimizer
    if adapter_of(optimizer).world.size == 1:
        return
    inner = getattr(optimizer, "inner_optimizer", None)
    reduction = reduction_of(inner)
    if isinstance(reduction, StepSum):
        undistribute(inner)
        distribute(optimizer, reduction)
        reduction.optimizer = optimizer
    if step_sum(optimizer) is None:
        return
    if model.jit_compile:
        model.jit_compile = False
        model.train_function = None
    if not hasattr(model.train_step, "counts_samples"):
        model.train_step = _counting(model, model.train_step)
        model.train_function = None


def step_sum(optimizer: Any) -> StepSum | None:
    """Return the gradient sum of a model's optimizer; None if it is not distributed."""
    # Before ``prepare`` a loss-scale optimizer may wrap the distributed one.
    reduction = reduction_of(optimizer) or reduction_of(getattr(optimizer, "inner_optimizer", None))
    return reduction if isinstance(reduction, StepSum) else None


def adapter_of(optimizer: Any) -> CommonAdapter:
    """Return the adapter of the ranks that train a model together: all or a process set."""
    reduction = step_sum(optimizer)
    return reduction.adapter if reduction else session.adapter()


def rate_of(optimizer: Any) -> Any:
    """Return the variable of the learning rate; None if it is a schedule's.

    A loss-scale optimizer has one, too, which is 0 and unused.
    """
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


class ModelCallback(keras.callbacks.Callback):
    """A callback that prepares its model, and sets the epoch of the shards."""

    @override
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.adapter = adapter_of(model.optimizer)
        prepare(model)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        shards.begin_epoch(epoch)


def note_samples(optimizer: Any) -> None:
    """Set the adapter's count of samples trained on, the weight of this rank's statistics."""
    if reduction := step_sum(optimizer):
        reduction.adapter.samples_seen = int(reduction.samples.numpy())


def _counting(model: Any, original: Any) -> Any:
    """Return a ``train_step`` that exchanges the sample counts of the ranks' batches."""

    @functools.wraps(original)
    def train_step(data: Any) -> Any:
        reduction = step_sum(model.optimizer)
        if reduction is None:  # recompiled
            return original(data)
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        if not model.built:  # variables created in a trace would be initialized too late
            shapes = tf.nest.map_structure(lambda tensor: (None, *tensor.shape[1:]), x)
            with tf.init_scope():
                model.build(shapes)
            reduction.begin()
        first = next(tensor for tensor in tf.nest.flatten(x) if tensor is not None)
        count = tf.shape(first)[0]
        # A batch of no samples has no statistics: BatchNorm would make them nan.
        kept = [(weight, tf.identity(weight.value)) for weight in model.non_trainable_weights]
        with reduction.step(count):
            if tf.executing_eagerly() and int(count) == 0:  # Keras's losses fail on empty batches
                variables = model.trainable_variables
                model.optimizer.apply([tf.zeros_like(value) for value in variables], variables)
                return model.get_metrics_result()
            result = original(data)
        for weight, value in kept:
            weight.assign(tf.where(count > 0, weight.value, value))
        return result

    train_step.counts_samples = True  # type: ignore[attr-defined]
    return train_step
