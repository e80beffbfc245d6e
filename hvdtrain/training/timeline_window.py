"""``--timeline``: Horovod's timeline of a window of steps.

Horovod can start and stop its timeline at run time if HOROVOD_TIMELINE is DYNAMIC on all ranks
when it starts. Only rank 0 writes. With its response cache Horovod does not record when each rank
was ready, so the cache is disabled for the whole of a recorded run; a timeline requested by
HOROVOD_TIMELINE itself is left to Horovod, except for the cache.

The recorded steps do not count for the throughput: writing the timeline takes time.
"""

from __future__ import annotations

import logging
import math
import os
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.config.options import Options
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.system.files import Output

log = logging.getLogger(__name__)

DYNAMIC = "DYNAMIC"


def prepare(
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
            f"--timeline {options.timeline} and HOROVOD_TIMELINE={outside} contradict each other: "
            "use one"
        )
    if options.timeline:
        environ["HOROVOD_TIMELINE"] = DYNAMIC
    if options.timeline or outside != DYNAMIC:
        environ.setdefault("HOROVOD_CACHE_CAPACITY", "0")


class TimelineWindow:
    """Starts the timeline before the window's first step, and stops it after its last one."""

    def __init__(
        self, options: Options, adapter: CommonAdapter, environ: Mapping[str, str] = os.environ
    ) -> None:
        self.adapter = adapter
        self.file = str(options.timeline) if options.timeline else None
        self._stream: Output | None = None
        self._horovods = self.file
        if options.timeline and adapter.world.is_writer:
            output = Output(options.timeline, "--timeline")
            if output.is_stream:  # Horovod seeks in its file, and would wait for a pipe's reader
                self._stream = output
                handle, self._horovods = tempfile.mkstemp(prefix="hvdtrain-timeline-")
                os.close(handle)
        first, end = options.timeline_steps or (0, None)
        self.first, self.end = first, math.inf if end is None else end
        outside = environ.get("HOROVOD_TIMELINE", DYNAMIC)
        self._everything = outside != DYNAMIC  # Horovod itself records the whole run
        self._open = False
        self.recorded = outside if self._everything else None
        """The file in which steps of this run were recorded, None if none were."""

    def enter(self, step: int) -> None:
        """Start the timeline before the window's first step; ``step`` of them are done."""
        if self._horovods is None or self.recorded or not self.first <= step < self.end:
            return
        self.adapter.start_timeline(self._horovods)
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
            self.adapter.stop_timeline()
            self._open = False
