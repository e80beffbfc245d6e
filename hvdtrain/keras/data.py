"""Step 3 for Keras: each rank's part of every global batch, for ``model.fit``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras import session
from hvdtrain.steps.sharding import Shards, bounds
from hvdtrain.steps.world import World

_orders: weakref.WeakSet[_Order] = weakref.WeakSet()
_last: weakref.ref[_Order] | None = None  # that was begun


def shard(
    data: Any,
    *,
    global_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
    process_set: Any = None,
) -> tf.data.Dataset:
    """Return this rank's part of each global batch of ``data``, as a dataset for ``fit``.

    Parts differ by one sample at most. All ranks take the same number of steps; where a tail has
    fewer samples than there are ranks, some parts are empty. An epoch is one order of the samples,
    a function of the seed and the epoch's number alone, the same on any number of ranks.

    Args:
        data: arrays whose first axis is the samples, such as ``(x, y)`` or ``(x, y,
            sample_weight)``, x and y nested as the model takes them; or a ``tf.data.Dataset`` of
            *global* batches, which every rank reads in the same order: give ``shuffle`` a seed.
        global_batch: samples of a step over all ranks; for arrays only.
        shuffle: arrays only: draw an order for each epoch; False keeps theirs, as evaluation may.
        seed: of that order, equal on all ranks.
        process_set: whose ranks share each global batch, those that train the model. All by
            default; where there are process sets it has to be named.

    Raises:
        UsageError: no global batch for arrays, or one for a dataset, which has its own; the arrays
            differ in length; there are process sets, and none is named.
    """
    if isinstance(data, tf.data.Dataset):
        if global_batch is not None:
            raise UsageError("shard: the dataset has its batches; give dataset.batch(GLOBAL_BATCH)")
        own_part = _cut(session.chosen(process_set).world)
        return data.map(own_part, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)
    if global_batch is None:
        raise UsageError("shard: give global_batch=, the samples of a step over all ranks")
    with tf.device("/CPU:0"):  # a GPU has better use for its memory
        arrays = tf.nest.map_structure(tf.convert_to_tensor, data)
    lengths = {int(one.shape[0]) for one in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
        raise UsageError(f"shard: the arrays have {sorted(lengths)} samples, not one number")
    world = session.chosen(process_set).world
    shards = Shards(lengths.pop(), global_batch, seed, world.rank, world.size)
    order = _Order(shards, shuffle)
    indices = tf.data.Dataset.from_generator(
        order, output_signature=tf.TensorSpec([None], tf.int64)
    )
    parts = indices.map(
        lambda part: tf.nest.map_structure(lambda one: tf.gather(one, part), arrays)
    )
    known = tf.data.experimental.assert_cardinality(shards.steps_per_epoch)
    return parts.apply(known).prefetch(tf.data.AUTOTUNE)


@dataclass
class Place:
    """Where ``fit`` stands in a training that goes on after another process (``elastic.py``)."""

    epochs: int = 0  # done before those that fit counts
    left_out: int = 0  # first batches of the epoch, which are not trained on


place = Place()  # of this process, which trains one model at a time


def begin_epoch(number: int) -> None:
    """Tell the datasets of ``shard`` which epoch is drawn next; else they count by themselves."""
    global _last
    _last = None
    for order in _orders:
        order.epoch = number + place.epochs


def begin_at(samples: int, consumed: int) -> int | None:
    """Let the dataset of ``samples`` samples leave the first ``consumed`` out of its next epoch.

    Batches of those are empty.

    Returns:
        How many batches are; None: there is no such dataset, or it is not clear which one.
    """
    found = [order for order in _orders if order.shards.samples == samples]
    numbers = {order.empty_batches(consumed) for order in found}
    if len(numbers) != 1:
        return None
    for order in found:  # the first to be drawn from is the one
        order.start = consumed
    return numbers.pop()


def drawn_last() -> _Order | None:
    """Return what was drawn from last since the epoch began; None: nothing of ``shard``."""
    return _last() if _last else None


class _Order:
    """The indices of this rank's parts, an epoch each time it is iterated over."""

    def __init__(self, shards: Shards, shuffle: bool) -> None:
        self.shards, self.shuffle = shards, shuffle
        self.epoch = 0
        self.start = 0  # samples of the next epoch that are left out
        self.began = 0  # of the epoch at hand
        _orders.add(self)

    def empty_batches(self, consumed: int) -> int:
        """Return how many steps of an epoch fall away where ``consumed`` samples are left out."""
        rest = self.shards.samples - consumed
        return self.shards.steps_per_epoch - -(-rest // self.shards.global_batch)

    def consumed(self, batches: int) -> int:
        """Return the samples that are done after ``batches`` batches of the epoch at hand."""
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
        if self.shuffle:
            yield from (part.indices for part in self.shards.parts(number, began))
            return
        total, batch = self.shards.samples, self.shards.global_batch
        for start in range(began, total, batch):
            stop = min(start + batch, total)
            low, high = bounds(stop - start, self.shards.rank, self.shards.size)
            yield np.arange(start + low, start + high)


def _cut(world: World) -> Callable[..., Any]:
    """Return what cuts a rank's part out of a global batch."""

    def part(*batch: Any) -> Any:
        structure = batch if len(batch) > 1 else batch[0]
        total = tf.shape(tf.nest.flatten(structure)[0], tf.int64)[0]
        base, extra = total // world.size, total % world.size
        low = world.rank * base + tf.minimum(tf.constant(world.rank, tf.int64), extra)
        high = low + base + tf.cast(world.rank < extra, tf.int64)
        return tf.nest.map_structure(lambda one: one[low:high], structure)

    return part
