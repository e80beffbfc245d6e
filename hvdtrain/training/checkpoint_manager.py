"""Step 7 in the trainer: save and restore the progress of a training."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.adapters.save import Save
from hvdtrain.errors import UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps import checkpoint_interval
from hvdtrain.steps.checkpoint_files import STATE_FILE, State
from hvdtrain.steps.directory_lock import DirectoryLock
from hvdtrain.steps.sharding import Position
from hvdtrain.steps.summary import Saves, Stopped
from hvdtrain.system.files import check_writable
from hvdtrain.system.runtime.exit import agreed, process_status
from hvdtrain.tasks.task import LossScale
from hvdtrain.training.checks import SHOWN
from hvdtrain.training.plan import Session, training_origin
from hvdtrain.training.tracking import new_training_id


@dataclass
class TrainState:
    """The progress of a training: the values of a checkpoint in addition to the arrays."""

    step: int = 0  # number of updates since the start of the training
    position: Position = field(default_factory=Position)  # of the next global batch
    samples: int = 0  # number trained on since the start, over all ranks
    loss_sum: float = 0.0  # sum of the losses of this epoch's samples, of this rank
    loss_count: int = 0  # number of samples in ``loss_sum``
    # On the test set after ``step``; None: not evaluated.
    metrics: dict[str, int | float] | None = None
    skipped: int = 0  # number of updates skipped since the start: gradients were not finite
    train_loss: float | None = None  # mean of the last epoch, over all ranks
    loss_scale: LossScale | None = None  # when it was saved
    training_id: str = field(default_factory=new_training_id)  # for trackers


@dataclass(frozen=True)
class PendingSave:
    """A save in the background."""

    save: Save
    mark: Any  # see ``_mark``
    began: float  # time.monotonic


class CheckpointManager:
    """Saves a training's checkpoints and resumes from them, according to the options.

    All ranks must call its methods together. Rank 0 reads and writes; if the state is sharded,
    each rank does.
    """

    def __init__(self, session: Session) -> None:
        self.options, self.adapter, self.task = session.options, session.adapter, session.task
        data = session.task.train
        self.origin = {
            **training_origin(session.workload, session.options, session.plan),
            "training_samples": data.samples,
            **({"training_data_digest": data.digest[:SHOWN]} if data.digest else {}),
        }
        self.path: str | None = None
        self._saved: Any = None  # mark of the checkpoint at ``path``
        self._pending: PendingSave | None = None
        self._due: int | None = None  # step of the next save with --checkpoint-every auto
        self._every: int | None = None  # updates between saves
        self.saves = Saves()
        self._last_saves = Saves()  # of these, those that are waited for
        self._lock: DirectoryLock | None = None  # on rank 0

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

    def _load(self, directory: Path) -> TrainState | None:
        state = self.adapter.load_checkpoint(
            directory, self.task.model, self.task.optimizer, origin=self.origin
        )
        if state is None:
            return None
        now = train_state(state)
        if not self.adapter.world.is_writer:  # only rank 0 continues the sums of this epoch
            now.loss_sum, now.loss_count = 0.0, 0
        if now.loss_scale:
            self.task.restore_loss_scale(now.loss_scale)
        self.path, self._saved = state["path"], _mark(now)
        self._compare_decoder(state["origin"].get("decoder"))
        return now

    def _compare_decoder(self, saved: object) -> None:
        """Add a note if another library, ``saved``, has decoded the images so far."""
        now = self.task.decoder
        if now and isinstance(saved, str) and saved.isalpha() and saved != now:
            note = (
                f"images are decoded by {now} from here on, and were by {saved}: their pixels "
                f"differ slightly; --decoder {saved} keeps them"
            )
            self.task.notes = (*self.task.notes, note)

    def _occupy(self, directory: Path) -> None:
        check_writable(directory / STATE_FILE, "--checkpoint-dir")
        lock = DirectoryLock(directory)
        lock.take()
        process_status.at_exit.append(lambda _: self.close())
        checkpoints.remove_partial(directory)
        self._lock = lock

    def close(self) -> None:
        """Release the directory; afterwards nothing can be saved."""
        lock, self._lock = self._lock, None
        if lock:
            checkpoints.remove_partial(lock.directory)
            lock.release()

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

    def save(self, now: TrainState, stopped: Stopped | None, *, last: bool = False) -> None:
        """Save a checkpoint of ``now``, unless the newest one is the same.

        Args:
            now: progress to save.
            stopped: reason for which the training has ended; None: it has not.
            last: whether to wait until the checkpoint is complete, as before the end; otherwise
                according to ``--save``.

        Raises:
            CheckpointError: on every rank, if it could not be written.
            TrainingError: on every rank, if the weights are not finite; nothing is written.
        """
        mark = _mark(now)
        if self.options.checkpoint_dir is None:
            return
        if not last and self._pending and self._pending.mark == mark:
            return
        self.finish()
        if self._saved == mark:
            return
        began = time.monotonic()
        self.adapter.communicator.on_root(self._check_lock)
        means, count = self.adapter.average_metrics(now.loss_count, loss=now.loss_sum)
        state = {
            **asdict(replace(now, loss_scale=self.task.loss_scale)),
            "loss_sum": means["loss"] * count if count else 0.0,
            "loss_count": count,
            "stopped": stopped,  # for a chain of jobs
            "best": self.task.best,
            "origin": {**self.origin, "decoder": self.task.decoder},
        }
        save = self.adapter.save_checkpoint(
            self.options.checkpoint_dir,
            self.task.model,
            self.task.optimizer,
            state=state,
            keep=self.options.keep,
            wait=last or self.options.save == "sync",
        )
        if isinstance(save, Path):
            self._saved, self.path = mark, str(save)
        else:
            self._pending = PendingSave(save, mark, began)
        seconds = time.monotonic() - began
        self.saves = _with_save(self.saves, seconds)
        if last:
            self._last_saves = _with_save(self._last_saves, seconds)

    def _check_lock(self) -> None:
        if self._lock:
            self._lock.check()

    @property
    def longest(self) -> float:
        """Maximum seconds of a save so far, the pending one included."""
        now = time.monotonic()
        return max(self.saves.longest, now - self._pending.began if self._pending else 0.0)

    def is_due(self, step: int) -> bool:
        """Return whether to save after ``step`` updates, according to ``--checkpoint-every``."""
        every = self.options.checkpoint_every
        if every != "auto":
            self._every = every
            return every is not None and step % every == 0
        if self._due is None:
            self._due = step - 1 + checkpoint_interval.FIRST
        return step >= self._due

    def choose_next(self, step: int, step_seconds: float) -> None:
        """Choose the step of the next save on rank 0, for all ranks, which must call it."""
        if self.options.checkpoint_every == "auto" and self.saves.count and step_seconds:
            interval = checkpoint_interval.best_interval(self._cost, self._between)
            interval = max(interval, self.saves.longest)  # only one can be written at a time
            chosen = max(1, round(interval / step_seconds))
            (self._every, *_) = self.adapter.communicator.gather_json(chosen, int)
            self._due = step + self._every

    @property
    def _cost(self) -> float:
        """Mean seconds for which a save stops the training; the last counts only if alone."""
        last = self._last_saves if self.saves.count > self._last_saves.count else Saves()
        return (self.saves.stopped - last.stopped) / (self.saves.count - last.count)

    @property
    def _between(self) -> float:
        """Mean seconds between failures."""
        hours = checkpoint_interval.hours_between_failures(self.adapter.world.hosts)
        return checkpoint_interval.HOUR * (self.options.mtbf or hours)

    def figures(
        self, steps_per_epoch: int, step_seconds: float | None, restart: float | None
    ) -> Saves | None:
        """Return the saves of this run, and what failures and saves cost in the mean.

        Args:
            steps_per_epoch: updates after which is saved anyway.
            step_seconds: seconds of a step; None: unknown.
            restart: seconds from the start to the first update; None: unknown.
        """
        if not self.saves.count:
            return None
        every = min(self._every or steps_per_epoch, steps_per_epoch)
        saves = replace(self.saves, cost=self._cost, every=every)
        if not step_seconds:
            return saves
        mean = checkpoint_interval.failure_costs(
            every * step_seconds,
            cost=self._cost,
            latency=max(self._cost, self.saves.longest),
            restart=restart or 0.0,
            between=self._between,
        )
        lost, goodput = mean.lost_seconds, mean.goodput
        return replace(saves, lost_per_failure=lost, goodput=goodput)

    def poll(self) -> None:
        """Complete the pending save if all ranks have written it; all call it after an update.

        Raises:
            TrainingError, HvdtrainError: on every rank, as ``save``; that a checkpoint could not be
                written is a warning.
        """
        if self.options.checkpoint_dir and self.options.save == "async":
            self.adapter.reserve_copies(self.task.model, self.task.optimizer)
        if self._pending and self._pending.save.done():
            self.finish()

    def finish(self) -> None:
        """Wait for the pending save, and report if it failed; all ranks must call it."""
        if self._pending is None:
            return
        began = time.monotonic()
        pending, self._pending = self._pending, None
        if path := pending.save.settle():
            self.path, self._saved = str(path), pending.mark
        now, saves = time.monotonic(), self.saves
        self.saves = replace(
            saves,
            stopped=saves.stopped + now - began,
            waited=saves.waited + now - began,
            longest=max(saves.longest, now - pending.began),
        )


def train_state(state: State) -> TrainState:
    """Return the progress in the ``state`` of a checkpoint, with its ``path``.

    Raises:
        UsageError: a value is missing or of another type, on every rank.
    """
    try:
        return msgspec.convert(state, TrainState)
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a surrogate pair
        raise agreed(
            UsageError(
                f"{state['path']} is not the checkpoint of a trainer ({error}). "
                f"{checkpoints.RESTART}"
            )
        ) from error


def _with_save(saves: Saves, seconds: float) -> Saves:
    """Return ``saves`` and one that has stopped the training for ``seconds``."""
    longest = max(saves.longest, seconds)
    return replace(saves, count=saves.count + 1, stopped=saves.stopped + seconds, longest=longest)


def _mark(now: TrainState) -> tuple[Any, ...]:
    return now.step, now.position, now.metrics is not None
