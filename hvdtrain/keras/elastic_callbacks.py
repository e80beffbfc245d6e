"""The callbacks of ``hvd.elastic``, which track the progress of the training and commit it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from hvdtrain.keras import data as shards
from hvdtrain.keras.model import ModelCallback
from hvdtrain.system.runtime.exit import process_status

Logs = dict[str, Any] | None


class UpdateEpochStateCallback(ModelCallback):
    """Set ``state.epoch`` to the number of completed epochs.

    ``fit`` may continue at ``initial_epoch=state.epoch``, or train ``epochs=ALL - state.epoch`` and
    count from 0, as in Horovod's examples: ``shard`` and the learning-rate callbacks of this
    package use the epoch of the whole training in both cases.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._first = True

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        if self._first:
            self._first = False
            shards.offset.epochs = self.state.epoch - epoch
        super().on_epoch_begin(epoch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch = shards.offset.epochs + epoch + 1

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        shards.offset.epochs = 0


class UpdateBatchStateCallback(ModelCallback):
    """Set ``state.batch`` to the number of completed batches of the epoch, and resume after them.

    The first epoch begins with the completed batches of the commit: they are drawn but not trained
    on, and callbacks see the commit's logs for them. Batches of ``shard`` are counted in samples,
    so they are exact on any number of ranks.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._order: Any = None  # from which the epoch's batches are drawn; None: not of shard
        self._restore: Callable[[], None] = lambda: None  # restores the model's train function

    @property
    def _steps(self) -> int | None:
        steps: int | None = self.params.get("steps")
        return steps

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._first = True

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch
        self._order = None
        if self._first and self.state.batch:
            self.state.batch = done = self._done()
            rest = 0 if done == self._steps else done % self.model.steps_per_execution
            shards.offset.left_out = done - rest
            self.state.of_epoch["steps"] = self._steps  # the unit of ``batch`` from now on
            logs = self.state.of_epoch.get("logs", {})
            self._restore = _leave_out(self.model, done, rest, logs)
        self._first = False

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


def _leave_out(model: Any, number: int, rest: int, logs: dict[str, Any]) -> Callable[[], None]:
    """Make ``fit`` draw the next ``number`` batches without training on them.

    Args:
        model: the model, whose train function is replaced meanwhile.
        number: number of batches to skip.
        rest: number of them at the beginning of an execution that trains on its other batches.
        logs: logs returned for skipped batches.

    Returns:
        A function that restores the model's train function at once.
    """
    original, left, several = model.train_function, number, model.steps_per_execution

    def restore() -> None:
        if model.train_function is train_function:
            model.train_function = original

    def train_function(iterator: Any) -> Any:
        nonlocal left
        drawn = min(left, several)
        for _ in range(drawn):
            next(iterator)
        left -= drawn
        if left == 0:
            restore()
        if left or not rest:
            return logs
        model.steps_per_execution = several - rest
        model.make_train_function(force=True)
        try:
            return model.train_function(iterator)
        finally:
            model.train_function, model.steps_per_execution = original, several

    if number:
        model.train_function = train_function
    return restore


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
