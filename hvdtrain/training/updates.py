"""The updates of a training: which were made, their losses, and ``--on-nan``."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hvdtrain.errors import TrainingError
from hvdtrain.steps.integrity import rank_names
from hvdtrain.steps.sharding import Part, Position
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.tasks.task import NotFinite
from hvdtrain.training.checkpoint_manager import TrainState
from hvdtrain.training.plan import Session

MAX_SKIPPED = 10  # consecutive updates that --on-nan skip skips
MIN_SCALE = 2.0**-10  # of the loss: 26 updates in a row after an initial scale of 65536


class Updates:
    """Counts the updates in ``now``, the progress of the training, and sums their losses.

    Losses are read from the device a few updates later, since that synchronizes with a GPU. If the
    task defers, a GPU skips an update whose gradients are not finite by itself, and reports it when
    the losses are read. The training then goes back and repeats it, and this time the task reports
    it at once.
    """

    def __init__(self, session: Session, now: TrainState) -> None:
        self.now, self._mode = now, session.options.on_nan
        self._adapter, self._task = adapter, task = session.adapter, session.task
        self._unread: list[tuple[Part, Any, Any]] = []  # with loss and weight
        self._sum: float = 0  # of losses since the last log line
        self._weight: float = 0  # of these
        self._consecutive = 0  # number of updates skipped without one made since
        self._may_defer = task.may_defer = task.may_defer or adapter.has_gpu

    def add(self, part: Part, loss: Any) -> None:
        """Count the update of ``part``, which was made or is deferred."""
        self._consecutive = 0
        self._task.may_defer = self._may_defer
        self.now.step += 1
        self.now.samples += part.global_count
        self._unread.append((part, loss, self._task.batch_weight))
        self._move_behind(part)

    def skip(self, part: Part, reason: NotFinite, show: Callable[[str], None]) -> None:
        """Handle the update of ``part``, which was not made, according to ``--on-nan``.

        The training continues after ``part``.

        Raises:
            TrainingError: on every rank, if the training ends.
        """
        self._adapter.samples_seen -= part.count  # they weigh the running statistics of this rank
        trouble = self._describe(part, reason)
        skips = self._mode == "skip"
        if skips and self._consecutive < MAX_SKIPPED:
            self._consecutive += 1
            self.now.skipped += 1
            self._move_behind(part)
            show(f"{trouble}: the update is skipped")
            self.read()
            return
        remedy = ". Lower --lr, check the data, or skip such updates by --on-nan skip"
        if skips:
            remedy = (
                f"; the {MAX_SKIPPED} updates before it were skipped. Lower --lr or check the data"
            )
        raise agreed(TrainingError(trouble + remedy))

    def _move_behind(self, part: Part) -> None:
        self.now.position = Position(part.start.epoch, part.start.consumed + part.global_count)
        self.now.metrics = None

    def _describe(self, part: Part, reason: NotFinite) -> str:
        """Return which ranks' gradients were not finite; all ranks must call it."""
        causes = self._adapter.communicator.gather(reason.local.encode())
        hosts = [facts.host for facts in self._adapter.ranks]
        ranks = [rank for rank, cause in enumerate(causes) if cause]
        owners = ", ".join(f"{rank_names([r], hosts)}: {causes[r].decode()}" for r in ranks[:4])
        return (
            f"the gradients of step {self.now.step + 1} (epoch {part.start.epoch + 1}) are not "
            f"finite, {reason.parameter} first ({owners or 'rank unknown'})"
        )

    def read(self) -> bool:
        """Add the unread losses to the sums; this synchronizes with a GPU.

        Return False if the last updates were not made: ``now`` is then before the first of them.

        Raises:
            TrainingError: a loss is not finite, and no loss scaler has skipped its update.
        """
        now, unread, self._unread = self.now, self._unread, []
        skipped = self._task.skipped_updates() if self._task.deferred else 0
        counted = unread[: len(unread) - skipped]
        values = self._task.loss_values([loss for _, loss, _ in counted])
        for number, ((part, _, weight), value) in enumerate(zip(counted, values, strict=True), 1):
            if not math.isfinite(value):
                if self._task.loss_scale:
                    continue
                step = now.step - len(unread) + number
                raise TrainingError(
                    f"the loss is {value} at step {step} (epoch {part.start.epoch + 1}): lower "
                    "--lr, or check the data of this rank. Checkpoints on disk are of earlier steps"
                )
            weight = part.count if weight is None else float(weight)
            now.loss_sum += value * weight
            now.loss_count += weight
            self._sum += value * weight
            self._weight += weight
        if skipped:
            self._go_back([part for part, _, _ in unread[len(counted) :]])
        return not skipped

    def _go_back(self, parts: list[Part]) -> None:
        """Go back to before the updates of ``parts``, the first of which was not made."""
        self.now.step -= len(parts)
        self.now.samples -= sum(part.global_count for part in parts)
        self.now.position = parts[0].start
        self._adapter.samples_seen -= sum(part.count for part in parts)
        self._task.may_defer = False

    def check_loss_scale(self) -> None:
        """Raise ``TrainingError``, on every rank, if the updates so far have overflowed."""
        scaled = self._task.loss_scale
        if scaled and not scaled.scale >= MIN_SCALE:
            raise agreed(
                TrainingError(
                    f"the loss scale is {scaled.scale:g} at step {self.now.step}: gradients in "
                    "fp16 are not finite, however small the scale. Lower --lr, check the data, or "
                    "use --precision bf16 or fp32"
                )
            )

    def interval_losses(self) -> tuple[float, float]:
        """Return the mean losses of the epoch and since the last call; NaN: of no samples.

        All ranks must call it.
        """
        means, _ = self._adapter.average_metrics(
            self.now.loss_count, loss=self.now.loss_sum, interval=self._sum, weight=self._weight
        )
        self._sum = self._weight = 0
        share = means["weight"]  # of the epoch's samples
        return means["loss"], means["interval"] / share if share else math.nan

    def average_epoch(self) -> None:
        """Set the mean loss of the epoch; None: of no samples. All ranks must call it."""
        means, _ = self._adapter.average_metrics(self.now.loss_count, loss=self.now.loss_sum)
        self.now.train_loss = None if math.isnan(means["loss"]) else means["loss"]
