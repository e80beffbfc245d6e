"""Standard error: progress of long operations, and without unwanted output of libraries."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich import progress as bars

log = logging.getLogger(__name__)

LINE_EVERY = 30.0  # seconds between progress lines without a terminal


class Display(contextlib.ExitStack):
    """Context that shows the progress of an operation: a bar on a terminal, else some lines."""

    def __init__(self) -> None:
        super().__init__()
        self._start = self._last_line = time.monotonic()
        self._bar: bars.Progress | None = None
        if sys.stderr.isatty():
            from rich import progress as bars
            from rich.console import Console

            columns = (bars.TextColumn("{task.description}", markup=False), bars.BarColumn())
            console = Console(stderr=True)
            self._bar = self.enter_context(
                bars.Progress(*columns, bars.TimeElapsedColumn(), console=console, transient=True)
            )
            self._bar.add_task("", total=None)

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
        task = self._bar.tasks[0]
        if share is None:  # ``update`` would keep the previous total
            task.total = None
        total = None if share is None else 1.0
        self._bar.update(task.id, description=text, total=total, completed=share or 0)

    def _line(self, text: str) -> None:
        self._last_line = time.monotonic()
        log.info("%4.0f s  %s", self._last_line - self._start, text)


@contextlib.contextmanager
def without(drop: Callable[[bytes], Any]) -> Iterator[None]:
    """Hold back this process's standard error, and write it at the end without unwanted lines.

    All lines are written if an error is raised. Does nothing if standard error is closed.

    Args:
        drop: returns whether to drop a line, which includes its line end.
    """
    try:
        original = os.dup(2)
    except OSError:
        yield
        return
    sys.stderr.flush()
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        keep_all = True
        try:
            yield
            keep_all = False
        finally:
            sys.stderr.flush()
            os.dup2(original, 2)
            held.seek(0)
            with os.fdopen(original, "wb") as out:  # sys.stderr may be a notebook's
                out.writelines(line for line in held if keep_all or not drop(line))
