"""Run on every rank by test_keras.py: ``model.fit`` over all ranks is that of one process.

Each way to train is run over the ranks, through hvdtrain.keras, and by plain Keras in this one
process on the union of the data: weights and history must be the same to 1e-9, and the weights
equal on all ranks to the bit. Ranks begin with other weights; 17 samples in global batches of 8
leave, at the tail, one rank with one sample and the others with none.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.adapters.preemption import SIGNALS
from hvdtrain.adapters.tensorflow.buckets import reduction_of
from hvdtrain.errors import HvdtrainError
from hvdtrain.keras import checkpoint, session
from hvdtrain.keras import data as shards
from hvdtrain.steps.sharding import permutation
from tests.parallel.expect import expect_error
from tests.parallel.keras_parts import LOSS, close, copies, draw, global_batches, net

SAMPLES, BATCH, EPOCHS, SEED = 17, 8, 3, 5
STEPS = -(-SAMPLES // BATCH)
DONE, WANTED = Path(sys.argv[1]), set(sys.argv[2].split(","))


expect_error(hvd.rank, "hvd.init()")
hvd.init()
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
generator = np.random.default_rng(0)
(X, Y), (VAL_X, VAL_Y) = draw(generator, SAMPLES), draw(generator, 7)


def sgd(**options: Any) -> Any:
    return keras.optimizers.SGD(0.2, momentum=0.9, **options)


def distributed(model: keras.Model, loss: Any = LOSS, **options: Any) -> keras.Model:
    """Return ``model``, to be trained over the ranks."""
    model.compile(hvd.DistributedOptimizer(sgd()), loss, **options)
    return model


def both(
    optimizer: Callable[[], Any] = sgd,
    callbacks: Callable[[], list[Any]] = list,
    distribute: dict[str, Any] | None = None,
    model: Callable[[int], keras.Model] = net,
    samples: int = SAMPLES,
    batch: int = BATCH,
    class_weight: dict[int, float] | None = None,
    **options: Any,
) -> keras.Model:
    """Train over the ranks and in one process; compare; return the model of the ranks."""
    options = {"loss": LOSS, "metrics": ["accuracy"], **options}
    single = model(0)
    eager = {**options, "run_eagerly": True, "steps_per_execution": 1}  # no tracing: much faster
    single.compile(optimizer(), **eager)
    expected = single.fit(
        global_batches(X[:samples], Y[:samples], batch, SEED),
        epochs=EPOCHS,
        validation_data=(VAL_X, VAL_Y),
        callbacks=callbacks(),
        class_weight=class_weight,
        verbose=0,
    )
    mine = model(RANK)
    mine.compile(hvd.DistributedOptimizer(optimizer(), **(distribute or {})), **options)
    train = hvd.shard((X[:samples], Y[:samples]), global_batch=batch, seed=SEED)
    local = slice(RANK, None, SIZE)
    result = mine.fit(
        train,
        epochs=EPOCHS,
        class_weight=class_weight,
        validation_data=(VAL_X[local], VAL_Y[local]),
        callbacks=[  # the one that makes them right comes last
            *callbacks(),
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
        ],
        verbose=0,
    )
    assert expected.history.keys() == result.history.keys(), result.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(result.history[name], values, rtol=1e-6, err_msg=name)
    close(mine, single)
    assert copies(mine.get_weights()) == 1
    return mine


# The ways to train


def plain() -> None:
    both()


def built_late() -> None:
    both(lambda: keras.optimizers.Adam(0.01))
    both(model=lambda seed: net(seed, begin=False))  # built by its first step
    both(model=lambda seed: net(seed, begin=False), run_eagerly=True)


def datasets() -> None:
    """A dataset of global batches is cut as arrays are, and so is one that is nested."""
    rows = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    cut = list(hvd.shard(rows).as_numpy_iterator())
    kept = hvd.shard({"x": X, "y": Y}, global_batch=BATCH, shuffle=False)
    for (x, y), same, whole in zip(cut, kept.as_numpy_iterator(), rows, strict=True):
        np.testing.assert_array_equal(x, same["x"])
        np.testing.assert_array_equal(y, same["y"])
        gathered = session.adapter().communicator.gather(x.tobytes())
        assert b"".join(gathered) == whole[0].numpy().tobytes()
    assert len(cut) == STEPS == int(kept.cardinality())
    expect_error(lambda: hvd.shard((X, Y)), "global_batch=")
    expect_error(lambda: hvd.shard(rows, global_batch=8), "dataset.batch(GLOBAL_BATCH)")
    expect_error(lambda: hvd.shard((X, Y[1:]), global_batch=8), "[16, 17]")
    expect_error(lambda: hvd.shard((X, Y.tolist()), global_batch=8), "np.asarray")
    expect_error(lambda: kept.repeat(), "omit repeat() and steps_per_epoch")


def settings() -> None:
    both(lambda: sgd(clipnorm=0.05), steps_per_execution=2)
    both(lambda: sgd(gradient_accumulation_steps=2), steps_per_execution=3)
    both(
        lambda: sgd(global_clipnorm=0.1, weight_decay=0.01, use_ema=True),
        distribute={"gradient_predivide_factor": 4.0, "device_dense": "/CPU:0", "name": "own"},
    )
    # An update after two batches, from the mean of their gradients.
    passes = {"backward_passes_per_step": 2, "average_aggregated_gradients": True}
    (mine := net(RANK)).compile(hvd.DistributedOptimizer(sgd(), **passes), LOSS)
    compare(net(0), mine, optimizer=sgd(gradient_accumulation_steps=2))


def compare(
    single: keras.Model,
    mine: keras.Model,
    whole: Any = None,
    parts: Any = None,
    optimizer: Any = None,
) -> None:
    """Fit a model in this process on ``whole``, and ``mine`` on this rank's ``parts`` of it."""
    single.compile(optimizer or sgd(), LOSS, run_eagerly=True)
    single.fit(whole or global_batches(X, Y, BATCH, SEED), epochs=EPOCHS, verbose=0)
    fit(mine, data=parts)
    close(mine, single)


def fit(model: keras.Model, **options: Any) -> Any:
    """Fit over the ranks, with the one callback that is needed."""
    data = options.pop("data", None) or hvd.shard((X, Y), global_batch=BATCH, seed=SEED)
    callbacks = [*options.pop("callbacks", ()), hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    options = {"epochs": EPOCHS, "verbose": 0, **options}
    return model.fit(data, callbacks=callbacks, **options)


def callbacks() -> None:
    """Keras's own decide by what all ranks have measured, wherever they stand."""

    def watched() -> list[Any]:
        return [
            keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, min_delta=10),
            keras.callbacks.EarlyStopping("val_loss", patience=0, min_delta=10),
        ]

    model = both(lambda: sgd(), watched)
    assert float(model.optimizer.learning_rate) < 0.2


def overflow() -> None:
    """What is not finite on one rank is skipped by all, however the loss scale was put around."""
    for wrap in (
        lambda: hvd.DistributedOptimizer(keras.optimizers.LossScaleOptimizer(sgd())),
        lambda: keras.optimizers.LossScaleOptimizer(hvd.DistributedOptimizer(sgd())),
    ):
        model = net(RANK)
        model.compile(wrap(), LOSS)
        x = X.copy()
        x[permutation(SAMPLES, SEED, 0)[BATCH - 1]] = np.inf  # the last rank's, in the first batch
        data = hvd.shard((x, Y), global_batch=BATCH, seed=SEED)
        first = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        model.fit(data, epochs=1, callbacks=[first], verbose=0)
        assert float(model.optimizer.dynamic_scale) == 2.0**14
        assert int(model.optimizer.iterations) == STEPS - 1
        assert all(np.isfinite(value).all() for value in model.get_weights())
        assert copies(model.get_weights()) == 1


def statistics() -> None:
    """BatchNorm sees each rank's part; a part of none leaves its statistics as they are."""
    for eager in (False, True):
        how = {"metrics": ["accuracy"], "run_eagerly": eager}
        model = distributed(net(RANK, keras.layers.BatchNormalization), **how)
        result = fit(
            model,
            validation_data=(VAL_X, VAL_Y),
            callbacks=[hvd.callbacks.MetricAverageCallback()],
        )
        assert np.isfinite(result.history["val_loss"]).all()
        assert all(np.isfinite(value).all() for value in model.get_weights())
        assert copies(value.numpy() for value in model.trainable_variables) == 1
        # After t passes over ones the mean is 1 - 0.9**t: passes of this rank with samples.
        norm = keras.Sequential([keras.Input((3,)), keras.layers.BatchNormalization(momentum=0.9)])
        norm.compile(hvd.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", run_eagerly=eager)
        fit(norm, data=hvd.shard((np.ones((5, 3)), np.ones((5, 3))), global_batch=4), epochs=2)
        passes = 2 * sum(samples > RANK for samples in (4, 1))
        np.testing.assert_allclose(norm.layers[0].moving_mean, 1 - 0.9**passes, rtol=1e-12)


class Passes(keras.layers.Layer):
    """A layer that counts its training passes, adds a loss, and is nan at zeros."""

    def build(self, shape: Any) -> None:
        self.passes = self.add_weight(name="passes", initializer="zeros", trainable=False)

    def call(self, inputs: Any, training: bool = False) -> Any:
        self.passes.assign_add(float(training))
        self.add_loss(0.1 * tf.reduce_mean(tf.square(inputs)))
        return self.passes * inputs / tf.norm(inputs, axis=-1, keepdims=True)


def stand_ins() -> None:
    """What changes in each pass changes alike on all ranks; a batch of none counts nowhere."""
    cross_entropy = keras.losses.sparse_categorical_crossentropy

    def model(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        normed = keras.layers.SpectralNormalization(keras.layers.Dense(7, "tanh"))
        return keras.Sequential([keras.Input((5,)), Passes(), normed, keras.layers.Dense(3)])

    none = max(1, SIZE - 1)  # in batches of so many the last rank never has a sample
    for batch, settings in (
        (none, {"weighted_metrics": ["accuracy"], "class_weight": {0: 0.5, 1: 2.0, 2: 1.0}}),
        (none, {"run_eagerly": True}),
        (4, {"steps_per_execution": 2}),
    ):
        both(
            model=model,
            samples=5,
            batch=batch,
            metrics=["accuracy", cross_entropy],
            **settings,
        )
    both(model=model)
    if SIZE == 1:
        return
    # Nothing is nan in what the callbacks of a rank see of its steps.
    seen: list[float] = []
    watch = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: seen.extend(logs.values())
    )
    mine = distributed(model(RANK), metrics=["accuracy"])
    data = hvd.shard((X[:5], Y[:5]), global_batch=4, seed=SEED)
    fit(mine, data=data, callbacks=[watch], validation_data=data)
    assert len(seen) == 2 * 2 * EPOCHS and np.isfinite(seen).all()


def own_loop() -> None:
    """A loop of the user's own: all ranks weigh the same, or are added up."""
    compression = hvd.Compression.fp16
    for options, expected in (
        ({}, (SIZE - 1) / 2),
        ({"op": hvd.Sum}, SIZE * (SIZE - 1) / 2),
        ({"gradient_predivide_factor": 3.0}, (SIZE - 1) / 2),
        ({"compression": compression}, (SIZE - 1) / 2),
    ):
        weight = keras.Variable(np.full(3, RANK, np.float64))
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        optimizer.build([weight])
        hvd.broadcast_global_variables(0)
        optimizer.apply([tf.fill([3], tf.constant(RANK, tf.float64))])
        np.testing.assert_allclose(weight.numpy(), np.full(3, -expected), rtol=1e-15)
    expect_error(lambda: hvd.broadcast_global_variables(1), "root_rank is 1")
    expect_error(lambda: hvd.DistributedOptimizer(optimizer), "distributed already")
    everyone = hvd.global_process_set
    hvd.DistributedOptimizer(sgd(), process_set=everyone)
    expect_error(lambda: hvd.DistributedOptimizer(sgd(), op=hvd.Adasum), "Average or Sum")
    expect_error(lambda: hvd.DistributedOptimizer(net(0)), "not a Sequential")
    expect_error(
        lambda: hvd.DistributedOptimizer(sgd(), backward_passes_per_step=0), "is 0: it must be 1 or"
    )
    np.testing.assert_array_equal(hvd.allreduce(tf.constant([1.0, RANK]), op=hvd.Sum)[0], SIZE)
    assert hvd.mpi_built() and hvd.allgather(tf.zeros([RANK + 1])).shape[0] == SIZE * (SIZE + 1) / 2


def removed() -> None:
    """Names of Horovod that are refused once they are used."""
    expect_error(lambda: hvd.elastic.run, "hvd.elastic is not supported", "BackupAndRestore")
    expect_error(lambda: hvd.ProcessSet([0]), "hvd.ProcessSet", "a job of its own")
    expect_error(lambda: hvd.add_process_set([0]), "hvd.add_process_set", "a job of its own")
    partial = hvd.PartialDistributedOptimizer
    expect_error(lambda: partial(sgd(), local_layers=[]), "use DistributedOptimizer")
    other = type("Other", (), {"process_set_id": 1})()
    words = "process sets are not supported", "a job of its own"
    expect_error(lambda: hvd.DistributedOptimizer(sgd(), process_set=other), *words)
    expect_error(lambda: hvd.shard((X, Y), global_batch=8, process_set=other), *words)
    expect_error(lambda: hvd.init(process_sets=[other]), *words)


def released() -> None:
    """Of models that are trained one after the other, only the last one remains."""
    kept = []
    for number in range(3):
        model = distributed(net(RANK))
        model.fit(X, Y, batch_size=BATCH, epochs=1, verbose=0)
        if number == 0:
            first = weakref.ref(model), weakref.ref(model.optimizer)
        if number == RANK == 1:  # only here, so it is not broadcast
            kept.append(model)
        elif number < 2:
            del model
            gc.collect()
    assert [reference() for reference in first] == [None, None]
    model.set_weights([np.full_like(value, RANK) for value in model.get_weights()])
    hvd.broadcast_global_variables(0)
    assert not any(value.any() for value in model.get_weights())


def guard() -> None:
    """Replicas that go apart end the training."""
    model = net(RANK)
    model.compile(sgd(), LOSS)  # not distributed
    if SIZE == 1:
        return
    others = "rank 1" if SIZE == 2 else f"ranks 1-{SIZE - 1}"
    words = (others, "differ", "after the first update", "hvd.DistributedOptimizer")
    expect_error(lambda: fit(model), *words, kind=HvdtrainError)
    unbuilt = net(RANK, begin=False)
    unbuilt.compile(sgd(), LOSS)
    expect_error(lambda: fit(unbuilt), "keras.Input(shape)")


def rates() -> None:
    """The learning rate of each batch, in closed form; the velocity grows with it."""
    seen: list[float] = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            seen.append(float(self.model.optimizer.learning_rate))

    model = distributed(net(RANK))
    warm = hvd.callbacks.LearningRateWarmupCallback(0.2 * SIZE, warmup_epochs=2)
    later = hvd.callbacks.LearningRateScheduleCallback(0.2 * SIZE, 0.1, start_epoch=2)
    history = fit(model, callbacks=[warm, later, Watch()], epochs=4).history
    fit(model, callbacks=[warm], epochs=1, data=hvd.shard((X, Y), global_batch=SAMPLES))
    half = 0.2 * (1 + (SIZE - 1) / 2)  # that epoch has one batch
    np.testing.assert_allclose(float(model.optimizer.learning_rate), half, rtol=1e-6)
    total = 2 * STEPS
    climb = [0.2 * (1 + (SIZE - 1) * (batch + 1) / total) for batch in range(total)]
    after = [0.2 * SIZE] * STEPS + [0.02 * SIZE] * STEPS
    np.testing.assert_allclose(seen, climb + after, rtol=1e-6)
    np.testing.assert_allclose(history["lr"], (climb + after)[STEPS - 1 :: STEPS], rtol=1e-6)
    warm.verbose, output = 1, io.StringIO()
    with contextlib.redirect_stdout(output):
        warm.on_epoch_end(1)
    assert output.getvalue().startswith("\nEpoch 2: the warm-up" if RANK == 0 else "")

    weight = keras.Variable(np.zeros(1))
    optimizer = keras.optimizers.SGD(0.5, momentum=0.5)
    optimizer.apply([tf.ones([1], tf.float64)], [weight])  # the velocity is -0.5
    rate = hvd.callbacks.LearningRateScheduleCallback(0.5, lambda epoch: 2.0)
    rate._model = type("Model", (), {"optimizer": optimizer})
    rate.on_train_batch_begin(0)
    optimizer.apply([tf.ones([1], tf.float64)])
    np.testing.assert_allclose(weight.numpy(), [-0.5 + 0.5 * 2 * -0.5 - 1.0])


@keras.saving.register_keras_serializable("tests")
class Registered(keras.optimizers.SGD):
    """An optimizer of the user's own."""


def saved() -> None:
    """Rank 0 writes whole files, of the plain optimizer; what is loaded trains on all ranks."""
    folder = DONE / "saved"
    model = distributed(net(RANK))
    fit(model, callbacks=[hvd.callbacks.ModelCheckpoint(folder / "{epoch}.keras")], epochs=2)
    session.adapter().communicator.gather(b"")
    assert sorted(path.name for path in folder.iterdir()) == ["1.keras", "2.keras"]
    plain = keras.models.load_model(folder / "2.keras")
    assert type(plain.optimizer) is keras.optimizers.SGD
    loaded = hvd.load_model(folder / "2.keras")
    assert isinstance(loaded.optimizer, keras.optimizers.SGD)
    assert int(loaded.optimizer.iterations) == 2 * STEPS
    if RANK:  # rank 0's is everyone's
        loaded.set_weights(net(RANK).get_weights())
    fit(model, epochs=3, initial_epoch=2)
    fit(loaded, epochs=3, initial_epoch=2)
    close(loaded, model)
    assert copies(loaded.get_weights()) == 1
    model.compile(hvd.DistributedOptimizer(Registered(0.2)), LOSS)
    model.save(folder / f"own-{RANK}.keras")
    own = keras.models.load_model(folder / f"own-{RANK}.keras").optimizer
    assert type(own) is Registered and reduction_of(own) is None
    often = hvd.callbacks.ModelCheckpoint(DONE / "often" / "{batch}.keras", save_freq=2)
    fit(model, callbacks=[often], epochs=1)
    session.adapter().communicator.gather(b"")
    assert [path.name for path in (DONE / "often").iterdir()] == ["2.keras"]


def resumed() -> None:
    """A training that was stopped and begun anew is one that was not, to the bit."""

    def train(folder: str, epochs: int) -> keras.Model:
        model = net(RANK, keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.3))
        optimizer = keras.optimizers.LossScaleOptimizer(sgd()) if SIZE == 2 else sgd()
        model.compile(hvd.DistributedOptimizer(optimizer), LOSS, metrics=["accuracy"])
        model.layers[0].trained_by = hvd.DistributedOptimizer(sgd())  # in an earlier training
        callbacks = [
            hvd.callbacks.BackupAndRestore(DONE / folder),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        ]
        fit(model, callbacks=callbacks, epochs=epochs, validation_data=(VAL_X, VAL_Y))
        return model

    whole = train("uncut", 4)
    train("cut", 2)
    again = train("cut", 4)
    for value, other in zip(again.get_weights(), whole.get_weights(), strict=True):
        assert value.tobytes() == other.tobytes()
    assert float(again.optimizer.learning_rate) == float(whole.optimizer.learning_rate) > 0
    # A later fit begins anew, with rank 0's statistics of now, not with those of the checkpoint.
    mean = again.layers[1].moving_mean
    before, seen = mean.numpy().tobytes(), []

    def look(batch: int, logs: Any = None) -> None:
        seen.append(mean.numpy().tobytes())

    fit(again, callbacks=[keras.callbacks.LambdaCallback(on_train_batch_begin=look)], epochs=1)
    assert len(seen) == STEPS
    assert RANK or seen[0] == before


class LeftError(Exception):
    """Instead of the exit with code 75."""


def stopped() -> None:
    """A training that a signal stops in an epoch, and is run again, is one that was not."""

    def leave() -> None:
        raise LeftError

    def train(folder: str, execution: int, stop: tuple[int, int] | None = None) -> list[bytes]:
        model = net(RANK, keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.3))
        optimizer = hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2))
        model.compile(optimizer, LOSS, metrics=["accuracy"], steps_per_execution=execution)
        epochs: list[int] = []

        def ask(batch: int, logs: Any = None) -> None:
            if RANK == SIZE - 1 and (epochs[-1], batch) == stop:
                signal.raise_signal(signal.SIGUSR1)

        callbacks = [
            hvd.callbacks.BackupAndRestore(DONE / folder),
            hvd.callbacks.MetricAverageCallback(),
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
            keras.callbacks.LambdaCallback(
                on_epoch_begin=lambda epoch, logs: epochs.append(epoch), on_train_batch_begin=ask
            ),
        ]
        fit(model, callbacks=callbacks, epochs=4, validation_data=(VAL_X, VAL_Y))
        values = [*model.get_weights(), *(each.numpy() for each in optimizer.variables)]
        return [np.asarray(value).tobytes() for value in values]

    kept, checkpoint.leave_preempted = checkpoint.leave_preempted, leave
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    # The signal comes after the batch has begun; the last one ends the training with the save.
    for execution, stops in ((1, [(0, 0), (3, 2)]), (2, [(2, 2)])):
        whole = train(f"whole-{execution}", execution)
        assert {number: signal.getsignal(number) for number in SIGNALS} == handlers
        for stop in stops:
            folder = f"cut-{execution}-{stop[0]}-{stop[1]}"
            with contextlib.suppress(LeftError):
                train(folder, execution, stop)
                raise AssertionError("it was not stopped")
            for number, handler in handlers.items():
                signal.signal(number, handler)
            session.adapter().stop_wanted = False
            assert train(folder, execution) == whole, (execution, stop)
    checkpoint.leave_preempted = kept


def a_disk_that_fails() -> None:
    """The training continues after a save that failed, and tries again."""
    hindrance = DONE / "hindrance"
    hindrance.touch()

    def mend(epoch: int, logs: Any = None) -> None:
        if epoch == 2 and RANK == 0:
            hindrance.unlink()

    model = distributed(net(RANK))
    backup = hvd.callbacks.BackupAndRestore(hindrance / "saved")
    mending = keras.callbacks.LambdaCallback(on_epoch_begin=mend)
    fit(model, callbacks=[backup, mending], epochs=4)
    if RANK == 0:
        names = sorted(path.name for path in backup.backup_dir.iterdir())
        assert names == ["step-000000003", "step-000000004"]


def left_out() -> None:
    """An epoch goes on after what is done of it, in samples or, of other data, in batches."""
    some = SAMPLES - 2
    train = hvd.shard((X[:some], Y[:some]), global_batch=4, seed=SEED)
    shards.begin_epoch(1)
    assert shards.begin_at(some, BATCH) == 2  # batches of 4 that are left out
    assert shards.begin_at(some + 1, BATCH) is None
    for epoch, done in ((1, BATCH), (2, 0)):
        parts = [x for x, _ in train.as_numpy_iterator()]
        assert len(parts) == -(-some // 4)
        gathered = session.adapter().communicator.gather(np.concatenate(parts).tobytes())
        rows = sorted(np.frombuffer(b"".join(gathered)).reshape(-1, 5).tolist())
        assert rows == sorted(X[permutation(some, SEED, epoch)[done:]].tolist())
    goes_on(1, batch=2, before=2 * STEPS, done=1)  # batches that grow with the ranks
    goes_on(2, batch=1, before=STEPS, done=1)  # that do not
    goes_on(1, batch=2 * STEPS, before=None, done=4 * STEPS)  # not known: more than there are


def goes_on(execution: int, *, batch: int, before: int | None, done: int) -> None:
    """Go on where twice as many ranks were stopped, in the second of three epochs.

    Args:
        execution: steps of an execution.
        batch: batches of the epoch that were done.
        before: steps that the epoch had; None: not known.
        done: batches that are not trained on.
    """
    model = distributed(net(RANK), steps_per_execution=execution)
    trained: list[float] = []  # losses; the other batches have the saved one
    updates: list[int] = []  # after each epoch

    def count(batch: int, logs: Any = None) -> None:
        trained.extend({logs["loss"]} - {7.0})
        assert (int(model.optimizer.iterations) == 0) == (not trained)

    def end(epoch: int, logs: Any = None) -> None:
        updates.append(int(model.optimizer.iterations))

    of_epoch = {"batch": batch, "steps": before, "drawn": None, "logs": {"loss": 7.0}}
    state = {"step": 1, "world_size": 2 * SIZE, "learning_rate": None, "of_epoch": of_epoch}
    kept, checkpoint.restore = checkpoint.restore, lambda *_: state
    callbacks = [
        hvd.callbacks.BackupAndRestore(DONE / f"goes-on-{execution}-{before}"),
        keras.callbacks.LambdaCallback(on_train_batch_end=count, on_epoch_end=end),
    ]
    data = tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH)
    if before is None:
        data = data.filter(lambda *_: tf.constant(True))
    fit(model, data=data, epochs=3, callbacks=callbacks)
    checkpoint.restore = kept
    left = min(done, STEPS)
    if before:  # where the end of the data comes as a surprise, Keras counts an update more
        assert updates == [STEPS - left, 2 * STEPS - left]
    else:
        assert len(trained) == 2 * STEPS - left
    assert copies(model.get_weights()) == 1


class Pair(keras.Model):
    """Two nets with an optimizer each, and a train step of their own, as of a GAN."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.nets = [net(seed), net(seed + 1)]
        self.seen = keras.metrics.Mean("seen")

    def compile(self, *optimizers: Any, **options: Any) -> None:
        super().compile(**options)
        self.both = list(optimizers)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        for model, optimizer in zip(self.nets, self.both, strict=True):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(
                    keras.losses.sparse_categorical_crossentropy(y, model(x), from_logits=True)
                )
            optimizer.apply(
                tape.gradient(loss, model.trainable_variables), model.trainable_variables
            )
        self.seen.update_state(loss)
        return {"seen": self.seen.result(), **({"last": loss} if self.raw else {})}

    raw = False  # whether it also returns the loss itself


def optimizers() -> None:
    """A train step with several optimizers weighs their gradients and losses by samples."""
    for raw in (False, True):
        single, mine = Pair(0), Pair(RANK)
        single.raw = mine.raw = raw
        kinds = (sgd, lambda: keras.optimizers.Adam(0.1))
        several = [hvd.DistributedOptimizer(kind()) for kind in kinds]
        single.compile(*(kind() for kind in kinds), run_eagerly=True)
        mine.compile(*several, run_eagerly=raw)
        data = global_batches(X, Y, BATCH, SEED)
        expected = single.fit(data, epochs=EPOCHS, verbose=0).history
        result = fit(mine, callbacks=[hvd.callbacks.MetricAverageCallback()]).history
        close(mine, single)
        assert copies(mine.get_weights()) == 1
        assert expected.keys() == result.keys()
        for name, values in expected.items():
            np.testing.assert_allclose(result[name], values, rtol=1e-9, err_msg=name)
    if SIZE == 1:
        return
    hidden, mine = hvd.DistributedOptimizer(sgd()), Pair(RANK)
    mine.train_step = lambda data: hidden.apply(
        [tf.zeros_like(value) for value in mine.trainable_variables], mine.trainable_variables
    )
    mine.compile()
    expect_error(lambda: fit(mine), "attribute of the model")
    mine.compile(several[0], several[1])
    backup = hvd.callbacks.BackupAndRestore(DONE / "several")
    expect_error(lambda: fit(mine, callbacks=[backup]), "several optimizers")


class Sum(keras.Model):
    """A model with named inputs, built by its first step."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.net = net(seed, begin=False)

    def call(self, inputs: dict[str, Any]) -> Any:
        return self.net(inputs["a"] + inputs["b"])


def inputs() -> None:
    whole = global_batches(X, Y, BATCH, SEED).map(lambda x, y: ({"a": x, "b": x}, y))
    parts = hvd.shard(({"a": X, "b": X}, Y), global_batch=BATCH, seed=SEED)
    compare(Sum(0), distributed(Sum(RANK)), whole, parts)


def sparse() -> None:
    """Inputs may be sparse, also where a rank has none."""

    def model(seed: int, *, sparse: bool) -> keras.Model:
        keras.utils.set_random_seed(seed)
        return keras.Sequential([keras.Input((5,), sparse=sparse), keras.layers.Dense(3)])

    parts = hvd.shard((X, Y), global_batch=BATCH, seed=SEED)
    parts = parts.map(lambda x, y: (tf.sparse.from_dense(x), y))
    for eager in (False, True):
        mine = distributed(model(RANK, sparse=True), run_eagerly=eager)
        compare(model(0, sparse=False), mine, parts=parts)


def outputs() -> None:
    """The logs have the loss of each output, too."""

    def model(seed: int) -> keras.Model:
        keras.utils.set_random_seed(seed)
        start = keras.Input((5,))
        middle = keras.layers.Dense(7, "tanh", name="middle")(start)
        ends = {name: keras.layers.Dense(3, name=name)(middle) for name in ("one", "other")}
        return keras.Model(start, ends)

    labels = {"one": Y, "other": Y[::-1].copy()}
    single, mine = model(0), distributed(model(RANK), {"one": LOSS, "other": LOSS})
    single.compile(sgd(), {"one": LOSS, "other": LOSS})
    order = global_batches(X, np.arange(SAMPLES), BATCH, SEED)
    data = order.map(lambda x, i: (x, {n: tf.gather(y, i) for n, y in labels.items()}))
    val = (VAL_X, {"one": VAL_Y, "other": VAL_Y[::-1]})
    expected = single.fit(data, validation_data=val, epochs=EPOCHS, verbose=0).history
    local = slice(RANK, None, SIZE)
    result = fit(
        mine,
        data=hvd.shard((X, labels), global_batch=BATCH, seed=SEED),
        validation_data=tf.nest.map_structure(lambda array: array[local], val),
        callbacks=[hvd.callbacks.MetricAverageCallback()],
    ).history
    names = {"loss", "one_loss", "other_loss"}
    assert set(expected) == set(result) == names | {f"val_{name}" for name in names}
    for name, values in expected.items():
        np.testing.assert_allclose(result[name], values, rtol=1e-9, err_msg=name)


def evaluated() -> None:
    """``evaluate`` with the callback is over all ranks; without it local, after a failure, too."""
    model = net(0)
    average = hvd.callbacks.MetricAverageCallback()
    model.compile(hvd.DistributedOptimizer(sgd()), LOSS, metrics=["accuracy"])
    expected = model.evaluate(X, Y, verbose=0)
    mine = slice(RANK, None, SIZE)
    result = model.evaluate(X[mine], Y[mine], callbacks=[average], verbose=0)
    np.testing.assert_allclose(result, expected, rtol=1e-6)
    assert copies([np.asarray(model.evaluate(X[mine], Y[mine], verbose=0))]) == SIZE

    def fail(batch: int, logs: Any = None) -> None:
        raise KeyError(batch)

    failing = keras.callbacks.LambdaCallback(on_train_batch_end=fail)
    with contextlib.suppress(KeyError):
        fit(model, callbacks=[average, failing])
    if RANK == 0:  # waits for nobody
        model.evaluate(X, Y, verbose=0)


def stops() -> None:
    """A callback that stops the training on one rank stops all after the same batch or epoch."""

    class Limit(keras.callbacks.Callback):
        """Stops on the last rank, after a batch or an epoch."""

        def __init__(self, epoch: int, batch: int | None) -> None:
            super().__init__()
            self.end, self.batches = (epoch, batch), 0

        def stop(self, batch: int | None) -> None:
            self.model.stop_training |= RANK == SIZE - 1 and (self.epoch, batch) == self.end

        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.batches += 1
            self.stop(batch)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.stop(None)

    class Noted(keras.callbacks.History):
        """A history of the user's own, which has an effect, too."""

        ended = 0

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            super().on_epoch_end(epoch, logs)
            self.ended += 1

    average = hvd.callbacks.MetricAverageCallback
    model = net(RANK)
    for execution, end, epochs, batches in (
        (1, (1, 0), 2, STEPS + 2),  # the wish reaches the others with the next batch
        (1, (1, STEPS - 1), 2, 2 * STEPS),  # or at the end of the epoch
        (1, (0, None), 1, STEPS),
        (2, (0, 1), 1, 2),
    ):
        for callbacks in ([], [average()]):
            distributed(model, steps_per_execution=execution)
            limit, history = Limit(*end), Noted()
            fit(model, callbacks=[*callbacks, limit, history], epochs=4)
            if SIZE > 1:
                done = len(history.epoch), history.ended, limit.batches
                assert done == (epochs, epochs, batches), end
            assert type(history) is Noted and type(fit(model, epochs=1)) is keras.callbacks.History
    # One that all ranks have, and that sees a loss of its rank alone.
    x = X.copy()
    x[permutation(SAMPLES, SEED, 0)[BATCH - 1]] = np.nan  # the last rank's, in the first batch
    distributed(model)
    data = hvd.shard((x, Y), global_batch=BATCH, seed=SEED)
    with contextlib.redirect_stdout(io.StringIO()):
        fit(model, data=data, callbacks=[keras.callbacks.TerminateOnNaN()])
    assert int(model.optimizer.iterations) == (1 if SIZE == 1 else 2)


class Largest(keras.metrics.Metric):
    """A metric whose state is no sum."""

    def __init__(self) -> None:
        super().__init__(name="largest")
        self.value = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y: Any, output: Any, sample_weight: Any = None) -> None:
        self.value.assign(tf.maximum(self.value, tf.cast(tf.reduce_max(y), self.value.dtype)))

    def result(self) -> Any:
        return 1.0 * self.value


class Total(keras.metrics.Sum):
    """A metric of the user's own whose state is a sum."""

    def update_state(self, y: Any, output: Any, sample_weight: Any = None) -> None:
        super().update_state(y)


def other_metrics() -> None:
    """Of a metric whose state is no sum, the mean over the ranks, weighted by samples."""
    y = np.arange(8)
    local = [y[rank::SIZE] for rank in range(SIZE)]
    mean = sum(len(part) * part.max() for part in local) / 8
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    distributed(model, "mse", metrics=[Largest(), Total()])
    with warnings_of("hvdtrain.keras.callbacks") as noted:
        average = hvd.callbacks.MetricAverageCallback()
        for _ in range(2):
            result = model.evaluate(
                local[RANK][:, None], local[RANK], callbacks=[average], return_dict=True, verbose=0
            )
    np.testing.assert_allclose(result["largest"], mean)
    np.testing.assert_allclose(result["sum"], y.sum())
    assert len(noted) == (SIZE > 1 and RANK == 0), noted
    assert all("for largest. If its state is a sum" in text for text in noted)


@contextlib.contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    noted: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: noted.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger(name).addHandler(handler)
    yield noted
    logging.getLogger(name).removeHandler(handler)


def best() -> None:
    """What was the best before a restart is so after it."""
    file = DONE / "best.keras"
    for epochs in (2, 4):  # the second time it gets worse
        model = distributed(net(0))
        worse = keras.callbacks.LearningRateScheduler(lambda epoch: 0.01 if epoch < 2 else 50.0)
        callbacks = [
            hvd.callbacks.BackupAndRestore(DONE / "best"),
            hvd.callbacks.BestModelCheckpoint("loss", filepath=file),
            hvd.callbacks.MetricAverageCallback(),
            worse,
        ]
        fit(model, callbacks=callbacks, epochs=epochs)
        session.adapter().communicator.gather(b"")
        if epochs == 2:
            kept = file.read_bytes()
    assert file.read_bytes() == kept


class Idle(keras.layers.Layer):
    """A layer with a weight that it does not use."""

    def build(self, shape: Any) -> None:
        self.idle = self.add_weight(name="idle", shape=(2,))

    def call(self, inputs: Any) -> Any:
        return inputs


def idle() -> None:
    """A weight without gradients stays as it is, also next to an empty part."""
    both(lambda: sgd(weight_decay=0.1), model=lambda seed: net(seed, Idle), run_eagerly=True)


WAYS = (
    *(plain, optimizers, inputs, sparse, outputs, evaluated, idle, built_late, datasets, settings),
    *(callbacks, overflow, statistics, own_loop, removed, released, guard, stand_ins, stops),
    *(other_metrics, best, rates, saved, resumed, stopped, left_out, a_disk_that_fails),
)
for way in WAYS:
    if {way.__name__, "all"} & WANTED:
        way()
Path(DONE, f"{RANK}-of-{SIZE}").touch()
