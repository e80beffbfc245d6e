"""The user's terminal: whether output is shown on one, its width, and a status line.

Open MPI 5's mpirun forwards the output of its ranks by whole lines only, so each frame of the
status line ends with a newline. The cursor is left on an empty line *above* the frame: output of
another process (another rank, mpirun) appears there, and the next frame moves down by one line.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn, TextIO

from hvdtrain.errors import EXIT_INTERRUPTED, escaped
from hvdtrain.system.runtime.detect import detect

BEFORE_FRAME = "\r\x1b[2K\n\x1b[2K"  # an empty line, then the line of the frame
AFTER_FRAME = "\x1b[2A\n"
ERASE = BEFORE_FRAME + AFTER_FRAME  # an empty frame
FIRST = 0.3  # seconds before a status is shown
REDRAW_INTERVAL = 1.0  # seconds between frames
MIN_INTERVAL = 0.5  # the same if the text changes


def columns() -> int | None:
    """Return the width of the terminal that shows standard output; None: there is none.

    mpirun gives its ranks a pseudo-terminal even if its output is redirected; so for a child of
    mpirun the output of mpirun is inspected.
    """
    if not sys.stdout.isatty():
        return None
    if detect(os.environ).launcher is None:
        return shutil.get_terminal_size().columns
    try:
        handle = os.open(f"/proc/{os.getppid()}/fd/1", os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK)
    except OSError:  # a remote daemon's child, or no /proc
        return None
    try:
        # The size is 0 if it was never set.
        return os.get_terminal_size(handle).columns or shutil.get_terminal_size().columns
    except OSError:  # a file or a pipe
        return None
    finally:
        os.close(handle)


@dataclass(frozen=True)
class _Drawer:
    """The process that draws the status line."""

    process: int
    pipe: int  # from which it reads texts
    handle: int  # standard output or standard error: 1 or 2


_drawer: _Drawer | None = None


def begin(program: str) -> None:
    """Show the status of ``program`` and the elapsed time until ``clear``, on rank 0.

    Does nothing without a terminal. A forked process draws, as no Python thread runs while this
    process loads a library. Call it early, before any thread is started.
    """
    width, launch = columns(), detect(os.environ)
    if width is None or not launch.is_root:
        return
    ranks = f" on {launch.size} ranks" if launch.size > 1 else ""
    _start(1, width, f"hvdtrain {program}{ranks}: ")
    status("starting")


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show the status of a command and the elapsed time on standard error during the block.

    Does nothing without a terminal. A nested block sets the ``status`` of the outer one.
    """
    within, screen = _drawer is not None, _screen()
    if screen and not within:
        _start(*screen)
    try:
        status(text)
        yield
    finally:
        if not within:
            clear()


def _screen() -> tuple[int, int] | None:
    """Return the stream for the status of a command, 1 or 2, and its width; None: no terminal."""
    launch = detect(os.environ)
    if launch.launcher:  # a launcher gives its ranks a terminal at standard output only
        width = columns() if launch.is_root else None
        return None if width is None else (1, width)
    with contextlib.suppress(OSError):  # a file or a pipe
        return 2, os.get_terminal_size(2).columns or shutil.get_terminal_size().columns
    return None


def status(text: str) -> None:
    """Set the text of the status line, if it is shown."""
    if _drawer:
        with contextlib.suppress(BrokenPipeError):  # the drawing process was killed
            os.write(_drawer.pipe, " ".join(text.split()).encode(errors="replace") + b"\n")


def clear() -> None:
    """End the status line of ``begin``; it is erased when this returns."""
    global _drawer
    if _drawer is None:
        return
    ending, _drawer = _drawer, None
    os.close(ending.pipe)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(ending.process, 0)


class Handler(logging.StreamHandler[TextIO]):
    """Log handler that replaces the status line drawn by ``working``.

    Escape sequences do not reach the terminal: names and values in a message may be those of any
    file.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, after erasing the status line, as it may be wider than the screen."""
        erased = ERASE if _drawer and _drawer.handle == 2 else ""
        return erased + escaped(super().format(record), keep="\n\t")


def _start(handle: int, width: int, title: str = "") -> None:
    global _drawer
    source, pipe = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(pipe)
        _draw(source, handle, width, title)
    os.close(source)
    _drawer = _Drawer(process, pipe, handle)


def _draw(source: int, handle: int, width: int, title: str) -> NoReturn:
    """Draw the last line from ``source`` and the elapsed seconds until the pipe is closed."""
    start, text, drawn = time.monotonic(), "", 0.0
    with contextlib.suppress(OSError):  # the terminal was closed
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the rank
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not its parent's handler
        while True:
            seconds = time.monotonic() - start
            wait = (
                REDRAW_INTERVAL - seconds % REDRAW_INTERVAL if drawn else max(0.0, FIRST - seconds)
            )
            if select.select([source], [], [], wait)[0]:
                news = os.read(source, 65_536)
                if not news:
                    break
                text = news.decode(errors="replace").splitlines()[-1]
                if time.monotonic() < (drawn + MIN_INTERVAL if drawn else start + FIRST):
                    continue
            drawn = time.monotonic()
            end = f" ... {drawn - start:.0f} s"
            line = f"{title}{text}"[: max(0, width - len(end))] + end
            os.write(handle, (BEFORE_FRAME + line[:width] + AFTER_FRAME).encode())
        if drawn:
            os.write(handle, ERASE.encode())
    os._exit(0)


def main() -> int:
    """Run ``TEXT COMMAND...`` of ``sys.argv``, show TEXT meanwhile, return the exit code."""
    text, *words = sys.argv[1:]
    try:
        with working(text), subprocess.Popen(words, stderr=subprocess.PIPE) as process:
            for line in process.stderr or ():
                sys.stderr.buffer.write((ERASE.encode() if _drawer else b"") + line)
                sys.stderr.flush()
        return process.returncode
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
