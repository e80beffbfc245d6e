"""The data of the Keras tests as one process sees it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hvdtrain.steps.sharding import permutation


def global_batches(x: Any, y: Any, batch: int, seed: int) -> tf.data.Dataset:
    """The global batches that all ranks have together, an epoch each time it is iterated over."""
    epochs = itertools.count()

    def batches() -> Iterator[Any]:
        order = permutation(len(x), seed, next(epochs))
        for start in range(0, len(x), batch):
            picked = order[start : start + batch]
            yield x[picked], y[picked]

    kinds = (tf.TensorSpec([None, *x.shape[1:]], x.dtype), tf.TensorSpec([None], y.dtype))
    data = tf.data.Dataset.from_generator(batches, output_signature=kinds)
    return data.apply(tf.data.experimental.assert_cardinality(-(-len(x) // batch)))
