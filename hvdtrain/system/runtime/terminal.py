"""The terminal at which a person watches: whether there is one, how wide, and a line that changes.

Open MPI 5's mpirun passes the output of its ranks on by whole lines only, so each frame of a
changing line ends with a newline. It leaves the cursor on an empty line *above* what it drew: a
line that somebody else writes meanwhile (another rank, mpirun) comes to stand there, whole, and
the next frame moves down by one.
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

from hvdtrain.errors import EXIT_INTERRUPTED
from hvdtrain.system.runtime.detect import detect

BEFORE_FRAME = "\r\x1b[2K\n\x1b[2K"  # an empty line, then where the frame is drawn
AFTER_FRAME = "\x1b[2A\n"
ERASE = BEFORE_FRAME + AFTER_FRAME  # what was drawn
FIRST = 0.3  # seconds before a status is shown; what takes no longer needs none
EVERY = 1.0  # seconds between two frames of it
SOONEST = 0.5  # the same where its text changes


def columns() -> int | None:
    """Return the columns of the terminal where a person sees standard output; None: nobody does.

    mpirun gives its ranks a terminal of its own making wherever its own output goes; where this
    process is its child, mpirun's output is the one that counts.
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
        # A terminal that nobody told its size says 0.
        return os.get_terminal_size(handle).columns or shutil.get_terminal_size().columns
    except OSError:  # a file or a pipe
        return None
    finally:
        os.close(handle)


@dataclass(frozen=True)
class _Drawer:
    """The process that draws."""

    process: int
    pipe: int  # that it listens to
    handle: int  # where it draws: 1 or 2


_drawer: _Drawer | None = None


def begin(program: str) -> None:
    """Show what ``program`` is doing (``status``), and for how long already, until ``clear``.

    Rank 0 does so, where a person watches. A process of its own draws, because this one may not get
    to it: while it loads a library, no thread of Python's runs. It ends with this one. To be called
    early, while there are no threads yet.
    """
    width, launch = columns(), detect(os.environ)
    if width is None or not launch.is_root:
        return
    ranks = f" on {launch.size} ranks" if launch.size > 1 else ""
    _start(1, width, f"hvdtrain {program}{ranks}: ")
    status("starting")


@contextlib.contextmanager
def working(text: str) -> Iterator[None]:
    """Show what a command does, and for how long already, until the block has ended.

    On standard error, since standard output is the command's result; nothing where that is no
    terminal. Within another such block it is one of its ``status``es.
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
    """Return where a command draws, 1 or 2, and the columns there; None: nobody watches."""
    launch = detect(os.environ)
    if launch.launcher:  # which gives its ranks a terminal at standard output alone
        width = columns() if launch.is_root else None
        return None if width is None else (1, width)
    with contextlib.suppress(OSError):  # a file or a pipe
        return 2, os.get_terminal_size(2).columns or shutil.get_terminal_size().columns
    return None


def status(text: str) -> None:
    """Say what is being done now, if somebody is shown it."""
    if _drawer:
        with contextlib.suppress(BrokenPipeError):  # somebody has ended it
            os.write(_drawer.pipe, " ".join(text.split()).encode(errors="replace") + b"\n")


def clear() -> None:
    """End what ``begin`` began: the line is gone when this returns."""
    global _drawer
    if _drawer is None:
        return
    ending, _drawer = _drawer, None
    os.close(ending.pipe)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(ending.process, 0)


class Handler(logging.StreamHandler[TextIO]):
    """Writes the log of a command in place of what ``working`` has drawn."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line; it may be longer than the screen is wide, so it needs the room."""
        erased = ERASE if _drawer and _drawer.handle == 2 else ""
        return erased + super().format(record)


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
    """Draw the last line that came from ``source``, and the seconds, until its other end closes."""
    start, text, drawn = time.monotonic(), "", 0.0
    with contextlib.suppress(OSError):  # the terminal is gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the rank, and not before
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # not as its parent does
        while True:
            seconds = time.monotonic() - start
            wait = EVERY - seconds % EVERY if drawn else max(0.0, FIRST - seconds)
            if select.select([source], [], [], wait)[0]:
                news = os.read(source, 65_536)
                if not news:
                    break
                text = news.decode(errors="replace").splitlines()[-1]
                if time.monotonic() < (drawn + SOONEST if drawn else start + FIRST):
                    continue
            drawn = time.monotonic()
            end = f" ... {drawn - start:.0f} s"
            line = f"{title}{text}"[: max(0, width - len(end))] + end
            os.write(handle, (BEFORE_FRAME + line[:width] + AFTER_FRAME).encode())
        if drawn:
            os.write(handle, ERASE.encode())
    os._exit(0)


def main() -> int:
    """Run ``TEXT COMMAND...`` of ``sys.argv`` and show the text meanwhile; return the exit code."""
    text, *words = sys.argv[1:]
    try:
        with working(text):
            return subprocess.run(words, check=False).returncode
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
