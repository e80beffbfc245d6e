"""Step 7 in the trainer: save and restore the progress of a training."""

from __future__ import annotations

import time
import uuid
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from hvdtrain.adapters.save import Save
from hvdtrain.errors import UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import STATE_FILE, State
from hvdtrain.steps.directory_lock import DirectoryLock
from hvdtrain.steps.sharding import Position
from hvdtrain.steps.summary import Saves, Stopped
from hvdtrain.system.files import check_folder, check_writable
from hvdtrain.system.folder import Folder
from hvdtrain.system.runtime.exit import agreed, process_status
from hvdtrain.tasks.task import LossScale
from hvdtrain.training.checks import SHOWN
from hvdtrain.training.plan import Session, origin_of
from hvdtrain.training.trackers import new_training_id


@dataclass
class TrainState:
    """The progress of a training: the values of a checkpoint in addition to the arrays."""

    step: int = 0  # number of updates since the start of the training
    position: Position = field(default_factory=Position)  # of the next global batch
    samples: int = 0  # number trained on since the start, over all ranks
    loss_sum: float = 0.0  # sum of the losses of this epoch's samples, of this rank
    loss_count: float = 0  # sum of the weights of these losses; of each sample 1 by default
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
            **origin_of(session.workload, session.options, session.plan),
            "training_samples": data.samples,
            **({"training_data_digest": data.digest[:SHOWN]} if data.digest else {}),
        }
        self.path: str | None = None
        self._saved: Any = None  # mark of the checkpoint at ``path``
        self._pending: PendingSave | None = None
        self.saves = Saves()
        self._last: float | None = None  # seconds of the last save, which is waited for
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
        if self.adapter.strategy.shards_state:
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
        check_folder(directory, f"--checkpoint-dir {directory}")
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
        collectives.on_root(lambda: Folder.named(directory).open(name, "xb").close())

        def check() -> None:
            try:
                Folder.named(directory, create=False).open(name, "rb").close()
            except OSError:
                raise UsageError(
                    f"--checkpoint-dir {directory} is another directory than rank 0's: with "
                    f"--strategy {self.adapter.name} each rank writes a part of a checkpoint: use "
                    "a directory on a file system that all hosts share"
                ) from None

        try:
            collectives.together(check)
        finally:
            if self.adapter.world.is_writer:
                Folder.named(directory).remove(name)

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
        sums = self.adapter.total(loss_sum=now.loss_sum, loss_count=now.loss_count)
        state = {
            **asdict(replace(now, loss_scale=self.task.loss_scale)),
            **sums,
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
        self._count(seconds, seconds, saves=1)
        if last:
            self._last = seconds

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
        return every is not None and step % every == 0

    def figures(self, steps_per_epoch: int) -> Saves | None:
        """Return the saves of this run; one follows each ``steps_per_epoch`` updates anyway."""
        saves, last = self.saves, self._last
        if not saves.count:
            return None
        if last is None or saves.count == 1:
            cost = saves.stopped / saves.count
        else:
            cost = (saves.stopped - last) / (saves.count - 1)
        every = min(self.options.checkpoint_every or steps_per_epoch, steps_per_epoch)
        return replace(saves, cost=cost, every=every)

    def poll(self) -> None:
        """Complete the pending save if all ranks have written it; all call it after an update.

        Raises:
            TrainingError, HvdtrainError: on every rank, as ``save``; that a checkpoint could not be
                written is a warning.
        """
        if self.options.checkpoint_dir and self.options.save == "async":
            self.adapter.reserve_copies(self.task.model, self.task.optimizer)
        if self._pending and self._pending.save.poll():
            self.finish()

    def finish(self) -> None:
        """Wait for the pending save, and report if it failed; all ranks must call it."""
        if self._pending is None:
            return
        began = time.monotonic()
        pending, self._pending = self._pending, None
        if path := pending.save.settle():
            self.path, self._saved = str(path), pending.mark
        now = time.monotonic()
        self._count(now - began, now - pending.began, waited=now - began)

    def _count(self, stopped: float, whole: float, *, saves: int = 0, waited: float = 0.0) -> None:
        """Count seconds for which the training stood still, for a save of ``whole`` seconds."""
        before = self.saves
        self.saves = Saves(
            count=before.count + saves,
            stopped=before.stopped + stopped,
            waited=before.waited + waited,
            longest=max(before.longest, whole),
        )


def train_state(state: State) -> TrainState:
    """Return the progress in the ``state`` of a checkpoint, with its ``path``.

    Raises:
        UsageError: a value is missing or of another type, on every rank.
    """
    try:
        now = msgspec.convert(state, TrainState)
        counts = now.step, now.samples, now.skipped, now.loss_count, *astuple(now.position)
        if min(counts) < 0:
            raise msgspec.ValidationError("a count is negative")
        return now
    except (msgspec.ValidationError, UnicodeEncodeError) as error:  # half a surrogate pair
        raise agreed(
            UsageError(
                f"{state['path']} is not the checkpoint of a trainer ({error}). "
                f"{checkpoints.RESTART}"
            )
        ) from error


def _mark(now: TrainState) -> tuple[Any, ...]:
    return now.step, now.position, now.metrics is not None
