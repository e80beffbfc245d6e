"""Run on every rank by test_adapter.py: each step against a closed form of rank and size."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.preflight import check_devices
from hvdtrain.adapters.select import adapter
from hvdtrain.config.options import Options
from hvdtrain.steps.integrity import Device
from hvdtrain.steps.sharding import Shards
from tests.parallel.expect import expect_error, expect_snapshot


def common(hvd: CommonAdapter) -> None:
    world = hvd.world
    rank, size = world.rank, world.size
    assert (world.local_rank, world.local_size, world.hosts) == (rank, size, 1)

    means, count = hvd.average_metrics(rank, loss=2.0 * rank, accuracy=0.0)
    total = size * (size - 1) // 2
    assert count == total
    assert means["loss"] == 2.0 if total else np.isnan(means["loss"])

    card = Device("a card", "GPU-0", visible=1)
    mine = Device("a card", f"GPU-{rank}", visible=size)
    if size > 1:
        expect_error(
            lambda: check_devices(hvd.communicator, card, hvd.ranks),
            *(f"ranks 0-{size - 1}", "the same GPU", world.host),
        )
    check_devices(hvd.communicator, mine, hvd.ranks)


def pytorch(hvd: CommonAdapter) -> None:
    import torch

    rank, size = hvd.world.rank, hvd.world.size
    samples = 2 * size + 1  # parts of 3 and 2; then one left over: empty parts
    x = torch.arange(samples, dtype=torch.float64) + 1
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    unused = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))
    model = torch.nn.ParameterList([weight, unused])
    plain = torch.optim.SGD(model, lr=1.0)
    expect_error(lambda: hvd.distribute_optimizer(plain), "model, optimizer = hvd.distribute")
    expect_error(lambda: hvd.distribute_optimizer(plain, model), "SGD", "not a torch.nn.Module")
    model, optimizer = hvd.distribute_optimizer(model, plain)
    expect_error(lambda: hvd.distribute_optimizer(model, plain), "distributed already")
    shards = hvd.shard_data(samples, global_batch=2 * size)
    before, seen = 0.0, 0
    for part in shards.epoch(0):
        optimizer.zero_grad()
        mine = x[part.indices]
        (mine * weight).mean().backward()
        optimizer.step()
        chosen = list(shards_of(samples, 2 * size))[seen]
        before -= float(x[chosen].mean())
        assert abs(weight.item() - before) < 1e-12, (weight, before)
        assert torch.equal(unused, torch.ones(3, dtype=torch.float64))
        seen += 1
    assert seen == 2

    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    other = torch.optim.Adam(model.parameters())
    if rank == 0:  # rank 0 alone has an optimizer state
        model(torch.randn(8, 3)).sum().backward()
        other.step()
    hvd.broadcast_state(model, other)
    state = hvd.export_state(model, other)
    assert len(state.training) == 3 * 4  # step and two moments of four parameters
    gathered = hvd.communicator.gather(state.model["0.weight"].tobytes())
    assert gathered == [gathered[0]] * size


def tensorflow(hvd: CommonAdapter) -> None:
    import keras
    import tensorflow as tf

    rank, size = hvd.world.rank, hvd.world.size
    samples = 2 * size + 1
    x = np.arange(samples, dtype=np.float32) + 1
    weight = keras.Variable(np.zeros(1, np.float32))
    _, optimizer = hvd.distribute_optimizer(keras.Sequential(), keras.optimizers.SGD(1.0))
    hvd.distribute_optimizer(keras.Sequential(), keras.optimizers.SGD(1.0))  # makes no updates
    before, seen = 0.0, 0
    for part in hvd.shard_data(samples, global_batch=2 * size).epoch(0):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.constant(x[part.indices]) * weight.value)
        gradient = tape.gradient(loss, weight.value)
        optimizer.apply_gradients([(gradient, weight)])
        chosen = list(shards_of(samples, 2 * size))[seen]
        before -= float(x[chosen].mean())
        assert abs(float(weight.numpy()[0]) - before) < 1e-5, (weight, before)
        seen += 1
    assert seen == 2
    assert not hvd.flags_agreed.saving

    saved_in_the_background(hvd, Path(sys.argv[2], "background"))
    stand_ins(hvd)
    tasks(hvd)

    mine = {"momentum": 0.9, "clipnorm": None} if rank else {"momentum": 0.5, "clipnorm": 1.0}
    other = keras.optimizers.SGD(0.25 + rank, **mine)
    hvd.broadcast_state(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), other)
    assert (float(other.learning_rate), other.momentum, other.clipnorm) == (0.25, 0.5, 1.0)

    # model.fit averages too: every rank sees other targets, the weight moves by their mean.
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, use_bias=False)])
    keras.utils.set_random_seed(rank)
    hvd.broadcast_state(model)
    start = float(model.get_weights()[0][0, 0])
    fitted = adapter("tensorflow")
    fitted.initialize()
    model, averaging = fitted.distribute_optimizer(model, keras.optimizers.SGD(0.5))
    model.compile(averaging, loss="mse")
    model.fit(np.ones((2, 1)), np.full((2, 1), float(rank)), batch_size=2, verbose=0)
    target = (size - 1) / 2
    assert abs(float(model.get_weights()[0][0, 0]) - (start - 0.5 * 2 * (start - target))) < 1e-5


def normed(*layers: Any) -> Any:
    """A net in fp64 with a state that changes in each pass."""
    import keras

    keras.config.set_dtype_policy("float64")
    keras.utils.set_random_seed(0)
    first = keras.layers.SpectralNormalization(keras.layers.Dense(4, "tanh"))
    last = keras.layers.Dense(2)
    net = keras.Sequential([keras.Input((3,), dtype="float64"), first, *layers, last])
    keras.config.set_dtype_policy("float32")
    return net


def weights(net: Any) -> Any:
    return np.concatenate([value.ravel() for value in net.get_weights()])


def stand_ins(hvd: CommonAdapter) -> None:
    """Own loops make every pass on every rank; the loss of a stand-in may be infinite."""
    import keras
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(5, 3))

    def train(net: Any, optimizer: Any, shards: Any, traced: bool) -> Any:
        def step(inputs: Any, count: Any) -> None:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(tf.square(net(inputs, training=True))) / count
                scaled = optimizer.scale_loss(loss)
            gradients = tape.gradient(scaled, net.trainable_weights)
            optimizer.apply_gradients(zip(gradients, net.trainable_weights, strict=True))

        for part in (part for epoch in range(2) for part in shards.epoch(epoch)):
            inputs = tf.constant(x[part.indices]), tf.constant(part.count, tf.float64)
            (tf.function(step) if traced else step)(*inputs)
        return weights(net)

    for traced in (False, True):
        alone = train(normed(), keras.optimizers.SGD(0.1), Shards(5, 4), traced)
        pair = hvd.distribute_optimizer(normed(), keras.optimizers.SGD(0.1))
        found = train(*pair, hvd.shard_data(5, global_batch=4), traced)
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-12)
    norm = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.9)])
    norm, _ = hvd.distribute_optimizer(norm, keras.optimizers.SGD(0.1))
    for part in hvd.shard_data(5, global_batch=4).epoch(0):
        norm(tf.ones((len(part.indices), 3)), training=True)
    passes = sum(samples > hvd.world.rank for samples in (4, 1))  # with samples
    np.testing.assert_allclose(norm.layers[0].moving_mean, 1 - 0.9**passes, rtol=1e-6)


def tasks(hvd: CommonAdapter) -> None:
    """A task makes as many passes on every rank, whatever the number of samples."""
    import keras

    from hvdtrain.adapters.strategy import Single
    from hvdtrain.adapters.tensorflow.framework import TensorFlowFramework
    from hvdtrain.tasks.training_step_tensorflow import InMemory, TFTask

    x, y = np.random.default_rng(0).normal(size=(5, 3)), np.array([0, 1, 1, 0, 1])

    def train(adapter: Any, shards: Any, passes: int) -> tuple[Any, list[float]]:
        options = replace(Options(), precision="fp64", weight_decay=0.0, accumulate_steps=passes)
        norm = keras.layers.BatchNormalization(dtype="float64")
        task = TFTask(normed(norm), options, InMemory(x, y, "/CPU:0"), None)
        if adapter is hvd:
            hvd.strategy.synchronize_batchnorm(task)
            task.model, task.optimizer = hvd.distribute_optimizer(task.model, task.optimizer)
        adapter.models.add(task.model)
        task.leave_out, losses = adapter.leave_out, []
        for epoch in range(2):
            for part in shards.epoch(epoch):
                (batch,) = (batch for _, batch in task.train.training([part]))
                batch = replace(batch, stand_in=part.stand_in)
                losses.append(part.weight * float(task.update(batch, learning_rate=0.1, seed=1)))
                assert task.not_finite is None
        return weights(task.model), losses

    # One pass over the whole batch: as BatchNorm over the global batch of each pass has it.
    for passes in (1, 3) if hvd.world.size == 1 else (1,):
        alone, losses = train(CommonAdapter(TensorFlowFramework, Single), Shards(5, 4), passes)
        found, parts = train(hvd, hvd.shard_data(5, global_batch=4), passes)
        np.testing.assert_allclose(found, alone, rtol=0, atol=1e-12)
        np.testing.assert_allclose(hvd.communicator.sum(np.array(parts)), losses, atol=1e-12)
    found, _ = train(hvd, hvd.shard_data(5, global_batch=4), 3)
    gathered = hvd.communicator.gather(found.tobytes())
    assert np.isfinite(found).all() and gathered == [gathered[0]] * hvd.world.size


def saved_in_the_background(hvd: CommonAdapter, folder: Path) -> None:
    """What is written is the state at the call, although updates go on."""
    import keras
    import tensorflow as tf

    width, size = 1500, hvd.world.size
    model = keras.Sequential([keras.Input((width,)), keras.layers.Dense(width)])
    hvd.broadcast_state(model)
    model, optimizer = hvd.distribute_optimizer(model, keras.optimizers.SGD(0.01, momentum=0.9))
    optimizer.build(model.trainable_variables)
    shards = hvd.shard_data(2 * size, global_batch=size)

    def updates() -> Iterator[None]:
        for part in (part for epoch in range(100) for part in shards.epoch(epoch)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(tf.ones((len(part.indices), width))))
            gradients = tape.gradient(loss, model.trainable_weights)
            optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
            yield

    expect_snapshot(hvd, folder, model, optimizer, updates())


def shards_of(samples: int, batch: int) -> Any:
    """The global batches, from one rank's point of view."""
    return (part.indices for part in Shards(samples, batch).epoch(0))


framework = sys.argv[1]
hvd = adapter(framework)
hvd.initialize()
hvd.pin_device()
common(hvd)
{"pytorch": pytorch, "tensorflow": tensorflow}[framework](hvd)
Path(sys.argv[2], f"{hvd.world.rank}-of-{hvd.world.size}").touch()
