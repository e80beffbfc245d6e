"""Step 7 in the trainer: save and restore the progress of a training."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import STATE_FILE
from hvdtrain.steps.directory_lock import DirectoryLock
from hvdtrain.steps.sharding import Position
from hvdtrain.steps.summary import Stopped
from hvdtrain.system.files import check_writable
from hvdtrain.system.runtime.exit import agreed, process_status
from hvdtrain.training.plan import Session, weights_origin


@dataclass
class TrainState:
    """The progress of a training: the values of a checkpoint in addition to the arrays."""

    step: int = 0  # number of updates since the start of the training
    position: Position = field(default_factory=Position)  # of the next global batch
    samples: int = 0  # number trained on since the start, over all ranks
    loss_sum: float = 0.0  # sum of the losses of this epoch's samples, of this rank
    loss_count: int = 0  # number of samples in ``loss_sum``
    # On the test set after ``step``; None: not evaluated. A task's own may be other than numbers.
    metrics: dict[str, Any] | None = None
    skipped: int = 0  # number of updates skipped since the start: gradients were not finite
    # Start of each global batch that is skipped after a rollback: [epoch, consumed].
    left_out: list[list[int]] = field(default_factory=list)


class CheckpointManager:
    """Saves a training's checkpoints and resumes from them, according to the options.

    All ranks must call its methods together; only rank 0 reads and writes.
    """

    def __init__(self, session: Session) -> None:
        self.options, self.adapter, self.task = session.options, session.adapter, session.task
        self.origin = {
            **weights_origin(session.workload, session.options, session.plan),
            "optimizer": session.options.optimizer,
            "training_samples": session.task.train.samples,
            "seed": session.options.seed,
        }
        self.path: str | None = None
        self._saved: Any = None  # mark of the checkpoint at ``path``
        self._check_lock: Callable[[], None] = lambda: None

    def resume(self) -> TrainState:
        """Return the progress of the newest checkpoint, according to ``--resume``, or of the start.

        Then call ``broadcast_state``.

        Raises:
            UsageError: on every rank: ``--resume must`` without a checkpoint, a checkpoint of
                another training, or a directory that is not writable or in use.
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
        """Restore the newest checkpoint, on all ranks.

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
        now = msgspec.convert(state, TrainState)
        if self.adapter.world.data_rank:  # only data rank 0 continues the sums of this epoch
            now.loss_sum, now.loss_count = 0.0, 0
        self.path, self._saved = state["path"], _mark(now)
        return now

    def _occupy(self, directory: Path) -> None:
        check_writable(directory / STATE_FILE, "--checkpoint-dir")
        lock = DirectoryLock(directory)
        lock.take()
        process_status.at_exit.append(lambda _: lock.release())
        checkpoints.remove_partial(directory)
        self._check_lock = lock.check

    def _check_shared(self, directory: Path) -> None:
        """Raise ``UsageError``, on every rank, if some do not see the files of rank 0."""
        collectives = self.adapter.communicator
        name = collectives.broadcast_bytes(f".shared-{uuid.uuid4().hex}".encode()).decode()
        collectives.on_root((directory / name).touch)

        def check() -> None:
            if not (directory / name).exists():
                raise UsageError(
                    f"--checkpoint-dir {directory} is another directory than rank 0's: with "
                    f"--strategy {self.adapter.name} each rank writes a part of a checkpoint: use "
                    "a directory on a file system that all hosts share"
                )

        try:
            collectives.together(check)
        finally:
            if self.adapter.world.is_writer:
                (directory / name).unlink(missing_ok=True)

    def save(self, now: TrainState, stopped: Stopped | None) -> None:
        """Write a checkpoint of ``now``, unless the newest one is the same.

        ``stopped`` is the reason for which the training has ended; None: it has not.

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
