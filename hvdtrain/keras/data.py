"""Step 3 for Keras: each rank's part of every global batch, for ``model.fit``."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.errors import UsageError
from hvdtrain.keras import session
from hvdtrain.steps.sharding import Shards, bounds

_orders: weakref.WeakSet[_Order] = weakref.WeakSet()


def shard(
    data: Any,
    *,
    global_batch: int | None = None,
    shuffle: bool = True,
    seed: int = 0,
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

    Raises:
        UsageError: no global batch for arrays, or one for a dataset, which has its own; the arrays
            differ in length.
    """
    if isinstance(data, tf.data.Dataset):
        if global_batch is not None:
            raise UsageError("shard: the dataset has its batches; give dataset.batch(GLOBAL_BATCH)")
        return data.map(_own_part, num_parallel_calls=1).prefetch(tf.data.AUTOTUNE)
    if global_batch is None:
        raise UsageError("shard: give global_batch=, the samples of a step over all ranks")
    with tf.device("/CPU:0"):  # a GPU has better use for its memory
        arrays = tf.nest.map_structure(tf.convert_to_tensor, data)
    lengths = {int(one.shape[0]) for one in tf.nest.flatten(arrays)}
    if len(lengths) != 1:
        raise UsageError(f"shard: the arrays have {sorted(lengths)} samples, not one number")
    shards = Shards(lengths.pop(), global_batch, seed, session.rank(), session.size())
    order = _Order(shards, shuffle)
    indices = tf.data.Dataset.from_generator(
        order, output_signature=tf.TensorSpec([None], tf.int64)
    )
    parts = indices.map(
        lambda part: tf.nest.map_structure(lambda one: tf.gather(one, part), arrays)
    )
    known = tf.data.experimental.assert_cardinality(shards.steps_per_epoch)
    return parts.apply(known).prefetch(tf.data.AUTOTUNE)


def begin_epoch(number: int) -> None:
    """Tell the datasets of ``shard`` which epoch is drawn next; else they count by themselves."""
    for order in _orders:
        order.epoch = number


class _Order:
    """The indices of this rank's parts, an epoch each time it is iterated over."""

    def __init__(self, shards: Shards, shuffle: bool) -> None:
        self.shards, self.shuffle = shards, shuffle
        self.epoch = 0
        _orders.add(self)

    def __call__(self) -> Iterator[np.ndarray[Any, Any]]:
        number, self.epoch = self.epoch, self.epoch + 1
        if self.shuffle:
            yield from (part.indices for part in self.shards.parts(number))
            return
        total, batch = self.shards.samples, self.shards.global_batch
        for start in range(0, total, batch):
            stop = min(start + batch, total)
            low, high = bounds(stop - start, self.shards.rank, self.shards.size)
            yield np.arange(start + low, start + high)


def _own_part(*batch: Any) -> Any:
    """Cut this rank's part out of a global batch."""
    structure = batch if len(batch) > 1 else batch[0]
    total = tf.shape(tf.nest.flatten(structure)[0], tf.int64)[0]
    rank, size = session.rank(), session.size()
    base, extra = total // size, total % size
    low = rank * base + tf.minimum(tf.constant(rank, tf.int64), extra)
    high = low + base + tf.cast(rank < extra, tf.int64)
    return tf.nest.map_structure(lambda one: one[low:high], structure)
