"""A terminal for tests: what comes when on it, and what then stands there."""

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
    """What a command wrote to its terminal."""

    code: int
    """Its exit code."""
    pieces: list[tuple[float, str]]
    """Seconds of the reader's clock, and what arrived then; what came together is one piece."""

    @property
    def text(self) -> str:
        """All of it."""
        return "".join(text for _, text in self.pieces)

    def arrivals(self, text: str, end: str) -> list[float]:
        """When the pieces that hold ``text`` arrived, up to the first that holds ``end``."""
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
    """Run ``command`` on a terminal of its own, which is read as a person does: at once.

    Args:
        command: what to run.
        columns: of the terminal.
        interrupt: texts; each time the next one appears, Ctrl-C is pressed.
        extra: variables of its environment.
    """
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    due, unread = list(interrupt), b""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(TERM="xterm-256color", **extra),
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # whose Ctrl-C it hears
    )
    os.close(its)
    pieces: list[tuple[float, bytes]] = []
    try:
        while select.select([ours], [], [], 240)[0]:
            try:
                data = os.read(ours, 65_536)
            except OSError:  # Linux says so at the end
                break
            now = time.monotonic()
            unread += data
            if due and due[0].encode() in unread:
                due, unread = due[1:], b""
                os.write(ours, b"\x03")
            if pieces and now - pieces[-1][0] < 0.1:  # no eye tells them apart
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + data)
            else:
                pieces.append((now, data))
        code = process.wait(60)
    finally:
        end_session(process.pid)
        process.wait()
        os.close(ours)
    return Recording(code, [(at, data.decode(errors="replace")) for at, data in pieces])


def screen(written: str) -> list[str]:
    """The rows of a terminal of endless height after ``written``; other codes are an error."""
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
