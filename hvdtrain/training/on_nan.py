"""``--on-nan``: what becomes of a global batch whose gradients are not finite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.config.options import Options
from hvdtrain.errors import TrainingError
from hvdtrain.steps.integrity import places
from hvdtrain.steps.sharding import Part, Position
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.training.checkpoint_manager import CheckpointManager, TrainState
from hvdtrain.workloads.task import NotFinite, Task

MOST_SKIPPED = 10  # updates in a row that --on-nan skip leaves out
MOST_ROLLBACKS = 3


class OnNan:
    """Leaves updates out, goes back, or ends the training; on all ranks alike.

    Where the task defers, a GPU leaves such an update out by itself and tells of it later. Then
    the loop goes back and makes it once more, and this time the task tells at once.
    """

    def __init__(
        self, options: Options, adapter: CommonAdapter, task: Task, checkpoints: CheckpointManager
    ) -> None:
        self._mode, self._checkpoints = options.on_nan, checkpoints
        self._adapter, self._task = adapter, task
        self._in_a_row = 0  # updates left out, up to here
        self._may_defer = task.may_defer = task.may_defer or adapter.has_gpu

    def buffers(self) -> dict[str, Any]:
        """Copy what a pass changes beside the gradients, where the update may be left out at once.

        On a GPU that takes time: what is deferred puts them back by itself, fp16 leaves nothing
        out, and to end only the update counts that is made once more.
        """
        again = self._may_defer and not self._task.may_defer
        skips = self._mode == "skip" and not self._task.deferred
        if again or (skips and self._task.options.precision != "fp16"):
            return self._adapter.local_buffers(self._task.model)
        return {}

    def note_update(self) -> None:
        """Note that an update was made, or that it is deferred whether it was."""
        self._in_a_row = 0
        self._task.may_defer = self._may_defer

    def go_back(self, now: TrainState, parts: list[Part]) -> None:
        """Go back to before the updates of ``parts``, the first of which was not made."""
        now.step -= len(parts)
        now.samples -= sum(part.global_count for part in parts)
        now.position = parts[0].start
        self._adapter.samples_seen -= sum(part.count for part in parts)
        self._task.may_defer = False

    def leave_out(
        self, now: TrainState, part: Part, buffers: dict[str, Any], say: Callable[[str], None]
    ) -> TrainState:
        """Do what ``--on-nan`` says, after the update of ``part`` was not made.

        Args:
            now: where the training stands.
            part: the part whose update it was.
            buffers: what ``buffers`` returned before it.
            say: tells the user.

        Returns:
            Where it goes on: ``now`` itself, or another one where it was rolled back.

        Raises:
            TrainingError: on every rank: it does not go on.
        """
        self._adapter.set_local_buffers(self._task.model, buffers)
        assert self._task.not_finite
        what = self._tell(now, part, self._task.not_finite)
        if self._mode == "skip" and self._in_a_row < MOST_SKIPPED:
            self._in_a_row += 1
            now.skipped += 1
            now.position = Position(part.start.epoch, part.start.consumed + part.global_count)
            now.metrics = None
            say(f"{what}: the update is left out")
            return now
        left_out = [*now.left_out, [part.start.epoch, part.start.consumed]]
        if self._mode == "rollback" and len(left_out) <= MOST_ROLLBACKS:
            now = self._checkpoints.roll_back()
            now.left_out = left_out
            say(f"{what}: back to step {now.step}, and without that global batch")
            return now
        tried = {
            "skip": f"; {MOST_SKIPPED} updates before it were left out",
            "rollback": f"; {MOST_ROLLBACKS} global batches were left out before",
        }
        raise agreed(
            TrainingError(
                f"{what}{tried.get(self._mode, '')}. Lower --lr, look at the data, or "
                "let --on-nan skip or rollback leave such global batches out"
            )
        )

    def _tell(self, now: TrainState, part: Part, trouble: NotFinite) -> str:
        """Say which ranks' gradients were not finite; all ranks call it."""
        told = self._adapter.communicator.gather(trouble.own.encode())
        hosts = [facts.host for facts in self._adapter.ranks]
        ranks = [rank for rank, own in enumerate(told) if own]
        owners = ", ".join(f"{places([rank], hosts)}: {told[rank].decode()}" for rank in ranks[:4])
        return (
            f"the gradients of step {now.step + 1} (epoch {part.start.epoch + 1}) are not "
            f"finite, {trouble.parameter} first ({owners or 'of no single rank for sure'})"
        )
