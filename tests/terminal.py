"""A terminal for tests: recorded output with times, and the resulting screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tests.conftest import ROOT, end_session, environment

TOKENS = re.compile(r"\x1b\[(\d*)([A-Z])|\x1b\[[\d;]*m|(\r)|(\n)|([^\x1b\r\n]+)")


@dataclass(frozen=True)
class Recording:
    """Output of a command on its terminal."""

    code: int
    """Its exit code."""
    pieces: list[tuple[float, str]]
    """Seconds of the reader's clock, and the text that arrived then."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for _, text in self.pieces)

    def arrivals(self, text: str, end: str) -> list[float]:
        """Return the times of pieces with ``text`` before the first piece with ``end``."""
        times = []
        for at, piece in self.pieces:
            if end in piece:
                return times
            if text in piece:
                times.append(at)
        raise AssertionError(f"{end!r} never came:\n{self.text}")


def record(
    command: Sequence[str], *, columns: int = 100, interrupt: Sequence[str] = (), **extra: str
) -> Recording:
    """Run ``command`` on a new terminal and record its output.

    Args:
        command: the command.
        columns: width of the terminal.
        interrupt: texts; when the next one appears, Ctrl-C is sent.
        extra: environment variables.
    """
    controller, device = pty.openpty()
    fcntl.ioctl(device, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    due, unread = list(interrupt), b""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(TERM="xterm-256color", **extra),
        stdin=device,
        stdout=device,
        stderr=device,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # to receive Ctrl-C
    )
    os.close(device)
    pieces: list[tuple[float, bytes]] = []
    try:
        while select.select([controller], [], [], 240)[0]:
            try:
                data = os.read(controller, 65_536)
            except OSError:  # Linux raises it at the end
                break
            now = time.monotonic()
            unread += data
            if due and due[0].encode() in unread:
                due, unread = due[1:], b""
                os.write(controller, b"\x03")
            if pieces and now - pieces[-1][0] < 0.1:  # too fast to be distinguished
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + data)
            else:
                pieces.append((now, data))
        code = process.wait(60)
    finally:
        end_session(process.pid)
        process.wait()
        os.close(controller)
    return Recording(code, [(at, data.decode(errors="replace")) for at, data in pieces])


def screen(written: str) -> list[str]:
    """Return the rows of a terminal of unlimited height after ``written``."""
    rows, row, column = [""], 0, 0
    assert "\x1b" not in TOKENS.sub("", written)
    for count, code, back, down, text in TOKENS.findall(written):
        if code == "A":
            row = max(0, row - int(count))
        elif code == "K":
            assert count == "2"
            rows[row] = ""
        elif code:
            raise AssertionError(f"an unknown code {code}")
        elif back:
            column = 0
        elif down:
            row, column = row + 1, 0
            rows += [""] * (row + 1 - len(rows))
        elif text:
            rows[row] = rows[row].ljust(column)[:column] + text + rows[row][column + len(text) :]
            column += len(text)
    return rows
