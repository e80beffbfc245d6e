"""Step 7 in two stages: the ranks write their files, then one of them commits the checkpoint.

In between all ranks agree that the files are complete and the replicas equal. In the background
each stage runs in a thread, without messages; the training learns from the flags that are summed
with the gradients that all ranks have finished one, and only then exchanges the results.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Generic, TypeVar

from hvdtrain.adapters.state_view import Contribution, digests_of
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import CheckpointError, HvdtrainError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import State, Written
from hvdtrain.system.runtime.exit import is_failing, process_status
from hvdtrain.system.runtime.outlive import surviving_kill
from hvdtrain.system.runtime.waits import Waits

log = logging.getLogger(__name__)

NICE = 10  # added to the niceness of the thread, so that the training computes first

Result = TypeVar("Result")


class _Stage(Generic[Result]):
    """An action of this rank: done by a thread from now on, or when its result is needed.

    In a thread it must not send messages. The thread is a daemon, since a program that fails must
    not wait for a disk.
    """

    def __init__(self, action: Callable[[], Result], *, in_background: bool) -> None:
        self._action, self._future = action, Future[Result]() if in_background else None
        if in_background:
            threading.Thread(target=self._run, name="checkpoint", daemon=True).start()

    @property
    def is_busy(self) -> bool:
        """Whether the thread is still running."""
        return self._future is not None and not self._future.done()

    def result(self) -> Result:
        """Return or raise what the action does."""
        return self._future.result() if self._future else self._action()

    def _run(self) -> None:
        assert self._future
        with suppress(OSError):  # Linux has a priority per thread
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
        try:
            self._future.set_result(self._action())
        except BaseException as error:
            self._future.set_exception(error)


class Save:
    """A checkpoint that is being saved; all ranks must call its methods, in the same order.

    A training calls ``done`` after its updates, and ``wait`` before the program ends.

    Args:
        communicator: communicator of all ranks.
        directory: directory of the checkpoints.
        contribution: what this rank writes.
        state: JSON values of the checkpoint.
        keep: number of recent checkpoints to keep.
        waits: counts the calls of all ranks.
        all_have_written: function that returns whether, at the last update, no rank was writing.
        in_background: whether to write in a thread; otherwise the files are written in ``wait``.
        must_stop: function that returns whether a stop was requested: this process may be killed.
    """

    def __init__(
        self,
        communicator: Communicator,
        directory: Path,
        contribution: Contribution,
        state: State,
        keep: int,
        *,
        waits: Waits,
        all_have_written: Callable[[], bool],
        must_stop: Callable[[], bool],
        in_background: bool,
    ) -> None:
        self.all_have_written = all_have_written
        self.step = int(state["step"])
        self._communicator, self._directory, self._state = communicator, directory, state
        self._keep, self._waits, self._must_stop = keep, waits, must_stop
        self._in_background = in_background
        self._contribution: Contribution | None = contribution
        self._writing: _Stage[tuple[list[Written], Mapping[str, bytes]]] | None = None
        self._committing: _Stage[Path] | None = None  # done on rank 0
        self._path: Path | None = None
        self._error: HvdtrainError | None = None
        self.is_reported = False  # whether it is complete, or its error was raised
        try:
            begun = communicator.on_root(lambda: checkpoints.begin(directory, self.step))
        except CheckpointError as error:
            self._end(error)
            return
        self._folder = Path(os.fsdecode(communicator.broadcast_bytes(os.fsencode(str(begun)))))
        folder = self._folder
        self._writing = _Stage(
            lambda: (contribution.write(folder), digests_of(contribution.replicated)),
            in_background=in_background,
        )

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return bool(self._path or self._error)

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing in the background."""
        stage = self._committing or self._writing
        return stage is not None and stage.is_busy

    def done(self) -> bool:
        """Return whether the save is complete or has failed, without waiting for a disk.

        Call it after an update: the save is over a few updates after all ranks have written their
        files. If it has failed, ``wait`` raises the error, or else the next save.
        """
        if not self.is_over and self.all_have_written():
            self._advance()
        return self.is_over

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its directory.

        Raises:
            CheckpointError: on every rank, if any rank could not write.
            TrainingError: on every rank, if a tensor is not finite.
            HvdtrainError: on every rank, if the replicas differ.
        """
        self.complete()
        self.is_reported = True
        if self._error:
            raise self._error
        assert self._path
        return self._path

    def settle(self) -> Path | None:
        """Wait as ``wait`` does, but report as a warning that the checkpoint was not written."""
        try:
            return self.wait()
        except CheckpointError as error:
            text = f"{error}. The next save tries again"
            self._communicator.on_root(lambda: log.warning("%s", text))
            return None

    def complete(self) -> None:
        """Wait as ``wait`` does; an error is raised later, by it or by the next save."""
        write_all = self._contribution and self._contribution.write_all

        def rescue() -> None:
            # The report of a failure has already named the checkpoint to resume from.
            if write_all and not is_failing():
                write_all()

        with surviving_kill(rescue, expected=self._must_stop()) if write_all else nullcontext():
            while not self.is_over:
                self._advance()

    def _advance(self) -> None:
        """Finish a stage: exchange its results, and begin the next one."""
        with self._waits.during("Save.wait"):
            try:
                if self._committing:
                    self._share(self._committing)
                else:
                    self._agree()
            except HvdtrainError as error:
                directory = self._directory
                self._communicator.on_root(lambda: checkpoints.remove_partial(directory))
                self._end(error)

    def _agree(self) -> None:
        """Compare what all ranks have written, and begin to commit it on rank 0."""
        contribution, writing = self._contribution, self._writing
        assert contribution and writing
        mine, digests = self._communicator.together(writing.result, alike=not contribution.sharded)
        contribution.compare(digests)
        rows = self._communicator.gather_json(mine, list[Written])
        files = [file for row in rows for file in row]
        folder, state, keep = self._folder, self._state, self._keep

        def commit() -> Path:
            path = checkpoints.commit(folder, files, state)
            # Recorded at once: if a rank is lost now, the error message names this path.
            process_status.checkpoint = str(path)
            checkpoints.prune(path.parent, keep, path.name)
            return path

        in_background = self._in_background and self._communicator.is_root
        self._committing = _Stage(commit, in_background=in_background)

    def _share(self, committing: _Stage[Path]) -> None:
        """Send the path of the complete checkpoint to all ranks."""
        path = self._communicator.on_root(committing.result)
        sent = self._communicator.broadcast_bytes(os.fsencode(str(path)))
        process_status.checkpoint = os.fsdecode(sent)
        self._path = Path(process_status.checkpoint)
        self._end()

    def _end(self, error: HvdtrainError | None = None) -> None:
        """Release the memory of the state."""
        self._error = error
        self.is_reported = error is None
        self._contribution = self._writing = self._committing = None
