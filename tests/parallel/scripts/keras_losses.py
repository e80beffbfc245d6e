"""Run on every rank by test_keras.py: losses of ``fit`` that are no means over samples.

Each is trained over the ranks and, by plain Keras, in this one process: weights and history, with
those of a validation, must be the same. The sequences have up to 6 words, some of them none; 17 in
global batches of 5 leave uneven parts and, at the tail, stand-ins.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.steps.sharding import permutation
from tests.parallel.keras_parts import close, copies

SAMPLES, BATCH, EPOCHS, SEED, WORDS, LENGTH, PADDING = 17, 5, 3, 5, 7, 6, 0
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
draw = np.random.default_rng(0)
X = draw.integers(1, WORDS, (SAMPLES, LENGTH))
X[np.arange(LENGTH) >= draw.integers(0, LENGTH, SAMPLES)[:, None]] = PADDING
ORDER = permutation(SAMPLES, SEED, 0)
X[ORDER[-2:]] = X[ORDER[BATCH - 1]] = PADDING  # the tail; a sample of the last rank
WEIGHTS = draw.uniform(0.1, 3.0, (SAMPLES, 1))
WEIGHTS[ORDER[0]] = 0.0
ENTROPY = keras.losses.SparseCategoricalCrossentropy


def net(seed: int, *, masks: bool = True, outputs: int = 1) -> keras.Model:
    """A classifier of words, with a regularizer and a loss that is a mean over samples."""
    keras.utils.set_random_seed(seed)
    start = keras.Input((LENGTH,), dtype="int64")
    embedding = keras.layers.Embedding(WORDS, 5, mask_zero=masks)
    middle = keras.layers.Dense(4, kernel_regularizer="l2", activity_regularizer="l2")
    hidden = middle(embedding(start))
    ends = [keras.layers.Dense(WORDS, name=f"out{number}")(hidden) for number in range(outputs)]
    return keras.Model(start, ends if outputs > 1 else ends[0])


def both(
    loss: Any,
    y: Any = X,
    *weights: Any,
    model: Callable[[int], keras.Model] = net,
    rate: float = 0.3,
    **options: Any,
) -> None:
    """Compare a training over the ranks with one in this process."""
    rows = tf.nest.map_structure(lambda array: array[ORDER], (X, y, *weights))
    whole = tf.data.Dataset.from_tensor_slices(rows).batch(BATCH)
    single, mine = model(0), model(RANK)
    single.compile(keras.optimizers.SGD(rate, momentum=0.9), loss, **options)
    expected = single.fit(whole, epochs=EPOCHS, validation_data=whole, verbose=0).history
    mine.compile(
        hvd.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.9)), loss, **options
    )
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
    ]
    parts = hvd.shard(whole)
    result = mine.fit(
        parts, epochs=EPOCHS, validation_data=parts, callbacks=callbacks, verbose=0
    ).history
    close(mine, single)
    assert expected.keys() == result.keys()
    for name, values in expected.items():
        if name.startswith("val_out"):  # in which Keras weighs batches alike, ranks their samples
            continue
        np.testing.assert_allclose(result[name], values, rtol=1e-9, err_msg=name)
    assert copies(mine.get_weights()) == 1


def entropy(**options: Any) -> Any:
    return ENTROPY(from_logits=True, **options)


def without_masks(seed: int) -> keras.Model:
    return net(seed, masks=False)


both(entropy(), metrics=["accuracy"], weighted_metrics=["accuracy"])
both(entropy(reduction="mean"), X, WEIGHTS, weighted_metrics=["accuracy"])
both(entropy(reduction="mean_with_sample_weight"), X, WEIGHTS)
both(entropy(reduction="mean_with_sample_weight"), X, WEIGHTS, model=without_masks, rate=0.05)
both(entropy(), X, WEIGHTS, model=without_masks)
both(entropy(ignore_class=PADDING), model=without_masks, run_eagerly=True)
both(entropy(ignore_class=1), steps_per_execution=2)
both(entropy(reduction="sum"), rate=0.003)
both(  # several losses, divided by different numbers
    [entropy(ignore_class=1), entropy(reduction="mean_with_sample_weight")],
    (X, X[::-1].copy()),
    model=lambda seed: net(seed, outputs=2),
)
Path(sys.argv[1], f"{RANK}-of-{SIZE}").touch()
