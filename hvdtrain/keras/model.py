"""A compiled model made ready to be trained on all ranks, before its step is traced.

Every callback of this package does it to the model that it is given to.
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

    XLA knows nothing of Horovod. A loss scale that ``compile`` put around the distributed optimizer
    would look for an overflow in one rank's gradients; it is to look at their sum, so it becomes
    the distributed one.
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
    """Return what sums the gradients of a model's optimizer; None where it is a plain one."""
    # Until ``prepare`` a loss scale may stand around the distributed one.
    found = reduction_of(optimizer) or reduction_of(getattr(optimizer, "inner_optimizer", None))
    return found if isinstance(found, StepSum) else None


def adapter_of(optimizer: Any) -> CommonAdapter:
    """Return the adapter of the ranks that train a model together, all or a process set."""
    found = step_sum(optimizer)
    return found.adapter if found else session.adapter()


def rate_of(optimizer: Any) -> Any:
    """Return the variable of the learning rate; None where a schedule gives it.

    A loss scale has one, too, which is 0 and not used.
    """
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


class ModelCallback(keras.callbacks.Callback):
    """A callback that makes its model ready, and tells the shards which epoch begins."""

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
    """Tell the adapter how many samples this rank has trained on, the weight of its statistics."""
    if reduction := step_sum(optimizer):
        reduction.adapter.samples_seen = int(reduction.samples.numpy())


def _counting(model: Any, own: Any) -> Any:
    """Return ``train_step`` so that the ranks tell each other the samples of their batches."""

    @functools.wraps(own)
    def train_step(data: Any) -> Any:
        reduction = step_sum(model.optimizer)
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
