"""Step 7 in the trainer: where a training stands, saved and found again."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.files import check_writable
from hvdtrain.launch import ending
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.directory_lock import DirectoryLock
from hvdtrain.steps.sharding import Position
from hvdtrain.training.options import Options
from hvdtrain.workloads.base import Task


@dataclass
class Standing:
    """Where a training stands: what a checkpoint holds besides the arrays."""

    step: int = 0
    """Updates done since the start of the training."""
    position: Position = field(default_factory=Position)
    """The place in the epoch that comes next."""
    samples: int = 0
    """Samples trained on since the start, over all ranks."""
    loss_sum: float = 0.0
    """Sum of the losses of this epoch's samples, of this rank."""
    loss_count: int = 0
    """How many samples ``loss_sum`` is over."""
    evaluation: dict[str, Any] | None = None
    """Metrics on the test set after ``step``; None where it was not evaluated there."""
    skipped: int = 0
    """Updates left out since the start, because their gradients were not finite."""
    left_out: list[list[int]] = field(default_factory=list)
    """Where the global batches begin that are left out after a rollback: [epoch, consumed]."""


class Keeper:
    """Saves a training's checkpoints and resumes from them, as the options say.

    All ranks hold one and call its methods together; rank 0 alone reads and writes.
    """

    def __init__(
        self, options: Options, adapter: CommonAdapter, task: Task, origin: dict[str, Any]
    ) -> None:
        self.options, self.adapter, self.task, self.origin = options, adapter, task, origin
        self.path: str | None = None
        self._saved: Any = None  # what told the checkpoint at ``path`` from others
        self._lock: DirectoryLock | None = None

    def resume(self) -> Standing:
        """Load the newest checkpoint, as ``--resume`` says; call ``broadcast_state`` after it.

        Returns:
            Where the training stands; at its start where there is nothing to resume.

        Raises:
            UsageError: on every rank: ``--resume must`` without a checkpoint, a foreign one, or a
                directory that cannot be written or that another training is using.
        """
        directory, mode = self.options.checkpoint_dir, self.options.resume
        if directory is None:
            return Standing()
        root = self.adapter.communicator.on_root
        root(lambda: self._occupy(directory))
        if mode == "never":
            root(lambda: checkpoints.set_aside(directory))
            return Standing()
        now = self._load(directory)
        if now is None and mode == "must":
            raise ending.agreed(UsageError(f"--resume must: there is no checkpoint in {directory}"))
        return now or Standing()

    def roll_back(self) -> Standing:
        """Go back to the newest checkpoint, on all ranks.

        Raises:
            TrainingError: on every rank, if there is none.
        """
        assert self.options.checkpoint_dir is not None
        now = self._load(self.options.checkpoint_dir)
        if now is None:
            raise ending.agreed(TrainingError("there is no checkpoint to go back to"))
        self.adapter.broadcast_state(self.task.model, self.task.optimizer)
        return now

    def _load(self, directory: Path) -> Standing | None:
        state = self.adapter.load_checkpoint(
            directory, self.task.model, self.task.optimizer, origin=self.origin
        )
        if state is None:
            return None
        writes = self.adapter.world.is_writer  # one rank carries the sums of the epoch so far
        now = Standing(
            step=state["step"],
            position=Position(**state["position"]),
            samples=state["samples"],
            loss_sum=state["loss_sum"] if writes else 0.0,
            loss_count=state["loss_count"] if writes else 0,
            evaluation=state["metrics"],
            skipped=state.get("skipped", 0),
            left_out=state.get("left_out", []),
        )
        self.path, self._saved = state["path"], _mark(now)
        return now

    def _occupy(self, directory: Path) -> None:
        check_writable(directory / checkpoints.STATE_FILE, "--checkpoint-dir")
        lock = DirectoryLock(directory)
        lock.take()
        ending.at_leaving.append(lambda _: lock.release())
        checkpoints.remove_partial(directory)
        self._lock = lock

    def _check_lock(self) -> None:
        if self._lock:
            self._lock.check()

    def save(self, now: Standing) -> None:
        """Write a checkpoint of ``now``, unless the newest one is the same.

        Raises:
            CheckpointError: on every rank, if it could not be written.
            TrainingError: on every rank, if the weights are not finite; nothing is written.
        """
        mark = _mark(now)
        if self.options.checkpoint_dir is None or self._saved == mark:
            return
        self.adapter.communicator.on_root(self._check_lock)
        means, count = self.adapter.average_metrics(now.loss_count, loss=now.loss_sum)
        state = {
            "step": now.step,
            "position": {"epoch": now.position.epoch, "consumed": now.position.consumed},
            "samples": now.samples,
            "loss_sum": means["loss"] * count if count else 0.0,
            "loss_count": count,
            "metrics": now.evaluation,
            "skipped": now.skipped,
            "left_out": now.left_out,
            "origin": self.origin,
        }
        path = self.adapter.save_checkpoint(
            self.options.checkpoint_dir,
            self.task.model,
            self.task.optimizer,
            state=state,
            keep=self.options.keep,
        )
        self._saved, self.path = mark, str(path)


def _mark(now: Standing) -> tuple[Any, ...]:
    return now.step, now.position, now.evaluation is not None
