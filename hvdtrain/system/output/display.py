"""Progress of long operations: a bar on a terminal, else a line every 30 s."""

from __future__ import annotations

import contextlib
import logging
import sys
import time

from rich import progress as bars
from rich.console import Console

log = logging.getLogger(__name__)

LINE_EVERY = 30.0  # seconds between progress lines without a terminal


class Display(contextlib.ExitStack):
    """Context that shows the progress of an operation on standard error."""

    def __init__(self) -> None:
        super().__init__()
        self._start = self._last_line = time.monotonic()
        self._bar: bars.Progress | None = None
        self._task = bars.TaskID(0)
        if sys.stderr.isatty():
            columns = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn())
            console = Console(stderr=True)
            self._bar = self.enter_context(
                bars.Progress(*columns, bars.TimeElapsedColumn(), console=console, transient=True)
            )
            self._task = self._bar.add_task("", total=None)

    def stage(self, text: str) -> None:
        """Begin the stage described by ``text``."""
        if self._bar:
            self._draw(text, None)
        else:
            self._line(text)

    def show(self, text: str, share: float | None = None) -> None:
        """Show the completed ``share`` of the stage, 0 to 1; None: unknown."""
        if self._bar:
            self._draw(text, share)
        elif time.monotonic() - self._last_line >= LINE_EVERY:
            self._line(text if share is None else f"{text} {100 * share:.0f} %")

    def _draw(self, text: str, share: float | None) -> None:
        assert self._bar is not None
        if share is None:  # ``update`` would keep the previous total
            self._bar.tasks[0].total = None
        self._bar.update(
            self._task, description=text, total=None if share is None else 1.0, completed=share or 0
        )

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        log.info("%4.0f s  %s", self._last_line - self._start, text)
