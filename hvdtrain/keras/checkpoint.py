"""Step 7 for Keras: one writer, whole files, and a training that goes on as if it had not stopped.

The names of these callbacks are Keras's; ``callbacks.py`` hands them on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
from typing_extensions import override

from hvdtrain.errors import CheckpointError, HvdtrainError
from hvdtrain.keras import session
from hvdtrain.keras.model import ModelCallback, note_samples, step_sum


class WholeFiles:
    """A model whose files are there completely, or not at all."""

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
    partial = path.with_name(f".{os.getpid()}.{path.name}")  # its ending tells Keras the format
    try:
        write(partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


class ModelCheckpoint(ModelCallback, keras.callbacks.ModelCheckpoint):
    """Save the model as ``keras.callbacks.ModelCheckpoint`` does, on rank 0, in whole files.

    All ranks call it and wait for the file at the end of an epoch; where rank 0 cannot write, all
    fail. The running statistics of BatchNorm are then the mean over all ranks. With a ``save_freq``
    in batches rank 0 saves its own, and nobody waits.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._writes = session.rank() == 0

    @override
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._trained, self._model = model, WholeFiles(model)

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._writes:
            super().on_train_batch_end(batch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        adapter, save = session.adapter(), super().on_epoch_end
        note_samples(self._trained)

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
    """Save the model that is best by ``monitor``, on rank 0.

    Args:
        monitor: a name of the logs.
        verbose: 1: tell.
        save_weights_only: the weights alone.
        mode: ``min``, ``max`` or ``auto``.
        save_freq: ``epoch``, or a number of batches.
        filepath: ``best.keras``, or ``best.weights.h5``, by default.
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
    """Save the training after each epoch, and go on from there when the script is run again.

    Weights, optimizer, learning rate, each rank's running statistics and the states of its random
    generators are those of an uncut training; with ``shard``, so is the order of the samples. On
    another number of ranks the last two are not known, and begin anew. What ``EarlyStopping`` or
    ``ReduceLROnPlateau`` have counted is not saved.

    Args:
        backup_dir: where the checkpoints live, on a file system that rank 0 sees again.
        keep: how many of the newest stay.
    """

    def __init__(self, backup_dir: str | Path, keep: int = 3) -> None:
        super().__init__()
        self.backup_dir, self.keep = Path(backup_dir), keep
        self._done = 0  # epochs, saved or not
        self._saved = 0

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        model, adapter = self.model, session.adapter()
        if not model.built:
            raise HvdtrainError(
                "BackupAndRestore: the model has no weights yet to restore: begin it with "
                "keras.Input(shape), or call model.build(shape)"
            )
        state = adapter.resume(self.backup_dir, model, model.optimizer)
        self._done = self._saved = int(state["step"]) if state else 0
        if not state:
            return
        model._initial_epoch = self._done  # where fit looks for it after this call
        if state["learning_rate"] is not None:
            model.optimizer.learning_rate = state["learning_rate"]
        if len(state["seeds"]) == session.size():
            for variable, value in zip(_seeds(model), state["seeds"][session.rank()], strict=True):
                variable.assign(np.asarray(value, variable.dtype))
        if reduction := step_sum(model):
            reduction.samples.assign(adapter.samples_seen)

    @override
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        # Only now have all callbacks done what they do at the end of the epoch before.
        self._save()
        super().on_epoch_begin(epoch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._done = epoch + 1

    @override
    def on_train_end(self, logs: Any = None) -> None:
        self._save()

    def _save(self) -> None:
        if self._done == self._saved:
            return
        self._saved = self._done
        model, adapter = self.model, session.adapter()
        note_samples(model)
        mine = json.dumps([one.numpy().tolist() for one in _seeds(model)]).encode()
        with adapter.waits.during("BackupAndRestore"):
            seeds = [json.loads(told) for told in adapter.communicator.gather(mine)]
        rate = getattr(model.optimizer, "_learning_rate", None)
        state = {
            "step": self._done,
            "learning_rate": float(rate) if isinstance(rate, keras.Variable) else None,
            "seeds": seeds,
        }
        adapter.save_checkpoint(
            self.backup_dir, model, model.optimizer, state=state, keep=self.keep
        )


def _seeds(model: Any) -> list[Any]:
    """Return the states of the model's random generators, such as of dropout."""
    return [one for one in model.non_trainable_variables if one.name == "seed_generator_state"]
