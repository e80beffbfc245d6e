"""The terminal at which a person watches: whether there is one, how wide, and a line that changes.

Open MPI 5's mpirun passes the output of its ranks on by whole lines only, so each frame of a
changing line ends with a newline. It leaves the cursor on an empty line *above* what it drew: a
line that somebody else writes meanwhile (another rank, mpirun) comes to stand there, whole, and
the next frame moves down by one.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import sys
import time
from typing import NoReturn

from hvdtrain.system.runtime.detect import detect

BEFORE_FRAME = "\r\x1b[2K\n\x1b[2K"  # an empty line, then where the frame is drawn
AFTER_FRAME = "\x1b[2A\n"
ERASE = BEFORE_FRAME + AFTER_FRAME  # what was drawn
FIRST = 0.3  # seconds before a status is shown; what takes no longer needs none
EVERY = 1.0  # seconds between two frames of it


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


_drawing: tuple[int, int] | None = None  # the process that draws, and the pipe that it listens to


def begin(program: str) -> None:
    """Show what ``program`` is doing (``status``), and for how long already, until ``clear``.

    Rank 0 does so, where a person watches. A process of its own draws, because this one may not get
    to it: while it loads a library, no thread of Python's runs. It ends with this one. To be called
    early, while there are no threads yet.
    """
    global _drawing
    width, launch = columns(), detect(os.environ)
    if width is None or not launch.is_root:
        return
    ranks = f" on {launch.size} ranks" if launch.size > 1 else ""
    source, pipe = os.pipe()
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        os.close(pipe)
        _draw(source, f"hvdtrain {program}{ranks}", width)
    os.close(source)
    _drawing = process, pipe
    status("starting")


def status(text: str) -> None:
    """Say what is being done now, if ``begin`` was called."""
    if _drawing:
        with contextlib.suppress(BrokenPipeError):  # somebody has ended it
            os.write(_drawing[1], text.encode() + b"\n")


def clear() -> None:
    """End what ``begin`` began: the line is gone when this returns."""
    global _drawing
    if _drawing is None:
        return
    process, pipe = _drawing
    _drawing = None
    os.close(pipe)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)


def _draw(source: int, title: str, width: int) -> NoReturn:
    """Draw the last line that came from ``source``, and the seconds, until its other end closes."""
    start, text, drawn = time.monotonic(), "", False
    with contextlib.suppress(OSError):  # the terminal is gone
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with the rank, and not before
        while True:
            seconds = time.monotonic() - start
            wait = EVERY - seconds % EVERY if drawn else max(0.0, FIRST - seconds)
            if select.select([source], [], [], wait)[0]:
                news = os.read(source, 65_536)
                if not news:
                    break
                text = news.decode().splitlines()[-1]
                if not drawn:
                    continue
            drawn = True
            line = f"{title}: {text} ... {time.monotonic() - start:.0f} s"[:width]
            os.write(1, (BEFORE_FRAME + line + AFTER_FRAME).encode())
        if drawn:
            os.write(1, ERASE.encode())
    os._exit(0)
