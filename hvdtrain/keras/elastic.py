"""``hvd.elastic`` for Keras: Horovod's API for a training that survives the loss of a rank.

Under ``hvdtrain launch --elastic`` all ranks exit after a loss or a change of the hosts, and are
replaced by new processes (``system/runtime/elastic.py``). So a commit is a checkpoint on disk, and
``run`` begins with the newest one. If it is started otherwise, the same script trains without
commits, which then have no effect.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from typing_extensions import override

from hvdtrain.adapters.base import JsonValues
from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.preemption import Preemption
from hvdtrain.errors import EXIT_PREEMPTED, UsageError
from hvdtrain.keras import checkpoint, session
from hvdtrain.keras import data as shards
from hvdtrain.keras.callbacks import set_learning_rate
from hvdtrain.keras.data import (
    Logs,
    ModelCallback,
    adapter_of,
    is_built,
    learning_rate,
    note_samples,
    step_sum,
)
from hvdtrain.steps.checkpoint_files import check_keys
from hvdtrain.system.runtime.detect import is_elastic
from hvdtrain.system.runtime.exit import leave, process_status


class TensorFlowKerasState:
    """A model, its optimizer and values of the script, e.g. ``batch`` and ``epoch``.

    Stop signals are handled from the creation of the state until ``run`` returns.

    Args:
        model: the model, built.
        optimizer: its optimizer; default: that of the compiled model.
        backend: not used.
        directory: directory of the commits, which rank 0 writes, on a file system that all hosts
            share; required under ``launch --elastic``, where restarted processes read it.
        keep: number of recent commits to keep.
        values: numbers, strings, or lists of them; they become attributes.

    Raises:
        UsageError: the model is not built, or is of a process set; the directory is missing; a
            value cannot be saved in a commit.
    """

    def __init__(
        self,
        model: Any,
        optimizer: Any = None,
        backend: Any = None,
        directory: str | Path | None = None,
        keep: int = 3,
        **values: Any,
    ) -> None:
        if not is_built(model):
            raise UsageError(
                "KerasState: the model has no weights yet: start it with keras.Input(shape), or "
                "call model.build(shape)"
            )
        self.model, self.optimizer = model, optimizer or model.optimizer
        self.directory: Path | None = None  # None: commits do nothing
        self.keep = keep
        self._names = tuple(values)
        for name, value in values.items():
            setattr(self, name, value)
        self._reset: list[Callable[[], object]] = []
        self._commits = 0
        self._rate: float | None = None  # set by the script
        # Of the current epoch, by ``UpdateBatchStateCallback``: its number of steps, the progress
        # of the dataset of ``shard`` (samples, samples trained on), and the last logs.
        self.of_epoch: JsonValues = {}
        self.restored: JsonValues | None = None  # the commit from which ``run`` has begun
        self._last_commit: float | None = None  # time of the last commit or check
        self._longest = 0.0  # seconds between two of them
        self._runs = 0  # number of active calls of ``run``
        if is_elastic(os.environ):
            self._keep_in(directory)

    def _keep_in(self, directory: str | Path | None) -> None:
        """Commit to ``directory`` from now on, and handle signals."""
        if directory is None:
            raise UsageError(
                'KerasState: specify directory="checkpoints", on a file system that all hosts '
                "share: under launch --elastic restarted ranks read the commits from it"
            )
        if self.adapter is not session.adapter():
            raise UsageError(
                "KerasState: the model trains in a process set, whose ranks differ after a change "
                "of the hosts: under launch --elastic train it on all ranks"
            )
        self.directory = Path(directory)
        self._plain_values()
        self._preemption.listen()

    @property
    def adapter(self) -> CommonAdapter:
        """The adapter of the ranks that train the model."""
        return adapter_of(step_sum(self.optimizer))

    @functools.cached_property
    def _preemption(self) -> Preemption:
        return Preemption(self.adapter.communicator)

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], object]]) -> None:
        """Register ``callbacks`` to call before restoring a commit of another number of ranks."""
        self._reset += callbacks

    def sync(self) -> None:
        """Restore the newest commit on all ranks, or send rank 0's state; all ranks must call it.

        If the script's learning rate depends on the number of ranks, the restored one is rescaled.
        """
        self._rate = learning_rate(self.optimizer)
        if self.directory is None:
            if self.adapter.world.size > 1:
                note_samples(step_sum(self.optimizer))
                self.adapter.broadcast_state(self.model, self.optimizer)
            return
        state = self._restore(self.directory)
        if state and state["world_size"] != self.adapter.world.size and self._reset:
            if self._rate is not None:
                self.optimizer.learning_rate = self._rate
            for callback in self._reset:
                callback()
            self._rate = learning_rate(self.optimizer)
            state = self._restore(self.directory)
        self.restored = state
        if not state:
            return
        self._commits, self.of_epoch = state["step"], state["of_epoch"]
        for name, value in state["values"].items():
            setattr(self, name, value)
        if self._rate and state["script_rate"] and state["learning_rate"]:
            ratio = self._rate / state["script_rate"]
            if ratio != 1:
                set_learning_rate(self.optimizer, state["learning_rate"] * ratio)

    def save(self) -> None:
        """Write a checkpoint; all ranks must call it."""
        if self.directory is None:
            return
        self._commits += 1
        began = time.monotonic()
        checkpoint.save(
            self.adapter,
            self.directory,
            self.model,
            self.optimizer,
            keep=self.keep,
            step=self._commits,
            script_rate=self._rate,
            of_epoch=self.of_epoch,
            values=self._plain_values(),
        )
        self._preemption.walltime.saved(time.monotonic() - began)

    def commit(self) -> None:
        """Write a checkpoint, and exit to restart if the hosts changed; all ranks must call it."""
        self._check("commit", save=True)

    def check_host_updates(self) -> None:
        """Commit if the hosts changed or the job is to stop; all ranks must call it."""
        self._check("check_host_updates", save=False)

    def _check(self, call: str, *, save: bool) -> None:
        if self.directory is None:
            return
        with self.adapter.waits.during(call):
            reason, rank = self._agreed_reason()
            if save or reason:
                self.save()
        if reason:
            self._preemption.announce(reason, rank, f"committed {process_status.checkpoint}")
            leave(EXIT_PREEMPTED)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for changed hosts, the walltime and signals within the block."""
        if self.directory is None:
            yield
            return
        self._preemption.listen()
        if not self._runs:
            self._preemption.watch()
        self._runs += 1
        try:
            yield
        finally:
            self._runs -= 1
            if not self._runs:
                self._preemption.ignore()

    def _agreed_reason(self) -> tuple[str, int]:
        """Return the reason to stop and its rank, the same on all ranks; empty: continue."""
        now = time.monotonic()
        self._longest = max(self._longest, now - (self._last_commit or now))
        self._last_commit = now
        self._preemption.watch_walltime(self._longest)
        return self._preemption.agree()

    def _restore(self, directory: Path) -> JsonValues | None:
        return checkpoint.restore(self.adapter, directory, self.model, self.optimizer)

    def _plain_values(self) -> JsonValues:
        """Return the values of the script as JSON values."""
        plain = {}
        for name in self._names:
            value = getattr(self, name)
            plain[name] = value = value.tolist() if hasattr(value, "tolist") else value
            try:
                json.dumps(value)
                check_keys(value)
            except TypeError as error:
                raise UsageError(
                    f"KerasState: {name} is a {type(value).__name__} ({error}); a commit can "
                    "contain only numbers, strings and lists of them, in addition to the model and "
                    "its optimizer"
                ) from None
        return plain


class KerasState(TensorFlowKerasState):
    """The state of a Keras model; see ``TensorFlowKerasState``."""


def run(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``function``, whose first argument is a state, to begin with the newest commit.

    If a rank is lost meanwhile, this process exits, and is restarted.
    """

    @functools.wraps(function)
    def wrapper(state: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(state, TensorFlowKerasState):
            kind = type(state).__name__
            raise UsageError(f"elastic.run: {function.__name__} was passed a {kind}, not a state")
        with state.watching(), session.outliving_loss():
            state.sync()
            return function(state, *args, **kwargs)

    return wrapper


class _StateCallback(ModelCallback):
    """A callback that tracks the progress of ``fit`` in a state."""

    _begun = False  # an epoch of this ``fit``

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._begun = False


class UpdateEpochStateCallback(_StateCallback):
    """Set ``state.epoch`` to the number of completed epochs.

    ``fit`` may continue at ``initial_epoch=state.epoch``, or train ``epochs=ALL - state.epoch`` and
    count from 0, as in Horovod's examples: ``shard`` and the learning-rate callbacks of this
    package use the epoch of the whole training in both cases.
    """

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if not self._begun:
            self._begun = True
            shards.offset.epochs = self.state.epoch - epoch
        super().on_epoch_begin(epoch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch = shards.offset.epochs + epoch + 1

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        shards.offset.epochs = 0


class UpdateBatchStateCallback(_StateCallback):
    """Set ``state.batch`` to the number of completed batches of the epoch, and resume after them.

    The first epoch begins with the completed batches of the commit: they are drawn but not trained
    on, and callbacks see the commit's logs for them. Batches of ``shard`` are counted in samples,
    so they are exact on any number of ranks.
    """

    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self._order: Any = None  # from which the epoch's batches are drawn; None: not of shard
        self._restore: Callable[[], None] = lambda: None  # restores the model's train function

    @property
    def _steps(self) -> int | None:
        return self.params.get("steps")

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch
        self._order = None
        if not self._begun and self.state.batch:
            self.state.batch = done = self._done()
            rest = 0 if done == self._steps else done % self.model.steps_per_execution
            shards.offset.left_out = done - rest
            self.state.of_epoch["steps"] = self._steps  # the unit of ``batch`` from now on
            logs = self.state.of_epoch.get("logs", {})
            self._restore = shards.leave_out(self.model, done, rest, logs)
        self._begun = True

    def _done(self) -> int:
        """Return the number of completed batches of the commit, in batches of the current size."""
        state, steps = self.state, self._steps
        drawn, before = state.of_epoch.get("drawn"), state.of_epoch.get("steps")
        batches = shards.begin_at(*drawn) if drawn else None
        if batches is not None:
            return batches
        if steps and before:  # the same share of the epoch, whatever the batch size
            return min(round(state.batch * steps / before), steps - 1)  # one is left for metrics
        size = self.adapter.world.size
        return int(state.batch * (state.restored or {"world_size": size})["world_size"] // size)

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        order = self._order = self._order or shards.drawn_last()  # later it may be the validation's
        if batch < shards.offset.left_out:
            return
        done = min(batch + 1, self._steps or batch + 1)  # the last execution may have fewer batches
        self.state.batch = done
        self.state.of_epoch = {
            "steps": self._steps,
            "drawn": order and [order.shards.samples, order.consumed(done)],
            "logs": {name: value for name, value in (logs or {}).items() if type(value) is float},
        }
        epoch = shards.offset.epochs + self._epoch
        process_status.stage = f"epoch {epoch + 1}, batch {done}"

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._restore()
        self.state.batch, self.state.of_epoch = 0, {}
        shards.offset.left_out = 0


class CommitStateCallback(ModelCallback):
    """Commit the state after every ``batches_per_commit`` batches, and after each epoch.

    It commits after all callbacks have handled the batch or the epoch, in any order of the list.
    """

    def __init__(self, state: Any, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state, self.batches_per_commit = state, batches_per_commit

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._batches, self._due = 0, False

    @override
    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._commit()

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if batch >= shards.offset.left_out:
            several = self.model.steps_per_execution
            self._batches += several
            self._due = self._batches % self.batches_per_commit < several

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._commit()
        super().on_epoch_begin(epoch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._due = True

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        self._commit()

    def _commit(self) -> None:
        if self._due:
            self._due = False
            self.state.commit()
