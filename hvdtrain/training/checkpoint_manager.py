"""Step 7 in the trainer: where a training stands, saved and found again."""

from __future__ import annotations

import uuid
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.config.options import Options
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import STATE_FILE
from hvdtrain.steps.directory_lock import DirectoryLock
from hvdtrain.steps.sharding import Position
from hvdtrain.steps.summary import Stopped
from hvdtrain.system.files import check_writable
from hvdtrain.system.runtime.exit import agreed, process_status
from hvdtrain.workloads.task import Task


@dataclass
class TrainState:
    """Where a training stands: what a checkpoint holds besides the arrays."""

    step: int = 0  # updates done since the start of the training
    position: Position = field(default_factory=Position)  # the place that comes next
    samples: int = 0  # trained on since the start, over all ranks
    loss_sum: float = 0.0  # of the losses of this epoch's samples, of this rank
    loss_count: int = 0  # how many samples ``loss_sum`` is over
    metrics: dict[str, Any] | None = None  # on the test set after ``step``; None: not evaluated
    skipped: int = 0  # updates left out since the start: their gradients were not finite
    # Where the global batches begin that are left out after a rollback: [epoch, consumed].
    left_out: list[list[int]] = field(default_factory=list)


class CheckpointManager:
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

    def resume(self) -> TrainState:
        """Load the newest checkpoint, as ``--resume`` says; call ``broadcast_state`` after it.

        Returns:
            Where the training stands; at its start where there is nothing to resume.

        Raises:
            UsageError: on every rank: ``--resume must`` without a checkpoint, a foreign one, or a
                directory that cannot be written or that another training is using.
        """
        directory, mode = self.options.checkpoint_dir, self.options.resume
        if directory is None:
            return TrainState()
        root = self.adapter.communicator.on_root
        root(lambda: self._occupy(directory))
        if self.adapter.shards_state:
            self._check_shared(directory)
        if mode == "never":
            root(lambda: checkpoints.set_aside(directory))
            return TrainState()
        now = self._load(directory)
        if now is None and mode == "must":
            raise agreed(UsageError(f"--resume must: there is no checkpoint in {directory}"))
        return now or TrainState()

    def roll_back(self) -> TrainState:
        """Go back to the newest checkpoint, on all ranks.

        Raises:
            TrainingError: on every rank, if there is none.
        """
        assert self.options.checkpoint_dir is not None
        now = self._load(self.options.checkpoint_dir)
        if now is None:
            raise agreed(TrainingError("there is no checkpoint to go back to"))
        self.adapter.broadcast_state(self.task.model, self.task.optimizer)
        return now

    def _load(self, directory: Path) -> TrainState | None:
        state = self.adapter.load_checkpoint(
            directory, self.task.model, self.task.optimizer, origin=self.origin
        )
        if state is None:
            return None
        now = TrainState(
            **{one.name: state[one.name] for one in fields(TrainState) if one.name in state}
        )
        now.position = Position(**state["position"])
        if self.adapter.world.data_rank:  # one part carries the sums of the epoch so far
            now.loss_sum, now.loss_count = 0.0, 0
        self.path, self._saved = state["path"], _mark(now)
        return now

    def _occupy(self, directory: Path) -> None:
        check_writable(directory / STATE_FILE, "--checkpoint-dir")
        lock = DirectoryLock(directory)
        lock.take()
        process_status.at_exit.append(lambda _: lock.release())
        checkpoints.remove_partial(directory)
        self._lock = lock

    def _check_shared(self, directory: Path) -> None:
        """Raise ``UsageError`` on every rank where some do not see what rank 0 writes."""
        collectives = self.adapter.communicator
        name = collectives.broadcast_bytes(f".shared-{uuid.uuid4().hex}".encode()).decode()
        collectives.on_root((directory / name).touch)

        def look() -> None:
            if not (directory / name).exists():
                raise UsageError(
                    f"--checkpoint-dir {directory} is another directory than rank 0's: with "
                    f"--strategy {self.adapter.name} each rank writes a part of a checkpoint, so "
                    "give a directory on a file system that all hosts share"
                )

        try:
            collectives.together(look)
        finally:
            if self.adapter.world.is_writer:
                (directory / name).unlink(missing_ok=True)

    def _check_lock(self) -> None:
        if self._lock:
            self._lock.check()

    def save(self, now: TrainState, stopped: Stopped | None) -> None:
        """Write a checkpoint of ``now``, unless the newest one is the same.

        Args:
            now: where the training stands.
            stopped: why there is nothing left to do; None: there is.

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
            **asdict(now),
            "loss_sum": means["loss"] * count if count else 0.0,
            "loss_count": count,
            "stopped": stopped,  # for a chain of jobs
            "best": self.task.best,
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


def _mark(now: TrainState) -> tuple[Any, ...]:
    return now.step, now.position, now.metrics is not None
