"""``--profile``: the framework's profile of a window of updates, on some ranks.

On all ranks these updates do not count for the throughput: profiling takes time, and so does the
writing of a trace, for which all ranks wait.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from contextlib import ExitStack
from pathlib import Path

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.profiler import Profiler
from hvdtrain.config.options import Options

log = logging.getLogger(__name__)


class ProfileWindow:
    """Starts the profiler before the window's first update, and stops it after its last one."""

    def __init__(self, options: Options, adapter: CommonAdapter) -> None:
        first, end = options.profile or (0, 0)
        self.first, self.end = first, end or 0
        self.adapter, self.folder = adapter, options.profile_dir
        self._is_profiled = adapter.world.rank in options.profile_ranks
        self._profiler: Profiler | None = None
        self._span = ExitStack()  # of the current update
        self._number = 0  # of that update
        self._open = False  # on all ranks
        self.recorded: str | None = None
        """The directory of the traces, None if no update was profiled."""

    @property
    def file(self) -> Path:
        """The trace of this rank."""
        return self.folder / f"rank-{self.adapter.world.rank}.json.gz"

    def enter(self, step: int) -> None:
        """Start the profiler before the window's first update; ``step`` of them are done."""
        if not self._open and self.first <= step < self.end and self.recorded is None:
            self._open, self.recorded = True, str(self.folder)
            if self._is_profiled:
                self._start()
        if self._number != step + 1:  # also if an update is repeated
            self._begin(step + 1)

    def leave(self, step: int, *, pauses: bool = False) -> bool:
        """Stop the profiler after the window's last update; return whether ``step`` was in it.

        ``pauses``: an evaluation or the end of the training follows, which belong to no update. All
        ranks wait for the traces: the time counts for this update.
        """
        if not self._open:
            return False
        if step < self.end and pauses:
            self._span.close()
        elif step < self.end:
            self._begin(step + 1)  # with the wait for its batch
        else:
            self._stop()
            self.adapter.communicator.wait_for_all()
        return True

    def close(self, *, discards: bool = False) -> None:
        """End at the end of the training; ``discards``: there is no time to write the trace."""
        if self._open and discards:
            if self.adapter.world.is_writer:
                log.warning("--profile: stopped before update %d, no trace is written", self.end)
            self._open, self.recorded = False, None
        elif self._open:
            self._stop()
        elif self.end and self.recorded is None and self.adapter.world.is_writer:
            log.warning("--profile %d:%d: no such update was made", self.first, self.end)

    def _start(self) -> None:
        try:
            self._profiler = self.adapter.start_profiler()
        except Exception as error:  # of the framework, e.g. if the user's task profiles, too
            log.warning("--profile: rank %d: %s", self.adapter.world.rank, error)
            return
        mark = self._profiler.mark
        self.adapter.waits.mark = lambda call: mark(f"communication: {call}")

    def _begin(self, number: int) -> None:
        """End the span of an update, and begin that of the next."""
        self._span.close()
        self._number = number
        if self._profiler:
            self._span.enter_context(self._profiler.step(number))

    def _stop(self) -> None:
        self._span.close()
        self._open = False
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self.adapter.waits.mark = contextlib.nullcontext
        # A random name: the framework would follow a link that others have put there.
        partial = self.folder / f".{secrets.token_hex(8)}.partial.json.gz"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiler.stop(partial)
            partial.replace(self.file)
        except Exception as error:  # of the framework or the file system
            log.warning("--profile: %s cannot be written: %s", self.file, error)
            partial.unlink(missing_ok=True)
