"""Run on every rank by test_keras.py, which stops it; run again, it continues where it was.

Each rank writes the bytes of its model and optimizer at the end. With ``--exact`` nothing in it
depends on the number of ranks, and rank 0 compares it with plain Keras in one process (fp64, to
1e-9).
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from tests.parallel.keras_parts import LOSS, close, copies, draw, global_batches, net

SAMPLES, BATCH, SEED = 50, 8, 3
parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--epochs", type=int, required=True)
parser.add_argument("--pause", type=float, default=0.0, help="seconds before each batch")
parser.add_argument("--wait", type=int, help="batch of the second epoch to wait for a file before")
parser.add_argument("--exact", action="store_true")
options = parser.parse_args()
hvd.init()
X, Y = draw(np.random.default_rng(0), SAMPLES)


class Slow(keras.callbacks.Callback):
    """Time to be stopped in."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(options.pause)
        if (self.epoch, batch) == (1, options.wait):
            Path(options.folder, f"ready-{hvd.rank()}").touch()
            while not Path(options.folder, "go").exists():
                time.sleep(0.05)


def built(seed: int) -> keras.Model:
    if options.exact:
        return net(seed)
    return net(seed, keras.layers.BatchNormalization, lambda: keras.layers.Dropout(0.3))


def adam() -> Any:
    return keras.optimizers.Adam(0.01)


def falling(epoch: int, rate: float) -> float:
    return rate * 0.97


model = built(hvd.rank())
optimizer = hvd.DistributedOptimizer(adam())
model.compile(optimizer, LOSS, metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BackupAndRestore(options.folder / "checkpoints"),
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    *([] if options.exact else [keras.callbacks.LearningRateScheduler(falling)]),
    Slow(),
]
data = hvd.shard((X, Y), global_batch=BATCH, seed=SEED)
model.fit(data, epochs=options.epochs, callbacks=callbacks, shuffle=False, verbose=0)
assert copies(value.numpy() for value in model.trainable_variables) == 1
if options.exact and hvd.rank() == 0:
    single = net(0)
    single.compile(adam(), LOSS)
    single.fit(global_batches(X, Y, BATCH, SEED), epochs=options.epochs, verbose=0)
    close(model, single)
values = [*model.get_weights(), *(variable.numpy() for variable in optimizer.variables)]
state = b"".join(np.asarray(value).tobytes() for value in values)
Path(options.folder, f"{hvd.rank()}-of-{hvd.size()}").write_bytes(state)
