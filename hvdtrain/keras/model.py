"""Models prepared for several ranks: batches weighted by their samples, agreed ends of ``fit``.

Every callback of this package prepares its model, before its step is traced.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.tensorflow import batchnorm
from hvdtrain.adapters.tensorflow.buckets import distribute, reduction_of, undistribute
from hvdtrain.errors import UsageError
from hvdtrain.keras import session
from hvdtrain.keras.data import Logs, begin_epoch
from hvdtrain.keras.losses import corrected
from hvdtrain.keras.optimizer import StepSum, counted


def prepare(model: Any) -> None:
    """Turn off XLA, agree on overflows, and weight each batch by its samples.

    XLA does not support Horovod. A loss-scale optimizer that ``compile`` has wrapped around the
    distributed one would check one rank's gradients for overflows; it must check their sum, so it
    becomes the distributed optimizer.
    """
    if session.adapter().world.size == 1:
        return
    for optimizer in _optimizers(model):
        inner = getattr(optimizer, "inner_optimizer", None)
        reduction = reduction_of(inner)
        if isinstance(reduction, StepSum):
            undistribute(inner)
            distribute(optimizer, reduction)
            reduction.optimizer = optimizer
    if model.jit_compile:
        model.jit_compile = False
        model.train_function = None
    if not hasattr(model.train_step, "seen"):
        with tf.device("/CPU:0"):
            seen = tf.Variable(0, dtype=tf.int64, trainable=False, name="seen")
            together = tf.Variable(False, trainable=False, name="together")
        model.train_step = _counting(model, model.train_step, seen)
        model.test_step = _weighing(model, model.test_step, seen, together)
        model.train_function = model.test_function = None


def _optimizers(model: Any) -> list[Any]:
    """Return the optimizers of a model: the compiled one, and those of a train step of its own.

    These are attributes of it or its layers. With Keras's step a layer may be a compiled model.
    """
    compiled = getattr(model, "optimizer", None)
    step = getattr(model.train_step, "__wrapped__", model.train_step)
    if getattr(step, "__func__", None) is keras.Model.train_step:
        return [compiled] if compiled else []
    attributes = [value for layer in model._flatten_layers() for value in vars(layer).values()]
    several = [value for value in attributes if isinstance(value, (list, tuple))]
    several += [list(value.values()) for value in attributes if isinstance(value, dict)]
    values = [compiled, *attributes, *itertools.chain(*several)]
    return [value for value in values if isinstance(value, keras.optimizers.Optimizer)]


def step_sums(model: Any) -> list[StepSum]:
    """Return the gradient sums of a model's optimizers, that of the compiled one first."""
    reductions = map(step_sum, _optimizers(model))
    return list(dict.fromkeys(reduction for reduction in reductions if reduction))


def step_sum(optimizer: Any) -> StepSum | None:
    """Return the gradient sum of a model's optimizer; None if it is not distributed."""
    # Before ``prepare`` a loss-scale optimizer may wrap the distributed one.
    reduction = reduction_of(optimizer) or reduction_of(getattr(optimizer, "inner_optimizer", None))
    return reduction if isinstance(reduction, StepSum) else None


def first_sum(model: Any) -> StepSum | None:
    """Return the gradient sum that stands for a model; None if its optimizer is not distributed."""
    return next(iter(step_sums(model)), None)


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate; None if it is a schedule's.

    A loss-scale optimizer has one, too, which is 0 and unused.
    """
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return float(rate) if isinstance(rate, keras.Variable) else None


class ModelCallback(keras.callbacks.Callback):
    """A callback that prepares its model, and sets the epoch of the shards."""

    @override
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self.adapter = session.adapter()
        prepare(model)

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        # Not Keras's own method: so it calls all callbacks in the thread of ``fit``.
        super().on_train_batch_end(batch, logs)

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        begin_epoch(epoch)
        history, reduction = self.model.history, first_sum(self.model)
        if reduction and self.adapter.world.size > 1:
            if not isinstance(history, AgreedStop):  # it may be of a class of the user
                kind = type(history)
                history.__class__ = type(kind.__name__, (AgreedStop, kind), {})
            history.stop = reduction.stop
            reduction.stop.assign([0.0, 0.0])


class AgreedStop(keras.callbacks.History):
    """Stop ``fit`` on all ranks after the same batch, if a callback of any rank wants to.

    The wish is summed with the samples of the next batch, or at the end of the epoch. ``History``
    is the callback that is called last.
    """

    stop: Any  # of a ``StepSum``

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        super().on_train_batch_end(batch, logs)
        wanted, agreed = self.stop.numpy()
        if self.model.stop_training and not wanted:
            self.stop.assign([1.0, agreed])
        self.model.stop_training = bool(agreed)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        wanted = np.array([float(self.model.stop_training or self.stop.numpy()[0])])
        with session.adapter().waits.during("fit"):
            self.model.stop_training = bool(session.adapter().communicator.sum(wanted)[0])

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        super().on_train_end(logs)
        history: Any = self
        history.__class__ = type(self).__bases__[1]  # the one that ``fit`` returns, as it was
        del history.stop


def note_samples(reduction: StepSum | None) -> None:
    """Set the adapter's count of samples trained on, the weight of this rank's statistics."""
    if reduction:
        reduction.adapter.samples_seen = int(reduction.samples.numpy())


def is_built(model: Any) -> bool:
    """Return whether a model has its variables; one with only a train step is never called."""
    if model.built or type(model).call is not keras.Model.call:
        return bool(model.built)
    return all(layer.built for layer in model._flatten_layers(include_self=False))


def _counting(model: Any, original: Any, seen: Any) -> Any:
    """Return a ``train_step`` that exchanges the sample counts of the ranks' batches."""

    def symbol(tensor: Any) -> Any:
        if tensor is None:
            return None
        dtype = keras.backend.standardize_dtype(tensor.dtype)
        return keras.KerasTensor((None, *tensor.shape[1:]), dtype)

    @functools.wraps(original)
    def train_step(data: Any) -> Any:
        reductions = step_sums(model)
        if not is_built(model):  # variables created in a trace would be initialized too late
            if type(model).call is keras.Model.call:
                raise UsageError("build the layers of the model first: it has only a train_step")
            x = keras.utils.unpack_x_y_sample_weight(data)[0]
            with tf.init_scope():  # a call that only builds the model
                model(tf.nest.map_structure(symbol, x))
            for reduction in reductions:
                reduction.begin()
        count = _count(data)
        seen.assign_add(tf.cast(count, tf.int64))
        with (
            counted(reductions, count) as share,
            _corrected(model, original, count),
            _means_weighted(share),
            _uncounted(model, count),
        ):
            return original(_filled(data, count))

    train_step.seen = seen  # type: ignore[attr-defined]
    return train_step


def _weighing(model: Any, original: Any, seen: Any, together: Any) -> Any:
    """Return a ``test_step`` whose means are over samples, not over batches.

    Those of losses are over all ranks, batch by batch, while ``together`` is true: the ranks have
    the same number of batches.
    """

    @functools.wraps(original)
    def test_step(data: Any) -> Any:
        count = _count(data)
        seen.assign_add(tf.cast(count, tf.int64))
        with (
            _corrected(model, original, count, together),
            _means_weighted(tf.cast(count, tf.float64)),
            _uncounted(model, count),
        ):
            return original(_filled(data, count))

    test_step.together = together  # type: ignore[attr-defined]
    return test_step


def _corrected(
    model: Any, step: Any, count: Any, together: Any = None
) -> AbstractContextManager[None]:
    """Return the correction of the losses of a ``step``, unless the ranks are to be added up."""
    reductions = step_sums(model)
    if not reductions or not all(reduction.average for reduction in reductions):
        return nullcontext()
    keras_steps = (keras.Model.train_step, keras.Model.test_step)
    # Code of the user may divide a sum by the samples of this rank.
    sums = (
        getattr(step, "__func__", None) in keras_steps
        and type(model).compute_loss is keras.Model.compute_loss
    )
    return corrected(reductions[0], count, sums=sums, together=together)


def _count(data: Any) -> Any:
    """Return the number of samples of a batch."""
    return tf.shape(next(tensor for tensor in tf.nest.flatten(data) if tensor is not None))[0]


def _filled(data: Any, count: Any) -> Any:
    """Return a batch of ``count`` samples; of none, a stand-in: one sample of zeros."""

    def filled(tensor: Any) -> Any:
        if tensor is None or tensor.shape[0] or isinstance(tensor, tf.RaggedTensor):
            return tensor  # a batch that is never empty, or a kind without zeros
        sizes = zip(tensor.shape[1:], tf.unstack(tf.shape(tensor, tf.int64))[1:], strict=True)
        shape = [now if size is None else size for size, now in sizes]
        if isinstance(tensor, tf.SparseTensor):
            shape = [tf.cast(tf.maximum(count, 1), tf.int64), *shape]
            return tf.SparseTensor(tensor.indices, tensor.values, shape)
        zeros = tf.zeros([1, *shape], tensor.dtype)
        return tf.cond(count > 0, lambda: tensor, lambda: zeros)

    return tf.nest.map_structure(filled, data)


@contextmanager
def _uncounted(model: Any, count: Any) -> Iterator[None]:
    """Keep metrics and running statistics of BatchNorm as they are if ``count`` is 0.

    Within the block, since a model may create them only in its first step.
    """
    original = keras.Variable.assign

    def assign(self: Any, value: Any) -> Any:
        kept = [] if self.trainable else [*model.metrics_variables, *batchnorm.statistics(model)]
        if any(self is variable for variable in kept):
            value = keras.ops.where(count > 0, keras.ops.convert_to_tensor(value, self.dtype), self)
        return original(self, value)

    keras.Variable.assign = assign
    try:
        yield
    finally:
        keras.Variable.assign = original


@contextmanager
def _means_weighted(weight: Any) -> Iterator[None]:
    """Weight means of values of a whole batch, e.g. losses of outputs, by ``weight``.

    Within the block, since a model may create them only in its first step.
    """
    original = keras.metrics.Mean.update_state

    def update_state(self: Any, values: Any, sample_weight: Any = None) -> None:
        value = keras.ops.convert_to_tensor(values)
        if value.shape.rank == 0:
            values = tf.where(weight > 0, value, tf.zeros_like(value))
            sample_weight = weight if sample_weight is None else sample_weight
        original(self, values, sample_weight)

    keras.metrics.Mean.update_state = update_state
    try:
        yield
    finally:
        keras.metrics.Mean.update_state = original
