"""The callbacks of ``hvd.elastic``: where the training stands, and when it is committed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from typing_extensions import override

from hvdtrain.keras import data as shards
from hvdtrain.keras.model import ModelCallback
from hvdtrain.system.runtime.exit import process_status

Logs = dict[str, Any] | None


class UpdateEpochStateCallback(ModelCallback):
    """Keep ``state.epoch`` at the epochs that are done.

    ``fit`` may go on at ``initial_epoch=state.epoch``, or train ``epochs=ALL - state.epoch`` more
    and count them from 0, as Horovod's examples do: ``shard`` and the learning rate callbacks of
    this package know the epoch of the whole training in both cases.
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
            shards.place.epochs = self.state.epoch - epoch
        super().on_epoch_begin(epoch, logs)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self.state.epoch = shards.place.epochs + epoch + 1

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        shards.place.epochs = 0


class UpdateBatchStateCallback(ModelCallback):
    """Keep ``state.batch`` at the batches of the epoch that are done, and go on after them.

    The first epoch begins with the batches that the commit has had already: they are drawn and not
    trained on, and callbacks see the commit's logs with them. Those of ``shard`` are counted in
    samples, and so exact on any number of ranks.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self._order: Any = None  # what the epoch's batches are drawn from; None: not by shard
        self._restore: Callable[[], None] = lambda: None  # the model's own train function

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
            shards.place.left_out = done - rest
            self.state.of_epoch["steps"] = self._steps  # as ``batch`` counts from now on
            logs = self.state.of_epoch.get("logs", {})
            self._restore = _leave_out(self.model, done, rest, logs)
        self._first = False

    def _done(self) -> int:
        """Return how many batches of the epoch the commit has had, counted in those of now."""
        state, steps = self.state, self._steps
        drawn, before = state.of_epoch.get("drawn"), state.of_epoch.get("steps")
        found = shards.begin_at(*drawn) if drawn else None
        if found is not None:
            return found
        if steps and before:  # that share of the epoch, whether or not batches grow with the ranks
            return min(round(state.batch * steps / before), steps - 1)  # one gives it its metrics
        size = self.adapter.world.size
        return int(state.batch * (state.restored or {"world_size": size})["world_size"] // size)

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        order = self._order = self._order or shards.drawn_last()  # later it may be the validation's
        if batch < shards.place.left_out:
            return
        done = min(batch + 1, self._steps or batch + 1)  # the last execution may have fewer batches
        self.state.batch = done
        self.state.of_epoch = {
            "steps": self._steps,
            "drawn": order and [order.shards.samples, order.consumed(done)],
            "logs": {name: value for name, value in (logs or {}).items() if type(value) is float},
        }
        epoch = shards.place.epochs + self._epoch
        process_status.stage = f"epoch {epoch + 1}, batch {done}"

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._restore()
        self.state.batch, self.state.of_epoch = 0, {}
        shards.place.left_out = 0


def _leave_out(model: Any, number: int, rest: int, logs: dict[str, Any]) -> Callable[[], None]:
    """Let ``fit`` draw the next ``number`` batches without training on them.

    Args:
        model: its train function is replaced meanwhile.
        number: of batches.
        rest: those of them that an execution begins with whose other batches are trained on.
        logs: of those that are left out.

    Returns:
        What gives the model its own train function back at once.
    """
    own, left, several = model.train_function, number, model.steps_per_execution

    def restore() -> None:
        if model.train_function is train_function:
            model.train_function = own

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
            model.train_function, model.steps_per_execution = own, several

    if number:
        model.train_function = train_function
    return restore


class CommitStateCallback(ModelCallback):
    """Commit the state after every ``batches_per_commit`` batches, and after each epoch.

    It does so when all callbacks have seen the batch or the epoch, wherever they stand in the list.
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
        if batch >= shards.place.left_out:
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
