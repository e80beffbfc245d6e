"""Step 7 for Keras: one writer, whole files, and a training that goes on as if it had not stopped.

The names of these callbacks are Keras's; ``callbacks.py`` hands them on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import keras
import numpy as np
from typing_extensions import override

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.errors import CheckpointError, HvdtrainError, UsageError
from hvdtrain.keras import session
from hvdtrain.keras.model import ModelCallback, note_samples, rate_of, step_sum

MARK = ".process-set-"  # and what tells it from others: of a directory of checkpoints


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

    @override
    def set_model(self, model: Any) -> None:
        super().set_model(model)
        self._trained, self._model = model, WholeFiles(model)
        self._writes = self.adapter.world.is_writer

    @override
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self._writes:
            super().on_train_batch_end(batch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        adapter, save = self.adapter, super().on_epoch_end
        note_samples(self._trained.optimizer)

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

    Raises:
        UsageError: another process set has its checkpoints there.
    """

    def __init__(self, backup_dir: str | Path, keep: int = 3) -> None:
        super().__init__()
        self.backup_dir, self.keep = Path(backup_dir), keep
        self._done = 0  # epochs, saved or not
        self._saved = 0

    @override
    def on_train_begin(self, logs: Any = None) -> None:
        model, adapter = self.model, self.adapter
        if not model.built:
            raise HvdtrainError(
                "BackupAndRestore: the model has no weights yet to restore: begin it with "
                "keras.Input(shape), or call model.build(shape)"
            )
        state = restore(adapter, self.backup_dir, model, model.optimizer)
        self._done = self._saved = int(state["step"]) if state else 0
        if state:
            model._initial_epoch = self._done  # where fit looks for it after this call

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
        self.model._initial_epoch = None  # else a later fit would begin there, too

    def _save(self) -> None:
        if self._done == self._saved:
            return
        self._saved = self._done
        with self.adapter.waits.during("BackupAndRestore"):
            save(
                *(self.adapter, self.backup_dir, self.model, self.model.optimizer),
                keep=self.keep,
                step=self._done,
            )


def save(
    adapter: CommonAdapter, directory: Path, model: Any, optimizer: Any, *, keep: int, **state: Any
) -> None:
    """Write a checkpoint of the training; all ranks of the adapter call it.

    Args:
        adapter: of the ranks that train together.
        directory: where the checkpoints live.
        model: built.
        optimizer: its own.
        keep: how many of the newest stay.
        state: JSON values; ``step``, a number that grows, is one of them.
    """
    note_samples(optimizer)
    mine = json.dumps([one.numpy().tolist() for one in _seeds(model)]).encode()
    seeds = [json.loads(told) for told in adapter.communicator.gather(mine)]
    rate = rate_of(optimizer)
    state["learning_rate"] = None if rate is None else float(rate)
    adapter.save_checkpoint(directory, model, optimizer, state={**state, "seeds": seeds}, keep=keep)


def restore(
    adapter: CommonAdapter, directory: Path, model: Any, optimizer: Any
) -> dict[str, Any] | None:
    """Load the newest checkpoint, or send what the first rank has; all ranks call it.

    Returns:
        The ``state`` that was saved; None where there is no checkpoint.

    Raises:
        UsageError: on every rank: it is another training's, or another process set's directory.
    """
    reduction = step_sum(optimizer)
    if reduction and session.number_of(reduction.process_set):
        adapter.communicator.on_root(lambda: _occupy(directory, reduction.process_set.ranks))
    state = adapter.resume(directory, model, optimizer)
    if state is None:
        return None
    if state["learning_rate"] is not None:
        optimizer.learning_rate = state["learning_rate"]
    if len(state["seeds"]) == adapter.world.size:
        mine = state["seeds"][adapter.world.rank]
        for variable, value in zip(_seeds(model), mine, strict=True):
            variable.assign(np.asarray(value, variable.dtype))
    if reduction:
        reduction.samples.assign(adapter.samples_seen)
    return state


def _occupy(directory: Path, ranks: Sequence[int]) -> None:
    """Let no other process set use ``directory`` from now on; the one writer calls it.

    Two sets that begin at once may both be refused: each leaves its mark before it looks.
    """
    mark = directory / f"{MARK}{sha256(str(list(ranks)).encode()).hexdigest()[:16]}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        new = not mark.exists()
        mark.touch()
        others = [one for one in directory.glob(f"{MARK}*") if one != mark]
        if others and new:
            mark.unlink()
    except OSError as error:
        raise CheckpointError(f"{directory} cannot be written: {error.strerror}") from error
    if others:
        raise UsageError(
            f"the process set of the ranks {list(ranks)}: {directory} is another process set's "
            f"(if there is none any more, remove {others[0].name}): give each set a directory of "
            "its own"
        )


def _seeds(model: Any) -> list[Any]:
    """Return the states of the model's random generators, such as of dropout."""
    return [one for one in model.non_trainable_variables if one.name == "seed_generator_state"]
