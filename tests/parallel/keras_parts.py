"""Data and models of the Keras tests, in fp64, and how ranks compare with one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.keras import session
from hvdtrain.steps.sharding import permutation

keras.config.set_floatx("float64")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def draw(generator: np.random.Generator, samples: int) -> tuple[Any, Any]:
    """Inputs and labels of three classes."""
    return generator.standard_normal((samples, 5)), generator.integers(0, 3, samples)


def net(seed: int, *extra: Callable[[], Any], begin: bool = True) -> keras.Model:
    """Two layers, and ``extra`` between them; without ``begin`` the first step builds it."""
    keras.utils.set_random_seed(seed)
    first = [keras.Input((5,))] if begin else []
    middle = keras.layers.Dense(7, "tanh", kernel_regularizer="l2")
    more = [make() for make in extra]
    return keras.Sequential([*first, middle, *more, keras.layers.Dense(3)])


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


def close(mine: keras.Model, one: keras.Model) -> None:
    for value, other in zip(mine.get_weights(), one.get_weights(), strict=True):
        np.testing.assert_allclose(value, other, rtol=0, atol=1e-9)


def copies(values: Iterable[np.ndarray[Any, Any]]) -> int:
    """The number of different ``values`` that the ranks have."""
    flat = b"".join(value.tobytes() for value in values)
    return len(set(session.adapter().communicator.gather(flat)))
