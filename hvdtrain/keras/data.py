"""Step 3 for Keras: this rank's part of every global batch, and the position within an epoch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from hvdtrain.adapters.base import JsonValues
from hvdtrain.errors import UsageError
from hvdtrain.keras import session
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


def left_out() -> int:
    """Return the number of batches that the current epoch of ``fit`` leaves out at its beginning.

    Callbacks are called for them, but the model does not change.
    """
    return _left_out


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


class EpochProgress:
    """The completed batches of an epoch of ``fit``.

    Args:
        model: the model that is trained.
        steps: number of batches of the epoch; None: unknown.

    Attributes:
        batch: number of completed batches, including those that are left out.
    """

    def __init__(self, model: Any, steps: int | None) -> None:
        self.model, self.steps = model, steps
        self.batch = 0
        self._order: Any = None  # from which the epoch's batches are drawn; None: not of ``shard``
        self._logs: Logs = None
        self._restore: Callable[[], None] = lambda: None  # the model's train function

    def resume(self, state: JsonValues, size: int) -> None:
        """Leave out the completed batches of a checkpoint with this ``state``; ``size``: of ranks.

        They are drawn but not trained on, and callbacks see the saved logs for them. Batches of
        ``shard`` are counted in samples, so they are exact on any number of ranks.
        """
        self.batch = done = self._completed(state["of_epoch"], state["world_size"], size)
        rest = 0 if done == self.steps else done % self.model.steps_per_execution
        self._logs = state["of_epoch"]["logs"]
        self._leave_out(done, rest)

    def _leave_out(self, number: int, rest: int) -> None:
        """Make ``fit`` draw the next ``number`` batches without training on them.

        The last ``rest`` of them begin an execution that trains on its other batches.
        """
        global _left_out
        _left_out = number - rest
        model, logs, left = self.model, self._logs, number
        original, several = model.train_function, model.steps_per_execution

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

        self._restore = restore
        if number:
            model.train_function = train_function

    def _completed(self, saved: JsonValues, before: int, size: int) -> int:
        """Return the number of completed batches, in batches of the current size.

        ``before`` and ``size`` are the numbers of ranks then and now.
        """
        batches = begin_at(*saved["drawn"]) if saved["drawn"] else None
        if batches is not None:
            return batches
        if self.steps and saved["steps"]:  # the same share of the epoch, whatever the batch size
            completed = round(saved["batch"] * self.steps / saved["steps"])
            return min(completed, self.steps - 1)  # one is left for the metrics
        return int(saved["batch"]) * before // size  # as batches of a fixed size per rank

    def note(self, batch: int, logs: Logs) -> None:
        """Record that ``batch``, counted from 0, is completed; call it after each one."""
        self._order = self._order or (_last() if _last else None)  # later: the validation's
        self.batch = min(batch + 1, self.steps or batch + 1)  # the last execution may have fewer
        self._logs = logs

    def values(self) -> JsonValues:
        """Return the JSON values from which ``resume`` continues; empty: from the beginning."""
        if not self.batch:
            return {}
        order, logs = self._order, self._logs or {}
        return {
            "batch": self.batch,
            "steps": self.steps,
            "drawn": order and [order.shards.samples, order.consumed(self.batch)],
            "logs": {name: value for name, value in logs.items() if type(value) is float},
        }

    def end(self) -> None:
        """End the epoch."""
        global _left_out
        _left_out = 0
        self._restore()
        self.batch = 0
