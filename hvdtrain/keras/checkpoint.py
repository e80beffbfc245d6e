"""Step 7 for Keras: atomic files of one writer, and exact resumption of a training.

The callbacks have Keras's names; ``callbacks.py`` re-exports them.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NoReturn

import keras
import numpy as np
from typing_extensions import override

from hvdtrain.adapters.base import JsonValues
from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.framework import UNKNOWN, Flags
from hvdtrain.adapters.preemption import Preemption
from hvdtrain.adapters.save import Save
from hvdtrain.errors import CheckpointError, HvdtrainError, UsageError
from hvdtrain.keras import data as shards
from hvdtrain.keras.data import EpochProgress, Logs
from hvdtrain.keras.model import (
    ModelCallback,
    first_sum,
    is_built,
    learning_rate,
    note_samples,
    step_sum,
    step_sums,
)
from hvdtrain.steps.checkpoint_files import DAMAGE, flush
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.exit import agreed, leave_preempted, process_status

_checkpoints: weakref.WeakSet[ModelCheckpoint] = weakref.WeakSet()


class WholeFiles:
    """A model that saves its files atomically."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def save(self, filepath: Any, **options: Any) -> None:
        """Save the model, as ``keras.Model.save`` does."""
        _whole(Path(filepath), lambda file: self._model.save(file, **options))

    def save_weights(self, filepath: Any, **options: Any) -> None:
        """Save the weights, as ``keras.Model.save_weights`` does."""
        _whole(Path(filepath), lambda file: self._model.save_weights(file, **options))


def _whole(path: Path, write: Callable[[Path], None]) -> None:
    # Others cannot put a link into the folder, which Keras would follow.
    with TemporaryDirectory(prefix=".", dir=path.parent, ignore_cleanup_errors=True) as folder:
        partial = Path(folder, path.name)  # the suffix determines Keras's format
        write(partial)
        flush(partial)
        partial.replace(path)
    flush(path.parent)


class ModelCheckpoint(ModelCallback, keras.callbacks.ModelCheckpoint):
    """Save the model as ``keras.callbacks.ModelCheckpoint`` does, on rank 0, atomically.

    Pass it to ``fit`` on every rank. The ranks wait for the file at the end of an epoch; if rank 0
    cannot write it, all raise ``CheckpointError``. The saved running statistics of BatchNorm are
    the mean over all ranks. With a ``save_freq`` in batches rank 0 saves its local ones, no other
    rank waits, and an ``OSError`` is raised on rank 0 only.
    """

    @override
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._trained, self._model = model, WholeFiles(model)
        _checkpoints.add(self)
        self._writes = self.adapter.world.is_writer

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if self._writes:
            super().on_train_batch_end(batch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        adapter, save = self.adapter, super().on_epoch_end
        note_samples(first_sum(self._trained))

        def write() -> None:
            try:
                save(epoch, logs)
            except OSError as error:
                raise CheckpointError(
                    f"ModelCheckpoint: {self.filepath} could not be written: {error}"
                ) from error

        with adapter.waits.during("ModelCheckpoint"), adapter.averaged_buffers(self._trained):
            adapter.communicator.on_root(write)


class BestModelCheckpoint(ModelCheckpoint):
    """Save the best model by ``monitor``, on rank 0; by default in ``best.keras``.

    The options are those of Keras; of weights alone the file is ``best.weights.h5``.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | Path | None = None,
    ) -> None:
        super().__init__(
            filepath or ("best.weights.h5" if save_weights_only else "best.keras"),
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )


class BackupAndRestore(ModelCallback):
    """Save the training after each epoch, in the background, and resume it when it is run again.

    On SIGTERM, SIGINT, SIGUSR1, SIGUSR2 or SIGURG on any rank, and near the job's walltime, all
    ranks complete the current batch, or the validation after it, save, and exit with code 75. Run
    again, ``fit`` continues with the next batch; the metrics of that epoch cover only its rest.

    Weights, optimizer, learning rate, each rank's running statistics and the states of its random
    generators are those of an uninterrupted training; with ``shard``, so is the order of the
    samples, each of which is trained on once per epoch. On another number of ranks statistics and
    generators are reset. The counters of ``EarlyStopping`` and ``ReduceLROnPlateau`` are not saved.

    Pass it to ``fit`` on every rank. A failed write is a warning, and the next epoch tries again.

    Args:
        backup_dir: directory of the checkpoints, in which rank 0 reads and writes. Unlike that of
            Keras's callback it remains at the end: ``fit`` then trains no further. Remove it to
            train anew.
        keep: number of recent checkpoints to keep.

    Raises:
        UsageError: ``fit`` raises it on every rank, if ``backup_dir`` contains checkpoints of
            another model.
        HvdtrainError: ``fit`` raises it on every rank, if the model is not built.
        CheckpointError: ``fit`` raises it on every rank, if the last checkpoint of the training
            could not be written.
    """

    def __init__(self, backup_dir: str | Path, keep: int = 3) -> None:
        super().__init__()
        self.backup_dir, self.keep = Path(backup_dir), keep
        self._progress = EpochProgress(None, None)
        self._pending: Save | None = None
        self._began = 0.0  # of the pending save, by ``time.monotonic``

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        model, adapter = self.model, self.adapter
        if not is_built(model):
            raise HvdtrainError(
                "BackupAndRestore: the model has no weights yet to restore: start it with "
                "keras.Input(shape), or call model.build(shape)"
            )
        self._progress.end()  # that of a fit that failed
        adapter.read_flags = self._read_flags if step_sum(model.optimizer) else None
        state = restore(adapter, self.backup_dir, model, model.optimizer)
        for name, callback in _best_only(model).items():
            callback.best = (state or {}).get("best", {}).get(name, callback.best)
        if state:
            model._initial_epoch = int(state["step"])  # read by fit after this call
        self._epochs = model._initial_epoch or 0  # completed
        self._progress = EpochProgress(model, None)
        self._saved = (self._epochs, 0)  # epochs and batches of the newest checkpoint
        self._restored = state if state and state.get("of_epoch") else None
        self._rate: float | None = None  # of the epoch that is resumed
        self._sent: Flags | None = None
        self._stops = False  # agreed by all ranks
        self._ended_at: float | None = None  # of the last batch
        self._longest = 0.0  # seconds from the end of a batch to that of the next one
        self._preemption.listen()
        self._preemption.watch()

    @functools.cached_property  # the same after a ``fit`` that failed: it handles the signals
    def _preemption(self) -> Preemption:
        return Preemption(self.adapter.communicator, self._want_stop)

    def _read_flags(self) -> Flags:
        reduction = step_sum(self.model.optimizer)
        return reduction.buckets.flags if reduction else UNKNOWN

    def _want_stop(self) -> None:
        self.adapter.stop_wanted = True  # it reaches the other ranks with the gradients

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        # Not earlier: all callbacks have handled the end of the previous epoch only now.
        if self._stops:
            self._stop()
        self._save()
        super().on_epoch_begin(epoch, logs)
        self._epochs = epoch
        self._progress = EpochProgress(self.model, self.params.get("steps"))
        state, self._restored = self._restored, None
        if state:
            self._progress.resume(state, self.adapter.world.size)
            self._saved = (epoch, self._progress.batch)
            if state["world_size"] == self.adapter.world.size:
                self._rate = state["learning_rate"]

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._progress.end()
        self._epochs = epoch + 1

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        stops = bool(self._preemption.agree()[0])
        self._save()
        if self._pending:
            self._pending.result()
        self._pending = self.adapter.read_flags = None  # the latter would keep the model
        self.model._initial_epoch = None  # it would also apply to a later fit
        if stops:
            self._stop()
        self._preemption.ignore()

    @override
    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        # Not earlier: all callbacks have handled the end of the previous batch only now.
        if self._stops:
            self._stop()
        self._preemption.watch_walltime(self._longest)
        reduction, flags = step_sum(self.model.optimizer), self.adapter.flags
        if reduction and flags != self._sent:
            self._sent = flags
            reduction.buckets.send(flags)

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if batch < shards.left_out():
            if self._rate is not None:  # a callback may have changed it as the epoch began
                self.model.optimizer.learning_rate = self._rate
            return
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._ended_at or now))
        self._ended_at = now
        self._progress.note(batch, logs)
        if self.adapter.read_flags:
            self._stops = self.adapter.flags_agreed.stop
        else:
            self._stops = bool(self._preemption.agree()[0])
        if self._pending and self._pending.poll():
            self._settle()

    def _settle(self) -> None:
        """Complete the pending save."""
        if self._pending:
            self._pending.settle()
            self._preemption.walltime.saved(time.monotonic() - self._began)
        self._pending = None

    def _save(self, *, wait: bool = False) -> None:
        """Save, unless the newest checkpoint is the same."""
        mark = (self._epochs, self._progress.batch)
        if mark == self._saved:
            return
        self._saved = mark
        self._settle()
        self._began = time.monotonic()
        best = [pair for pair in _best_only(self.model).items() if pair[1].best is not None]
        with self.adapter.waits.during("BackupAndRestore"):
            saved = save(
                self.adapter,
                self.backup_dir,
                self.model,
                self.model.optimizer,
                keep=self.keep,
                step=self._epochs,
                of_epoch=self._progress.values(),
                best={name: each.best for name, each in best if np.isfinite(each.best)},
                wait=wait,
            )
        if wait:
            return
        self._pending = saved

    def _stop(self) -> NoReturn:
        """Save, and exit with code 75; all ranks call it."""
        reason, rank = self._preemption.agree()  # before the save: mpirun may end a rank after it
        self._settle()
        self._save(wait=True)
        done, batch = f"after {plural(self._epochs, 'epoch')}", self._progress.batch
        if batch:
            done = f"in epoch {self._epochs + 1} after batch {batch}"
        text = f"stopped {done}, saved {process_status.checkpoint}"
        self._preemption.announce(reason, rank, text)
        leave_preempted()


def save(
    adapter: CommonAdapter,
    directory: Path,
    model: Any,
    optimizer: Any,
    *,
    keep: int,
    wait: bool = True,
    **state: Any,
) -> Any:
    """Write a checkpoint of the training, as ``Adapter.save_checkpoint`` does.

    Among the JSON values of ``state`` is ``step``, a growing number.
    """
    note_samples(step_sum(optimizer))
    mine = [seed.numpy().tolist() for seed in _seeds(model)]
    state["seeds"] = adapter.communicator.gather_json(mine)
    state["learning_rate"] = learning_rate(optimizer)
    return adapter.save_checkpoint(directory, model, optimizer, state=state, keep=keep, wait=wait)


def restore(
    adapter: CommonAdapter, directory: Path, model: Any, optimizer: Any
) -> JsonValues | None:
    """Load the newest checkpoint, or send rank 0's state; all ranks must call it.

    Returns the saved ``state``; None if there is no checkpoint.

    Raises:
        UsageError: on every rank: the directory is of another training; the model has several
            optimizers.
    """
    reduction = step_sum(optimizer)
    if set(step_sums(model)) - {reduction}:
        raise UsageError(
            "the model has several optimizers, of which a checkpoint would hold only the compiled "
            "one: save it by ModelCheckpoint"
        )
    state = adapter.resume(directory, model, optimizer)
    if state is None:
        return None
    try:
        rate, seeds = state["learning_rate"], state["seeds"]
        if rate is not None:
            optimizer.learning_rate = float(rate)
        if len(seeds) == adapter.world.size:
            for variable, value in zip(_seeds(model), seeds[adapter.world.rank], strict=True):
                variable.assign(np.asarray(value, variable.dtype))
    except DAMAGE as error:
        raise agreed(
            UsageError(
                f"{state['path']} was not saved by BackupAndRestore for this model: use another "
                "directory"
            )
        ) from error
    if reduction:
        reduction.samples.assign(adapter.samples_seen)
    return state


def _best_only(model: Any) -> dict[str, ModelCheckpoint]:
    """Return the callbacks that save the best ``model``, by what they monitor and their file."""
    mine = [each for each in _checkpoints if each._trained is model and each.save_best_only]
    return {f"{each.monitor} in {each.filepath}": each for each in mine}


def _seeds(model: Any) -> list[Any]:
    """Return the states of the model's random generators, e.g. of dropout."""
    return [seed for seed in model.non_trainable_variables if seed.name == "seed_generator_state"]
