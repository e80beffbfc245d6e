"""Windows of updates that are recorded: ``--timeline`` by Horovod, ``--profile`` by the framework.

These updates do not count for the throughput on any rank: recording and writing take time.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import secrets
import tempfile
from collections.abc import Mapping, MutableMapping
from contextlib import ExitStack
from pathlib import Path

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.framework import Profiler
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.system.files import Output
from hvdtrain.system.folder import Folder

log = logging.getLogger(__name__)

DYNAMIC = "DYNAMIC"


class _Window:
    """The updates from ``first``, counted from 0, to before ``end``; the end may be infinite."""

    def __init__(self, adapter: CommonAdapter, span: tuple[int, int | None]) -> None:
        self.adapter = adapter
        self.first, end = span
        self.end = math.inf if end is None else end
        self._open = False  # on all ranks
        self.recorded: str | None = None
        """The file or directory of what was recorded of this run, None if nothing was."""

    def _begins(self, step: int) -> bool:
        """Return whether the window's first update is next; ``step`` of them are done."""
        return self.recorded is None and self.first <= step < self.end


def prepare_timeline(
    options: Options, strategy: str, environ: MutableMapping[str, str] = os.environ
) -> None:
    """Set Horovod's variables in ``environ`` before it starts; every rank must call it.

    Raises:
        UsageError: the strategy does not use Horovod, or the whole run is recorded already.
    """
    outside = environ.get("HOROVOD_TIMELINE", DYNAMIC)
    if options.timeline and not STRATEGIES[strategy].has_timeline:
        raise UsageError(
            f"--timeline records Horovod's activity, and --strategy {strategy} does not use "
            "Horovod: omit it"
        )
    if options.timeline and outside != DYNAMIC:
        raise UsageError(
            f"--timeline {options.timeline} and HOROVOD_TIMELINE={outside} cannot be combined: "
            "omit one"
        )
    if options.timeline:
        environ["HOROVOD_TIMELINE"] = DYNAMIC
    if options.timeline or outside != DYNAMIC:
        environ.setdefault("HOROVOD_CACHE_CAPACITY", "0")


class TimelineWindow(_Window):
    """Starts the timeline before the window's first step, and stops it after its last one.

    Horovod can start and stop its timeline at run time if HOROVOD_TIMELINE is DYNAMIC on all ranks
    when it starts. Only rank 0 writes. With its response cache Horovod does not record when each
    rank was ready, so the cache is disabled for the whole of a recorded run; a timeline requested
    by HOROVOD_TIMELINE itself is left to Horovod, except for the cache.
    """

    def __init__(
        self, options: Options, adapter: CommonAdapter, environ: Mapping[str, str] = os.environ
    ) -> None:
        super().__init__(adapter, options.timeline_steps or (0, None))
        self.file = str(options.timeline) if options.timeline else None
        self._stream: Output | None = None
        self._horovods = self.file
        if options.timeline and adapter.world.is_writer:
            output = Output(options.timeline, "--timeline")
            if output.is_stream:  # Horovod seeks in its file, and would wait for a pipe's reader
                self._stream = output
                handle, self._horovods = tempfile.mkstemp(prefix="hvdtrain-timeline-")
                os.close(handle)
        outside = environ.get("HOROVOD_TIMELINE", DYNAMIC)
        self._everything = outside != DYNAMIC  # Horovod itself records the whole run
        self.recorded = outside if self._everything else None

    def enter(self, step: int) -> None:
        """Start the timeline before the window's first step; ``step`` of them are done."""
        if self._horovods is None or not self._begins(step):
            return
        self.adapter.strategy.start_timeline(self._horovods)
        self._open, self.recorded = True, self.file
        # No rank continues before rank 0 records: the beginning of its step would be missing.
        self.adapter.communicator.gather(b"")

    def leave(self, step: int) -> bool:
        """Stop the timeline after the window's last step; return whether ``step`` was recorded."""
        recorded = self._open or self._everything
        if step >= self.end:
            self._stop()
        return recorded

    def close(self) -> None:
        """Complete the file at the end of the training."""
        self._stop()
        if self._stream and self._horovods:
            record = Path(self._horovods)
            with self._stream.replacing() as stream:
                stream.write(record.read_bytes())
            self._stream.close()
            record.unlink()
        if self.file and not self.recorded and self.adapter.world.is_writer:
            span = f"{self.first}:{'' if self.end == math.inf else self.end}"
            log.warning("--timeline-steps %s: no such step was taken, nothing was recorded", span)

    def _stop(self) -> None:
        if self._open:
            self.adapter.strategy.stop_timeline()
            self._open = False


class ProfileWindow(_Window):
    """Starts the profiler before the window's first update, and stops it after its last one.

    All ranks wait for the writing of a trace.
    """

    def __init__(self, options: Options, adapter: CommonAdapter) -> None:
        super().__init__(adapter, options.profile or (0, 0))
        self.folder = options.profile_dir
        self._is_profiled = adapter.world.rank in options.profile_ranks
        self._profiler: Profiler | None = None
        self._span = ExitStack()  # of the current update
        self._number = 0  # of that update

    @property
    def file(self) -> Path:
        """The trace of this rank."""
        return self.folder / f"rank-{self.adapter.world.rank}.json.gz"

    def enter(self, step: int) -> None:
        """Start the profiler before the window's first update; ``step`` of them are done."""
        if self._begins(step):
            self._open, self.recorded = True, str(self.folder)
            if self._is_profiled:
                self._start()
        if self._open and self._number != step + 1:  # also if an update is repeated
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
            folder = Folder.named(self.folder)
            profiler.stop(partial)
            folder.rename(partial.name, self.file.name)
        except Exception as error:  # of the framework or the file system
            log.warning("--profile: %s cannot be written: %s", self.file, error)
            partial.unlink(missing_ok=True)
