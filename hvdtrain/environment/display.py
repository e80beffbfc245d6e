"""Showing how far a build is: a moving bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hvdtrain.environment import build_log

log = logging.getLogger(__name__)

LINE_EVERY = 30.0  # seconds between two lines where there is no terminal


class Display:
    """The progress of one build, on standard error."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._last_line = self._start
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if sys.stderr.isatty():
            columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("Horovod", total=None)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def stage(self, name: str) -> None:
        """Begin a stage."""
        if self._bar:
            self._bar.update(self._task, description=name, total=None)
        else:
            self._line(name)

    def show(self, progress: build_log.Progress) -> None:
        """Show how far the compilation is."""
        if self._bar:
            self._bar.update(
                self._task,
                description=progress.stage,
                total=None if progress.percent is None else 100,
                completed=progress.percent or 0,
            )
        elif time.monotonic() - self._last_line >= LINE_EVERY:
            done = "" if progress.percent is None else f" {progress.percent} %"
            self._line(f"{progress.stage}{done}")

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        log.info("%4.0f s  %s", self._last_line - self._start, text)
