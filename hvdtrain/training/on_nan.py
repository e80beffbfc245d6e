"""What updates return: losses, and for ``--on-nan`` gradients that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.errors import TrainingError
from hvdtrain.steps.integrity import rank_names
from hvdtrain.steps.sharding import Part, Position
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.tasks.task import NotFinite, Task
from hvdtrain.training.checkpoint_manager import TrainState
from hvdtrain.training.plan import Session

MAX_SKIPPED = 10  # consecutive updates that --on-nan skip skips
MIN_SCALE = 2.0**-10  # of the loss: 26 updates in a row after an initial scale of 65536


class Losses:
    """The losses of this rank: those not yet read, and the sum since the last log line.

    They are read from the device, summed, and averaged over the ranks. The sum of the epoch is in
    ``TrainState``, which is saved.
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
        skipped = self._task.skipped_updates() if self._task.deferred else 0
        counted = unread[: len(unread) - skipped]
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


class OnNan:
    """Skips updates, or ends the training; on all ranks alike.

    If the task defers, a GPU skips such an update by itself and reports it later. The loop then
    goes back and repeats it, and this time the task reports it at once.
    """

    def __init__(self, session: Session) -> None:
        self._mode = session.options.on_nan
        self._adapter, self._task = adapter, task = session.adapter, session.task
        self._consecutive = 0  # number of updates skipped without one made since
        self._may_defer = task.may_defer = task.may_defer or adapter.has_gpu

    def note_update(self) -> None:
        """Record that an update was made, or is deferred."""
        self._consecutive = 0
        self._task.may_defer = self._may_defer

    def check_loss_scale(self, step: int) -> None:
        """Raise ``TrainingError``, on every rank, if updates have overflowed up to ``step``."""
        scaled = self._task.loss_scale
        if scaled and not scaled.scale >= MIN_SCALE:
            raise agreed(
                TrainingError(
                    f"the loss scale is {scaled.scale:g} at step {step}: gradients in fp16 are not "
                    "finite, however small the scale. Lower --lr, check the data, or use "
                    "--precision bf16 or fp32"
                )
            )

    def go_back(self, now: TrainState, parts: list[Part]) -> None:
        """Go back to before the updates of ``parts``, the first of which was not made."""
        now.step -= len(parts)
        now.samples -= sum(part.global_count for part in parts)
        now.position = parts[0].start
        self._adapter.samples_seen -= sum(part.count for part in parts)
        self._task.may_defer = False

    def skip(
        self, now: TrainState, part: Part, reason: NotFinite, show: Callable[[str], None]
    ) -> None:
        """Handle the update of ``part``, which was not made, according to ``--on-nan``.

        The training continues after ``part``.

        Raises:
            TrainingError: on every rank, if the training ends.
        """
        self._adapter.samples_seen -= part.count  # they weigh the running statistics of this rank
        trouble = self._report(now, part, reason)
        if self._mode == "skip" and self._consecutive < MAX_SKIPPED:
            self._consecutive += 1
            now.skipped += 1
            now.position = Position(part.start.epoch, part.start.consumed + part.global_count)
            now.metrics = None
            show(f"{trouble}: the update is skipped")
            return
        remedy = ". Lower --lr, check the data, or skip such updates by --on-nan skip"
        if self._mode == "skip":
            remedy = (
                f"; the {MAX_SKIPPED} updates before it were skipped. Lower --lr or check the data"
            )
        raise agreed(TrainingError(trouble + remedy))

    def _report(self, now: TrainState, part: Part, reason: NotFinite) -> str:
        """Return which ranks' gradients were not finite; all ranks must call it."""
        causes = self._adapter.communicator.gather(reason.local.encode())
        hosts = [facts.host for facts in self._adapter.ranks]
        ranks = [rank for rank, cause in enumerate(causes) if cause]
        owners = ", ".join(f"{rank_names([r], hosts)}: {causes[r].decode()}" for r in ranks[:4])
        return (
            f"the gradients of step {now.step + 1} (epoch {part.start.epoch + 1}) are not "
            f"finite, {reason.parameter} first ({owners or 'rank unknown'})"
        )
