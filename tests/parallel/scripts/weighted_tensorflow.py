"""Run on every rank by test_weights.py: ``weight_loss`` in users' own TensorFlow loops.

    weighted_tensorflow.py STRATEGY FOLDER

The loss is a mean over the tokens that are no padding; the counts of the ranks differ. Every loop
is also run by hand in this one process: the sum of losses by that of tokens, over all passes of an
update. 13 sequences in global batches of 4 leave, at the tail, stand-ins, and one of the global
batches is nothing but padding, whose mean is nan.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from hvdtrain.adapters.select import adapter
from hvdtrain.steps.sharding import Shards
from tests.parallel.expect import expect_error

SAMPLES, BATCH, EPOCHS, SEED, WORDS, LENGTH, PADDING = 13, 4, 3, 3, 7, 6, 0
strategy, folder = sys.argv[1:]
hvd = adapter("tensorflow", strategy)
world = hvd.initialize()
hvd.pin_device()
keras.config.set_floatx("float64")
draw = np.random.default_rng(0)
tokens = draw.integers(1, WORDS, (SAMPLES, LENGTH))
tokens[np.arange(LENGTH) >= draw.integers(0, LENGTH, SAMPLES)[:, None]] = PADDING
for number in (0, 2):  # the second one is of nothing but padding, and so is the tail
    tokens[[*Shards(SAMPLES, BATCH, SEED).parts(number)][1 + number].indices] = PADDING


def net() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Embedding(WORDS, 5), keras.layers.Dense(WORDS)]
    return keras.Sequential([keras.Input((LENGTH,), dtype="int64"), *layers])


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.5, momentum=0.9, **options)


def loss_of(model: keras.Model, rows: Any) -> tuple[Any, Any]:
    """Return the sum of the losses of all tokens that are no padding, and their number."""
    losses = keras.losses.sparse_categorical_crossentropy(rows, model(rows), from_logits=True)
    mask = tf.cast(rows != PADDING, losses.dtype)
    return tf.reduce_sum(losses * mask), tf.reduce_sum(mask)


def expected(optimizer: Any, passes: int) -> keras.Model:
    """Train in this process, by hand."""
    model, waiting = net(), []
    variables = model.trainable_variables
    for epoch in range(EPOCHS):
        for part in Shards(SAMPLES, BATCH, SEED).epoch(epoch):
            waiting.append(part.indices)
            if len(waiting) < passes:
                continue
            with tf.GradientTape() as tape:
                total, count = loss_of(model, tf.constant(tokens[np.concatenate(waiting)]))
                loss = tf.math.divide_no_nan(total, count)
            gradients = tape.gradient(loss, [value.value for value in variables])
            optimizer.apply([tf.convert_to_tensor(each) for each in gradients], variables)
            waiting = []
    return model


class Loop:
    """The loop of a user; ``how``: eager, inside or outside of a traced function."""

    def __init__(self, optimizer: Any, how: str) -> None:
        self.model = net()
        self.model, self.optimizer = hvd.distribute_optimizer(self.model, optimizer)
        self.how, self.traces = how, 0
        spec = tf.TensorSpec([None, LENGTH], tf.int64)
        self.update = self.step if how == "eager" else tf.function(self.step, [spec])

    def step(self, rows: Any) -> None:
        self.traces += 1
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            total, count = loss_of(self.model, rows)
            loss = self.optimizer.scale_loss(total / count)  # nan over nothing
        if self.how != "outside":
            hvd.weight_loss(count)
        gradients = tape.gradient(loss, [value.value for value in variables])
        self.optimizer.apply_gradients(zip(gradients, variables, strict=True))

    def run(self) -> None:
        shards = hvd.shard_data(SAMPLES, global_batch=BATCH, seed=SEED)
        for epoch in range(EPOCHS):
            for part in shards.epoch(epoch):
                rows = tokens[part.indices]
                if self.how == "outside":
                    hvd.weight_loss(int((rows != PADDING).sum()))
                self.update(tf.constant(rows))
        assert self.how == "eager" or self.traces <= 2  # the first one makes variables


def train(
    how: str, passes: int = 1, wrap: Callable[[Any], Any] = lambda optimizer: optimizer
) -> None:
    """Compare a loop over the ranks with one process."""
    single = expected(sgd(global_clipnorm=0.1), passes)
    steps = passes if passes > 1 else None
    loop = Loop(wrap(sgd(global_clipnorm=0.1, gradient_accumulation_steps=steps)), how)
    loop.run()
    values: Sequence[Any] = loop.model.get_weights()
    worst = max(abs(a - b).max() for a, b in zip(values, single.get_weights(), strict=True))
    print(f"{how}, {passes} passes: largest difference {worst:.1e}")
    assert worst < 1e-9, (how, passes, worst)
    hvd.check_replicas(loop.model, loop.optimizer)


def misuse() -> None:
    weight = keras.Variable(np.zeros(2))
    _, optimizer = hvd.distribute_optimizer(keras.Sequential(), keras.optimizers.SGD(1.0))
    shards = hvd.shard_data(world.size, global_batch=world.size)
    for _ in shards.epoch(0):
        for count in (-1, float("nan"), float("inf")):
            expect_error(lambda: hvd.weight_loss(count), f"weight_loss({count}): the count must")  # noqa: B023
        expect_error(lambda: hvd.weight_loss(tf.ones(3)), "(3,)", "tf.reduce_sum(mask)")
        hvd.weight_loss(2)
        expect_error(lambda: hvd.weight_loss(2), "was not used", "before each `apply`")
        optimizer.apply([tf.fill([2], tf.constant(world.rank + 1.0, tf.float64))], [weight])
        np.testing.assert_allclose(weight.numpy(), -(world.size + 1) / 2)
        # Without one, an update is weighted by samples.
        optimizer.apply([tf.fill([2], tf.constant(world.rank + 1.0, tf.float64))], [weight])
        np.testing.assert_allclose(weight.numpy(), -(world.size + 1))
        tf.function(hvd.weight_loss)(tf.constant(1.0 if world.rank else np.nan))
        optimizer.apply([tf.ones(2, tf.float64)], [weight])
        assert np.isnan(weight.numpy()).all()
    accumulating = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    _, accumulating = hvd.distribute_optimizer(keras.Sequential(), accumulating)
    for _ in shards.epoch(1):
        hvd.weight_loss(1)
        accumulating.apply([tf.ones(2, tf.float64)], [weight])
        expect_error(
            lambda: accumulating.apply([tf.ones(2, tf.float64)], [weight]),
            "some passes of an update are weighted and some are not",
        )


for how in ("eager", "inside", "outside"):
    train(how)
    train(how, passes=2)
train("inside", wrap=keras.optimizers.LossScaleOptimizer)
misuse()
Path(folder, f"{world.rank}-of-{world.size}").touch()
