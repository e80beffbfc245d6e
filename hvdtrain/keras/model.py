"""A compiled model made ready to be trained on all ranks, before its step is traced.

Every callback of this package does it to the model that it is given to.
"""

from __future__ import annotations

import functools
from typing import Any

import keras
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.tensorflow.distributed import distribute, reduction_of, undistribute
from hvdtrain.keras import data as shards
from hvdtrain.keras import session
from hvdtrain.keras.optimizer import StepSum


def prepare(model: Any) -> None:
    """Turn off XLA, agree on overflows, and weight each batch by its samples.

    XLA knows nothing of Horovod. A loss scale that ``compile`` put around the distributed optimizer
    would look for an overflow in one rank's gradients; it is to look at their sum, so it becomes
    the distributed one.
    """
    if session.size() == 1:
        return
    optimizer = model.optimizer
    inner = getattr(optimizer, "inner_optimizer", None)
    reduction = None if inner is None else reduction_of(inner)
    if isinstance(reduction, StepSum):
        undistribute(inner)
        distribute(optimizer, reduction)
        reduction.optimizer = optimizer
    if step_sum(model) is None:
        return
    if model.jit_compile:
        model.jit_compile = False
        model.train_function = None
    if not hasattr(model.train_step, "counts_samples"):
        model.train_step = _counting(model, model.train_step)
        model.train_function = None


def step_sum(model: Any) -> StepSum | None:
    """Return what sums the gradients of the model; None where its optimizer is a plain one."""
    found = reduction_of(model.optimizer)
    return found if isinstance(found, StepSum) else None


class ModelCallback(keras.callbacks.Callback):
    """A callback that makes its model ready, and tells the shards which epoch begins."""

    @override
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        prepare(model)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        super().on_epoch_begin(epoch, logs)
        shards.begin_epoch(epoch)


def note_samples(model: Any) -> None:
    """Tell the adapter how many samples this rank has trained on, the weight of its statistics."""
    if reduction := step_sum(model):
        session.adapter().samples_seen = int(reduction.samples.numpy())


def _counting(model: Any, own: Any) -> Any:
    """Return ``train_step`` so that the ranks tell each other the samples of their batches."""

    @functools.wraps(own)
    def train_step(data: Any) -> Any:
        reduction = step_sum(model)
        if reduction is None:  # compiled anew
            return own(data)
        x = keras.utils.unpack_x_y_sample_weight(data)[0]
        if not model.built:  # in a trace its variables would get their values too late
            shapes = tf.nest.map_structure(lambda one: (None, *one.shape[1:]), x)
            with tf.init_scope():
                model.build(shapes)
            reduction.begin()
        first = next(one for one in tf.nest.flatten(x) if one is not None)
        count = tf.shape(first)[0]
        # A batch of no samples has no statistics: BatchNorm would make them nan.
        kept = [(one, tf.identity(one.value)) for one in model.non_trainable_weights]
        with reduction.step(count):
            if tf.executing_eagerly() and int(count) == 0:  # Keras's losses have no mean of nothing
                variables = model.trainable_variables
                model.optimizer.apply([tf.zeros_like(one) for one in variables], variables)
                return model.get_metrics_result()
            result = own(data)
        for one, value in kept:
            one.assign(tf.where(count > 0, one.value, value))
        return result

    train_step.counts_samples = True  # type: ignore[attr-defined]
    return train_step
