"""Started by test_elastic_horovod.py under ``hvdtrain launch --elastic``, mpirun, or alone.

However many ranks are lost, and whatever the number of ranks, the weights at the end are those of
one process that has trained on each batch once (fp64, to 1e-9). ``--relative`` counts the epochs as
Horovod's examples do.
"""

from __future__ import annotations

import argparse
import signal
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np

import hvdtrain.keras as hvd
from hvdtrain.adapters.preemption import SIGNALS
from tests.parallel.keras_parts import LOSS, close, copies, draw, global_batches, net

SAMPLES, BATCH, SEED, RATE = 50, 8, 3, 0.05
parser = argparse.ArgumentParser()
parser.add_argument("--directory", type=Path)
parser.add_argument("--done", type=Path, required=True)
parser.add_argument("--epochs", type=int, default=4)
parser.add_argument("--pause", type=float, default=0.0, help="seconds before each batch")
parser.add_argument("--every", type=int, default=2, help="batches between two commits")
parser.add_argument("--relative", action="store_true")
options = parser.parse_args()
hvd.init()
X, Y = draw(np.random.default_rng(0), SAMPLES)


def sgd() -> Any:
    return keras.optimizers.SGD(RATE, momentum=0.9)


def falling(epoch: float) -> float:
    return float(0.9 ** int(epoch))


class Slow(keras.callbacks.Callback):
    """Time to be killed in."""

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        time.sleep(options.pause)


class OneProcess(keras.callbacks.Callback):
    """The learning rates of the whole training, for one process."""

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        hvd.callbacks.set_learning_rate(self.model.optimizer, RATE * falling(epoch))


def one_process() -> keras.Model:
    data = global_batches(X, Y, BATCH, SEED)
    model = net(0)
    model.compile(sgd(), LOSS)
    model.fit(data, epochs=options.epochs, callbacks=[OneProcess()], verbose=0)
    return model


@hvd.elastic.run
def train(state: Any) -> None:
    print(f"begin at epoch {state.epoch}, batch {state.batch}, {hvd.size()} ranks", flush=True)
    left = {"epochs": options.epochs - state.epoch}
    if not options.relative:
        left = {"epochs": options.epochs, "initial_epoch": state.epoch}
    callbacks = [
        hvd.elastic.CommitStateCallback(state, batches_per_commit=options.every),
        hvd.callbacks.LearningRateScheduleCallback(RATE, falling),
        hvd.elastic.UpdateBatchStateCallback(state),
        hvd.elastic.UpdateEpochStateCallback(state),
        hvd.callbacks.MetricAverageCallback(),
        Slow(),
    ]
    data = hvd.shard((X, Y), global_batch=BATCH, seed=SEED)
    state.model.fit(data, callbacks=callbacks, verbose=0, **left)


by_default = [signal.getsignal(number) for number in SIGNALS]
model = net(hvd.rank())
model.compile(hvd.DistributedOptimizer(sgd()), LOSS, metrics=["accuracy"])
where = {"directory": options.directory} if options.directory else {}
state = hvd.elastic.KerasState(model, batch=0, epoch=0, **where)
if options.directory:  # a signal is heard before the training has begun
    signal.raise_signal(signal.SIGUSR1)
    assert state._preemption.reason == "SIGUSR1"
    state._preemption.reason = ""
train(state)
assert [signal.getsignal(number) for number in SIGNALS] == by_default
assert (state.epoch, state.batch) == (options.epochs, 0)
assert copies(model.get_weights()) == 1
if hvd.rank() == 0:
    close(model, one_process())
    options.done.touch()
