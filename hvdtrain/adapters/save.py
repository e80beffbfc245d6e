"""Step 7 in two stages: the ranks write their files, then one of them commits the checkpoint.

In between all ranks agree that the files are complete and the replicas equal. In the background
each stage runs in a thread, without messages; the training learns from the flags that are summed
with the gradients that all ranks have finished one, and only then exchanges the results.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from hvdtrain.adapters.digests import DIFFERENT, compare
from hvdtrain.adapters.framework import Flags
from hvdtrain.adapters.state_view import Connected, Write
from hvdtrain.errors import CheckpointError, HvdtrainError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import State, Written
from hvdtrain.system.runtime.exit import is_failing, process_status
from hvdtrain.system.runtime.outlive import surviving_kill
from hvdtrain.system.runtime.waits import Waits

log = logging.getLogger(__name__)

NICE = 10  # added to the niceness of the thread, so that the training computes first

Result = TypeVar("Result")


def in_thread(action: Callable[[], Result]) -> Future[Result]:
    """Do ``action``, which must not send messages, in a thread of low priority.

    It is a daemon, since a program that fails must not wait for a disk.
    """
    future = Future[Result]()

    def run() -> None:
        with suppress(OSError):  # Linux has a priority per thread
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)
        try:
            future.set_result(action())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="checkpoint", daemon=True).start()
    return future


class Saving(Connected, Protocol):
    """What a save needs of its adapter."""

    waits: Waits
    stop_wanted: bool

    @property
    def flags_agreed(self) -> Flags:
        """For each flag, whether any rank had set it at the last update."""


class Status(Enum):
    """How far a save is."""

    PENDING = "all ranks write, or one of them commits"
    FAILED = "its error has not been raised yet"
    OVER = "it is complete, or its error was raised"


class Save:
    """A checkpoint that is being saved, as a future of its directory.

    All ranks must call its methods, in the same order: ``poll`` after updates, and ``result``
    before the program ends.

    Args:
        adapter: adapter of this rank.
        directory: directory of the checkpoints.
        write: function that writes this rank's files.
        sharded: whether each rank writes files; otherwise only rank 0.
        state: JSON values of the checkpoint.
        keep: number of recent checkpoints to keep.
        in_background: whether to write in threads; otherwise the save is over when it is created.
    """

    def __init__(
        self,
        adapter: Saving,
        directory: Path,
        write: Write,
        state: State,
        keep: int,
        *,
        sharded: bool,
        in_background: bool,
    ) -> None:
        self.step, self.status = int(state["step"]), Status.PENDING
        self._adapter, self._directory, self._state, self._keep = adapter, directory, state, keep
        self._write: Write | None = write
        self._sharded, self._in_background = sharded, in_background
        self._thread: Future[Any] | None = None  # the result of the last one
        self._outcome: Path | Exception | None = None
        self._stages = self._save(write)
        self._advance()
        if not in_background:
            self._complete()

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing in the background."""
        return self._thread is not None and not self._thread.done()

    def poll(self) -> bool:
        """Return whether the save is complete or has failed, without waiting for a disk.

        Call it after an update: the save is over a few updates after all ranks have written their
        files. If it has failed, ``result`` raises the error, or else the next save.
        """
        if self.status is Status.PENDING and not self._adapter.flags_agreed.saving:
            self._advance()
        return self.status is not Status.PENDING

    def result(self) -> Path:
        """Wait until the checkpoint is complete, and return its directory.

        Raises:
            CheckpointError: on every rank, if any rank could not write.
            TrainingError: on every rank, if a tensor is not finite.
            HvdtrainError: on every rank, if the replicas differ.
        """
        self._complete()
        self.status = Status.OVER
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None
        return self._outcome

    def settle(self) -> Path | None:
        """Wait as ``result`` does, but report as a warning that the checkpoint was not written."""
        try:
            return self.result()
        except CheckpointError as error:
            text = f"{error}. The next save tries again"
            self._adapter.communicator.on_root(lambda: log.warning("%s", text))
            return None

    def _complete(self) -> None:
        write, is_root = self._write, self._adapter.communicator.is_root

        def rescue() -> None:
            # The report of a failure has already named the checkpoint to resume from.
            if write and not is_failing():
                folder = checkpoints.begin(self._directory, self.step)
                files, _ = write(folder)
                self._commit(folder, files)

        writes_all = write and is_root and not self._sharded
        expected = self._adapter.stop_wanted
        with surviving_kill(rescue, expected=expected) if writes_all else nullcontext():
            while self.status is Status.PENDING:
                self._advance()

    def _advance(self) -> None:
        """Exchange the results of a stage, and begin the next one."""
        with self._adapter.waits.during("Save.result"):
            try:
                next(self._stages)
                return
            except StopIteration as end:
                self._outcome, self.status = end.value, Status.OVER
            except Exception as error:
                self._outcome, self.status = error, Status.FAILED
                if not isinstance(error, HvdtrainError):
                    raise
                directory = self._directory
                self._adapter.communicator.on_root(lambda: checkpoints.remove_partial(directory))
        self._write = self._thread = None  # release the memory of the state

    def _save(self, write: Write) -> Generator[None, None, Path]:
        """Save the checkpoint, and return its path; the training continues at each ``yield``."""
        communicator, directory = self._adapter.communicator, self._directory
        begun = communicator.on_root(lambda: checkpoints.begin(directory, self.step))
        folder = Path(communicator.gather_json(str(begun))[0])
        writing = self._start(lambda: write(folder))
        yield
        mine, digests = communicator.together(writing, alike=not self._sharded)
        compare(communicator, digests, DIFFERENT, when=f"after step {self.step} ")
        rows = communicator.gather_json(mine, list[Written])
        files = [file for row in rows for file in row]
        commit = partial(self._commit, folder, files)
        committing = self._start(commit) if communicator.is_root else commit
        yield
        communicator.on_root(committing)
        path = checkpoints.final_path(folder)
        process_status.checkpoint = str(path)
        return path

    def _start(self, action: Callable[[], Result]) -> Callable[[], Result]:
        """Begin ``action`` in the background; return the function that returns its result."""
        if not self._in_background:
            return action
        self._thread = future = in_thread(action)
        return future.result

    def _commit(self, folder: Path, files: list[Written]) -> Path:
        path = checkpoints.commit(folder, files, self._state)
        # Recorded at once: if a rank is lost now, the error message names this path.
        process_status.checkpoint = str(path)
        checkpoints.prune(path.parent, self._keep, path.name)
        return path
