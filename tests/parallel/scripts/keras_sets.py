"""Run on every rank by test_keras.py: each process set trains a model as one process would.

Each set has data, a seed and a number of epochs of its own, so that the last one trains long after
the others are done. In fp64 its model, metrics and learning rates are those of plain Keras in one
process on the data of the set, to 1e-9, and the model is equal on its ranks to the bit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import hvdtrain.keras as hvd
from hvdtrain.keras import session
from tests.parallel.expect import expect_error
from tests.parallel.keras_parts import LOSS, close, copies, draw, global_batches, net

DONE, RANKS, WHEN = Path(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
SAMPLES, BATCH = 17, 8  # at the tail one rank has a sample, the others have none
STEPS = -(-SAMPLES // BATCH)


expect_error(lambda: hvd.init(process_sets=[hvd.ProcessSet([0, 9])]), "ranks [0, 9]: there are")
all_ranks = hvd.ProcessSet(range(sum(map(len, RANKS))))
expect_error(lambda: hvd.init(process_sets=[all_ranks]), "is hvd.global_process_set")
expect_error(lambda: hvd.init(process_sets=[[0]]), "hvd.ProcessSet([0, 1])")
twice = [hvd.ProcessSet([0]), hvd.ProcessSet([0])]
expect_error(lambda: hvd.init(process_sets=twice), "[0] exists twice")
if WHEN == "start":
    SETS = [hvd.ProcessSet(ranks) for ranks in RANKS]
    hvd.init(process_sets=SETS)
    words = "HOROVOD_DYNAMIC_PROCESS_SETS=1", "process_sets='dynamic'"
    if len(RANKS[0]) > 1:
        expect_error(lambda: hvd.add_process_set([0]), *words)
else:
    hvd.init(process_sets="dynamic")
    gone = hvd.add_process_set([0])
    assert hvd.remove_process_set(gone) and not hvd.remove_process_set(gone)
    SETS = [hvd.add_process_set(ranks) for ranks in RANKS]
    expect_error(lambda: hvd.add_process_set([0, 9]), "there are")
NUMBER, MINE = next((n, ranks) for n, ranks in enumerate(SETS) if ranks.included())
OTHER = SETS[NUMBER - 1]
assert (MINE.ranks, MINE.size()) == (RANKS[NUMBER], len(RANKS[NUMBER]))
assert MINE.ranks[MINE.rank()] == hvd.rank()
SEED, EPOCHS = 5 + NUMBER, 3 + 2 * NUMBER
generator = np.random.default_rng(NUMBER)
(X, Y), (VAL_X, VAL_Y) = draw(generator, SAMPLES), draw(generator, 7)
RATE = 0.05


class OneProcess(keras.callbacks.Callback):
    """The warm-up of the set, for one process."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        size, done = len(MINE.ranks), (self.epoch + (batch + 1) / STEPS) / 2
        if done <= 1:
            old, new = float(self.model.optimizer.learning_rate), RATE * (1 + done * (size - 1))
            self.model.optimizer.learning_rate = new
            for velocity in self.model.optimizer.momentums:
                velocity.assign(velocity.value * (new / old))


def sgd() -> Any:
    return keras.optimizers.SGD(RATE * len(MINE.ranks), momentum=0.9)


def one_process() -> tuple[keras.Model, list[float]]:
    data = global_batches(X, Y, BATCH, SEED)
    model = net(100 * NUMBER)
    model.compile(sgd(), LOSS, metrics=["accuracy"])
    model.optimizer.build(model.trainable_variables)
    options = {"epochs": EPOCHS, "validation_data": (VAL_X, VAL_Y), "verbose": 0}
    return model, model.fit(data, callbacks=[OneProcess()], **options).history["val_loss"]


def of_the_set(folder: str, epochs: int = EPOCHS) -> tuple[keras.Model, list[float]]:
    model = net(100 * NUMBER + MINE.rank())  # other weights on each rank
    model.compile(hvd.DistributedOptimizer(sgd(), process_set=MINE), LOSS, metrics=["accuracy"])
    local = slice(MINE.rank(), None, MINE.size())
    result = model.fit(
        hvd.shard((X, Y), global_batch=BATCH, seed=SEED, process_set=MINE),
        epochs=epochs,
        validation_data=(VAL_X[local], VAL_Y[local]),
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(MINE.ranks[0]),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(RATE * MINE.size(), warmup_epochs=2),
            hvd.callbacks.BackupAndRestore(DONE / f"{folder}-{NUMBER}"),
            hvd.callbacks.ModelCheckpoint(DONE / f"{folder}-{NUMBER}" / "{epoch}.keras"),
        ],
        verbose=0,
    )
    return model, result.history["val_loss"]


expected, losses = one_process()
model, result = of_the_set("uncut")
close(model, expected)
np.testing.assert_allclose(result, losses, rtol=1e-6)  # metrics are float32
assert copies(model.get_weights(), MINE) == 1
saved = [path.name for path in (DONE / f"uncut-{NUMBER}").glob("*.keras")]
assert sorted(saved) == [f"{epoch + 1}.keras" for epoch in range(EPOCHS)]
of_the_set("cut", EPOCHS - 1)
again, _ = of_the_set("cut")
close(again, expected)

last = net(hvd.rank())  # all ranks together, besides
last.compile(hvd.DistributedOptimizer(sgd()), LOSS)
data = hvd.shard((X, Y), global_batch=BATCH, process_set=hvd.global_process_set)
last.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=0)
assert copies(last.get_weights()) == 1

theirs = hvd.callbacks.BackupAndRestore(DONE / f"uncut-{1 - NUMBER}")
theirs.set_model(model)
expect_error(theirs.on_train_begin, f"ranks {MINE.ranks}: ", "another process set's")

if len(MINE.ranks) > 1:
    layer = net(MINE.rank())
    partial = hvd.PartialDistributedOptimizer(
        sgd(), local_layers=layer.layers[-1], process_set=MINE
    )
    layer.compile(partial, LOSS)
    data = hvd.shard((X, Y), global_batch=BATCH, process_set=MINE)
    layer.fit(data, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)], verbose=0)
    for kept, number in ((layer.layers[0], 1), (layer.layers[1], len(MINE.ranks))):
        assert copies([kept.kernel.numpy()], MINE) == number
    np.testing.assert_array_equal(
        hvd.allreduce(tf.ones(2), op=hvd.Sum, process_set=MINE), [len(MINE.ranks)] * 2
    )
expect_error(lambda: hvd.shard((X, Y), global_batch=8), "process_set=", "hvd.global_process_set")
expect_error(lambda: hvd.DistributedOptimizer(sgd(), process_set=OTHER), "process_set.included()")
expect_error(lambda: hvd.DistributedOptimizer(sgd(), process_set=twice[0]), "is unknown")
Path(DONE, f"{hvd.rank()}-of-{hvd.size()}").touch()
if NUMBER == 0:  # a rank that fails waits for nobody, while another one waits for it
    while len(list(DONE.glob("*-of-*"))) < hvd.size():
        time.sleep(0.1)
    if MINE.rank() == 1:
        (exit if WHEN == "start" else sys.exit)(7)
    session.adapter(MINE).communicator.gather(b"")
