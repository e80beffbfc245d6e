"""The position of ``fit`` within an epoch: saved with a checkpoint, and resumed from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.adapters.base import JsonValues
from hvdtrain.keras import data as shards
from hvdtrain.keras.data import Logs


class EpochProgress:
    """The completed batches of an epoch of ``fit``.

    Args:
        model: the model that is trained.
        steps: number of batches of the epoch; None: unknown.

    Attributes:
        batch: number of completed batches, including those that are left out.
    """

    def __init__(self, model: Any, steps: int | None) -> None:
        self.model, self.steps = model, steps
        self.batch = 0
        self._order: Any = None  # from which the epoch's batches are drawn; None: not of ``shard``
        self._logs: Logs = None
        self._end: Callable[[], None] = lambda: None

    def resume(self, state: JsonValues, size: int) -> None:
        """Leave out the completed batches of a checkpoint with this ``state``; ``size``: of ranks.

        They are drawn but not trained on, and callbacks see the saved logs for them. Batches of
        ``shard`` are counted in samples, so they are exact on any number of ranks.
        """
        self.batch = done = self._completed(state["of_epoch"], state["world_size"], size)
        rest = 0 if done == self.steps else done % self.model.steps_per_execution
        self._logs = state["of_epoch"]["logs"]
        self._end = shards.leave_out(self.model, done, rest, self._logs)

    def _completed(self, saved: JsonValues, before: int, size: int) -> int:
        """Return the number of completed batches, in batches of the current size.

        ``before`` and ``size`` are the numbers of ranks then and now.
        """
        batches = shards.begin_at(*saved["drawn"]) if saved["drawn"] else None
        if batches is not None:
            return batches
        if self.steps and saved["steps"]:  # the same share of the epoch, whatever the batch size
            completed = round(saved["batch"] * self.steps / saved["steps"])
            return min(completed, self.steps - 1)  # one is left for the metrics
        return int(saved["batch"]) * before // size  # as batches of a fixed size per rank

    def note(self, batch: int, logs: Logs) -> None:
        """Record that ``batch``, counted from 0, is completed; call it after each one."""
        self._order = self._order or shards.drawn_last()  # later it may be the validation's
        self.batch = min(batch + 1, self.steps or batch + 1)  # the last execution may have fewer
        self._logs = logs

    def values(self) -> JsonValues:
        """Return the JSON values from which ``resume`` continues; empty: from the beginning."""
        if not self.batch:
            return {}
        order, logs = self._order, self._logs or {}
        return {
            "batch": self.batch,
            "steps": self.steps,
            "drawn": order and [order.shards.samples, order.consumed(self.batch)],
            "logs": {name: value for name, value in logs.items() if type(value) is float},
        }

    def end(self) -> None:
        """End the epoch."""
        self._end()
        self.batch = 0
