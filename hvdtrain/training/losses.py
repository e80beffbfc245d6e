"""The losses of the updates: read from the device, summed, averaged over the ranks."""

from __future__ import annotations

import math
from typing import Any

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.errors import TrainingError
from hvdtrain.steps.sharding import Part
from hvdtrain.tasks.task import Task
from hvdtrain.training.checkpoint_manager import TrainState


class Losses:
    """The losses of this rank: those not yet read, and the sum since the last log line.

    The sum of the epoch is in ``TrainState``, which is saved.
    """

    def __init__(self, task: Task, adapter: CommonAdapter) -> None:
        self._task, self._adapter = task, adapter
        self.unread: list[tuple[Part, Any]] = []
        self._sum, self._count = 0.0, 0  # since the last log line

    def read(self, now: TrainState) -> list[Part]:
        """Add the unread losses to the sums; this synchronizes with a GPU.

        Returns:
            The parts of the last updates that were not made, whose losses do not count.

        Raises:
            TrainingError: a loss is not finite, and no loss scaler has skipped its update.
        """
        unread, self.unread = self.unread, []
        left_out = self._task.updates_left_out() if self._task.deferred else 0
        counted = unread[: len(unread) - left_out]
        values = self._task.loss_values([loss for _, loss in counted])
        for number, ((part, _), value) in enumerate(zip(counted, values, strict=True), 1):
            if not math.isfinite(value):
                if self._task.loss_scale:
                    continue
                step = now.step - len(unread) + number
                raise TrainingError(
                    f"the loss is {value} at step {step} (epoch {part.start.epoch + 1}): lower "
                    "--lr, or check the data of this rank. Checkpoints on disk are of earlier steps"
                )
            now.loss_sum += value * part.count
            now.loss_count += part.count
            self._sum += value * part.count
            self._count += part.count
        return [part for part, _ in unread[len(counted) :]]

    def of_interval(self, now: TrainState) -> tuple[float, float]:
        """Return the mean losses of the epoch and since the last call; NaN: of no samples.

        All ranks must call it.
        """
        means, _ = self._adapter.average_metrics(
            now.loss_count, loss=now.loss_sum, interval=self._sum, samples=self._count
        )
        self._sum, self._count = 0.0, 0
        share = means["samples"]  # of the epoch's samples
        return means["loss"], means["interval"] / share if share else math.nan

    def of_epoch(self, now: TrainState) -> float | None:
        """Return the mean loss of the epoch; None: of no samples. All ranks must call it."""
        means, count = self._adapter.average_metrics(now.loss_count, loss=now.loss_sum)
        return means["loss"] if count else None
