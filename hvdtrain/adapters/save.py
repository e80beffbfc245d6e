"""Step 7 in two stages: the ranks write their files, then one of them commits the checkpoint.

In between all ranks agree that the files are complete and the replicas equal. In the background
each stage runs in a thread, without messages; the training learns from the flags that are summed
with the gradients that all ranks have finished one, and only then exchanges the results.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from hvdtrain.adapters.state_view import Contribution, digests_of
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import State, Written
from hvdtrain.system.runtime.exit import process_status
from hvdtrain.system.runtime.outlive import surviving_kill

NICE = 10  # added to the niceness of the thread, so that the training computes first


@functools.cache
def _thread() -> ThreadPoolExecutor:
    """Return the one thread that writes, of lower priority than the training."""

    def give_way() -> None:
        with suppress(OSError):  # Linux has a priority per thread
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + NICE)

    return ThreadPoolExecutor(1, "checkpoint", initializer=give_way)


class Save:
    """A checkpoint that is being saved; all ranks must call the methods together.

    Args:
        communicator: communicator of all ranks.
        folder: directory of the incomplete checkpoint, which rank 0 has created.
        contribution: what this rank writes.
        state: JSON values of the checkpoint.
        keep: number of recent checkpoints to keep.
        in_background: whether to write in a thread; otherwise the files are written in ``wait``.

    Attributes:
        is_agreed: function that returns whether, at the last update, no rank was still writing.
    """

    def __init__(
        self,
        communicator: Communicator,
        folder: Path,
        contribution: Contribution,
        state: State,
        keep: int,
        *,
        is_agreed: Callable[[], bool],
        in_background: bool,
    ) -> None:
        self._communicator, self._folder, self._mine = communicator, folder, contribution
        self._state, self._keep = state, keep
        self._in_background, self.is_agreed = in_background, is_agreed
        self._finish: Callable[[Callable[[], Any]], None] = self._written
        self._stage = self._begin(self._write)
        self._path: Path | None = None
        self._error: HvdtrainError | None = None

    @property
    def is_over(self) -> bool:
        """Whether the checkpoint is complete, or has failed."""
        return bool(self._path or self._error)

    @property
    def is_busy(self) -> bool:
        """Whether this rank is still writing in the background."""
        return isinstance(self._stage, Future) and not self._stage.done()

    def done(self) -> bool:
        """Return whether the save is over, without waiting for a disk.

        Call it after an update. It is over a few updates after all ranks have written their files.
        """
        if not self.is_over and self.is_agreed():
            self._advance()
        return self.is_over

    def wait(self) -> Path:
        """Wait until the checkpoint is complete, and return its directory.

        Raises:
            CheckpointError: on every rank, if any rank could not write.
            HvdtrainError: on every rank, if a tensor is not finite, or the replicas differ.
        """
        write_all = self._mine.write_all
        if not self.is_over and write_all and self._communicator.is_root:
            with surviving_kill(write_all):
                self._complete()
        else:
            self._complete()
        if self._error:
            raise self._error
        assert self._path
        return self._path

    def _complete(self) -> None:
        while not self.is_over:
            self._advance()

    def _begin(self, action: Callable[[], Any]) -> Future[Any] | Callable[[], Any]:
        return _thread().submit(action) if self._in_background else action

    def _write(self) -> tuple[list[Written], Mapping[str, bytes]]:
        return self._mine.write(self._folder), digests_of(self._mine.replicated)

    def _advance(self) -> None:
        """Finish a stage: exchange its results, and begin the next one."""
        stage = self._stage
        try:
            self._finish(stage.result if isinstance(stage, Future) else stage)
        except HvdtrainError as error:
            self._error = error
            folder = self._folder.parent
            self._communicator.on_root(lambda: checkpoints.remove_partial(folder))

    def _written(self, result: Callable[[], tuple[list[Written], Mapping[str, bytes]]]) -> None:
        mine, digests = self._communicator.together(result, alike=not self._mine.sharded)
        self._mine.compare(digests)
        rows = self._communicator.gather_json(mine, list[Written])
        files = [file for row in rows for file in row]
        folder, state, keep = self._folder, self._state, self._keep

        def commit() -> Path:
            path = checkpoints.commit(folder, files, state, keep)
            # Recorded at once: if a rank is lost now, the error message names this path.
            process_status.checkpoint = str(path)
            return path

        self._finish = self._committed
        is_root = self._communicator.is_root
        self._stage = self._begin(commit) if is_root else lambda: None

    def _committed(self, result: Callable[[], Path]) -> None:
        path = self._communicator.on_root(result)
        sent = self._communicator.broadcast_bytes(os.fsencode(str(path)))
        process_status.checkpoint = os.fsdecode(sent)
        self._path = Path(process_status.checkpoint)
