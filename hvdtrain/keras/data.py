"""Step 3 for Keras: this rank's part of every global batch, and models that weight it.

Every callback of this package prepares its model, before its step is traced.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.tensorflow import batchnorm
from hvdtrain.adapters.tensorflow.buckets import distribute, reduction_of, undistribute
from hvdtrain.errors import UsageError
from hvdtrain.keras import session
from hvdtrain.keras.optimizer import StepSum, counted
from hvdtrain.steps.sharding import Shards, bounds
from hvdtrain.steps.world import World

Logs = dict[str, Any] | None  # of a callback: values by name

_orders: weakref.WeakSet[_Order] = weakref.WeakSet()
_last: weakref.ref[_Order] | None = None  # order iterated over last
_left_out = 0  # number of batches of this epoch of ``fit`` that were completed before it


def shard(
    data: Any,
    *,
    global_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    process_set: Any = None,
) -> tf.data.Dataset:
    """Return this rank's part of each global batch of ``data``, as a dataset for ``fit``.

    Parts differ by at most one sample. All ranks take the same number of steps; if the last batch
    has fewer samples than there are ranks, some parts are empty: ``fit`` and ``evaluate`` replace
    these by a sample of zeros, which counts nowhere. The order of an epoch depends only
    on the seed and the epoch's number, and is the same on any number of ranks.

    Args:
        data: arrays whose first axis is the samples, e.g. ``(x, y)`` or ``(x, y,
            sample_weight)``, x and y nested as in the model's inputs; or a ``tf.data.Dataset`` of
            *global* batches, which every rank reads in the same order (``shuffle`` with a seed).
        global_batch: number of samples per step over all ranks; only for arrays.
        shuffle: whether to draw a new order for each epoch; only for arrays.
        seed: seed of that order, equal on all ranks.
        process_set: None, or that of all ranks; others are refused.

    Raises:
        UsageError: arrays without ``global_batch``, or a dataset with one; lists, or arrays of
            different lengths; another process set.
    """
    session.check_process_set(process_set)
    world = session.adapter().world
    if isinstance(data, tf.data.Dataset):
        if global_batch is not None:
            raise UsageError("shard: a dataset has its batches; use dataset.batch(GLOBAL_BATCH)")
        local_part = _cut(world)
        return data.map(local_part, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)
    if global_batch is None:
        raise UsageError("shard: specify global_batch=, the samples per step over all ranks")
    with tf.device("/CPU:0"):  # saves GPU memory
        arrays = tf.nest.map_structure(tf.convert_to_tensor, data)
    if any(array.shape.rank == 0 for array in tf.nest.flatten(arrays)):
        raise UsageError("shard: a list is not an array: use np.asarray(y)")
    lengths = {int(array.shape[0]) for array in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
        raise UsageError(f"shard: the arrays have {sorted(lengths)} samples, not one number")
    shards = Shards(lengths.pop(), global_batch, seed, world.rank, world.size)
    order = _Order(shards, shuffle)
    indices = tf.data.Dataset.from_generator(
        order, output_signature=tf.TensorSpec([None], tf.int64)
    )
    parts = indices.map(
        lambda part: tf.nest.map_structure(lambda array: tf.gather(array, part), arrays)
    )
    known = tf.data.experimental.assert_cardinality(shards.steps_per_epoch)
    result = parts.apply(known).prefetch(tf.data.AUTOTUNE)
    result.repeat = _refuse_repeat
    return result


def _refuse_repeat(*_: object, **__: object) -> NoReturn:
    """Refuse what would read the next epoch's samples before that epoch begins."""
    raise UsageError(
        "shard: fit draws a new order of the samples for each epoch: omit repeat() and "
        "steps_per_epoch"
    )


def begin_epoch(number: int) -> None:
    """Set the next epoch of the datasets of ``shard``, which otherwise count by themselves."""
    global _last
    _last = None
    for order in _orders:
        order.epoch = number


def begin_at(samples: int, consumed: int) -> int | None:
    """Skip the first ``consumed`` samples in the next epoch of the dataset of ``samples`` samples.

    Returns the number of skipped batches, which are empty; None: no such dataset, or it is
    ambiguous.
    """
    matching = [order for order in _orders if order.shards.samples == samples]
    numbers = {order.empty_batches(consumed) for order in matching}
    if len(numbers) != 1:
        return None
    for order in matching:  # applies to the first one that is drawn from
        order.start = consumed
    return numbers.pop()


def drawn_last() -> _Order | None:
    """Return the order drawn from last in this epoch; None: none of ``shard``."""
    return _last() if _last else None


def left_out() -> int:
    """Return the number of batches that the current epoch of ``fit`` leaves out at its beginning.

    Callbacks are called for them, but the model does not change.
    """
    return _left_out


def leave_out(model: Any, number: int, rest: int, logs: Logs) -> Callable[[], None]:
    """Make ``fit`` draw the next ``number`` batches without training on them, and return ``logs``.

    The last ``rest`` of them begin an execution that trains on its other batches. Call the result
    at the end of the epoch: it restores the model's train function if that has not happened yet.
    """
    global _left_out
    _left_out = number - rest
    original, left, several = model.train_function, number, model.steps_per_execution

    def restore() -> None:
        if model.train_function is train_function:
            model.train_function = original

    def train_function(iterator: Any) -> Any:
        nonlocal left
        drawn = min(left, several)
        for _ in range(drawn):
            next(iterator)
        left -= drawn
        if left == 0:
            restore()
        if left or not rest:
            return logs
        model.steps_per_execution = several - rest
        model.make_train_function(force=True)
        try:
            return model.train_function(iterator)
        finally:
            model.train_function, model.steps_per_execution = original, several

    def end() -> None:
        global _left_out
        _left_out = 0
        restore()

    if number:
        model.train_function = train_function
    return end


class _Order:
    """The indices of this rank's parts, one epoch per iteration."""

    def __init__(self, shards: Shards, shuffle: bool) -> None:
        self.shards, self.shuffle = shards, shuffle
        self.epoch = 0
        self.start = 0  # number of samples skipped in the next epoch
        self.began = 0  # number of samples skipped in the current epoch
        _orders.add(self)

    def empty_batches(self, consumed: int) -> int:
        """Return the number of empty steps of an epoch if ``consumed`` samples are skipped."""
        rest = self.shards.samples - consumed
        return self.shards.steps_per_epoch - -(-rest // self.shards.global_batch)

    def consumed(self, batches: int) -> int:
        """Return the number of samples done after ``batches`` batches of the current epoch."""
        trained = batches - self.empty_batches(self.began)
        return min(self.began + trained * self.shards.global_batch, self.shards.samples)

    def __call__(self) -> Iterator[np.ndarray[Any, Any]]:
        global _last
        _last = weakref.ref(self)
        number, self.epoch = self.epoch, self.epoch + 1
        self.began = began = self.start
        for order in list(_orders):
            order.start = 0
        for _ in range(self.empty_batches(began)):
            yield np.zeros(0, np.int64)
        for part in self.shards.parts(number, began):
            low, high = bounds(part.global_count, self.shards.rank, self.shards.size)
            drawn = part.start.consumed + np.arange(low, high)
            yield part.indices[: part.count] if self.shuffle else drawn


def _cut(world: World) -> Callable[..., Any]:
    """Return a function that selects a rank's part of a global batch."""

    def part(*batch: Any) -> Any:
        structure = batch if len(batch) > 1 else batch[0]
        total = tf.shape(tf.nest.flatten(structure)[0], tf.int64)[0]
        base, extra = total // world.size, total % world.size
        low = world.rank * base + tf.minimum(tf.constant(world.rank, tf.int64), extra)
        high = low + base + tf.cast(world.rank < extra, tf.int64)
        return tf.nest.map_structure(lambda tensor: tensor[low:high], structure)

    return part


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
        model.train_step = _counting(model, model.train_step, seen)
        model.test_step = _weighing(model, model.test_step, seen)
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


def rate_of(optimizer: Any) -> Any:
    """Return the variable of the learning rate; None if it is a schedule's.

    A loss-scale optimizer has one, too, which is 0 and unused.
    """
    rate = getattr(getattr(optimizer, "inner_optimizer", optimizer), "_learning_rate", None)
    return rate if isinstance(rate, keras.Variable) else None


def learning_rate(optimizer: Any) -> float | None:
    """Return the learning rate; None if it is a schedule's."""
    rate = rate_of(optimizer)
    return None if rate is None else float(rate)


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

    @functools.wraps(original)
    def train_step(data: Any) -> Any:
        reductions = step_sums(model)
        if not is_built(model):  # variables created in a trace would be initialized too late
            if type(model).call is keras.Model.call:
                raise UsageError("build the layers of the model first: it has only a train_step")
            x = keras.utils.unpack_x_y_sample_weight(data)[0]
            with tf.init_scope():
                model(tf.nest.map_structure(_symbol, x))
            for reduction in reductions:
                reduction.begin()
        count = _count(data)
        seen.assign_add(tf.cast(count, tf.int64))
        with counted(reductions, count) as share, _means_weighted(share), _uncounted(model, count):
            return original(_filled(data, count))

    train_step.seen = seen  # type: ignore[attr-defined]
    return train_step


def _weighing(model: Any, original: Any, seen: Any) -> Any:
    """Return a ``test_step`` whose means are over samples, not over batches."""

    @functools.wraps(original)
    def test_step(data: Any) -> Any:
        count = _count(data)
        seen.assign_add(tf.cast(count, tf.int64))
        with _means_weighted(tf.cast(count, tf.float64)), _uncounted(model, count):
            return original(_filled(data, count))

    return test_step


def _count(data: Any) -> Any:
    """Return the number of samples of a batch."""
    return tf.shape(next(tensor for tensor in tf.nest.flatten(data) if tensor is not None))[0]


def _symbol(tensor: Any) -> Any:
    """Return an input like ``tensor`` for a call that only builds the model."""
    if tensor is None:
        return None
    return keras.KerasTensor(
        (None, *tensor.shape[1:]), keras.backend.standardize_dtype(tensor.dtype)
    )


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
