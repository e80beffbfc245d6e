"""Processes that end together: if one fails, the others are ended, and its exit code is returned.

Stop signals are forwarded to them, and none of them is left running afterwards.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any, Self

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, EXIT_PREEMPTED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
POLL = 0.05  # seconds between polls of the processes
# Seconds until the others are killed after a failure: of rank 0, which reports for all ranks; of
# another rank, as rank 0 still has to report the checkpoint to resume from.
AFTER_ROOT, AFTER_ANOTHER = 0.5, 3.0
AFTER_STOP = 15.0  # after one has ended in an orderly way after a signal


class Processes:
    """Running processes, in the order of their ranks.

    Args:
        received: signals that have been received before.
    """

    def __init__(self, received: Sequence[int] = ()) -> None:
        self.running: list[subprocess.Popen[bytes]] = []
        self.received = list(received)  # signals, in order
        self._before: dict[int, Any] = {}  # handlers
        self._deadline = float("inf")  # when the remaining processes are killed
        self._code = EXIT_OK  # of the first that failed
        self._killed = False

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def name(self, index: int) -> str:
        """Return the name of process ``index`` for messages."""
        return f"rank {index}"

    def forward(self, number: signal.Signals) -> None:
        """Forward signal ``number`` to all processes."""
        for process in self.running:
            process.send_signal(number)

    def kill(self) -> None:
        """Kill all processes."""
        self._killed = True
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()

    def wait(self) -> int:
        """Wait until all have ended; return 0, or the exit code of the first that failed."""
        forwarded = 0
        while not self._have_ended():
            for number in self.received[forwarded:]:
                forwarded += 1
                self.forward(signal.Signals(number))
                if self.received.count(signal.SIGINT) > 1:  # a second Ctrl-C ends them at once
                    self._end_within(AFTER_ROOT)
            if time.monotonic() > self._deadline:
                self.kill()
            time.sleep(POLL)
        return 128 + self.received[0] if self.received and self._code > 128 else self._code

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)

    def _have_ended(self) -> bool:
        """Return whether all processes have ended; record the first that failed."""
        codes = [process.poll() for process in self.running]
        # Processes that lost a killed one may end before it; the killed one takes precedence.
        failed = sorted(
            (signal_of(code) is None, index) for index, code in enumerate(codes) if code
        )
        lost = bool(failed) and not failed[0][0] and not self._killed
        if failed and (self._code == EXIT_OK or (lost and self._code == EXIT_FAILURE)):
            index = failed[0][1]
            code = codes[index] or EXIT_OK
            self._code = exit_code(code)
            if code < 0 and not self.received:
                say(f"{self.name(index)} was ended by {signal_of(code) or f'signal {-code}'}")
            if code == EXIT_PREEMPTED:
                self._end_within(AFTER_STOP)
            else:
                self._end_within(AFTER_ANOTHER if index else AFTER_ROOT)
        return None not in codes

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


def signal_of(code: int) -> str | None:
    """Return the name of the signal that ended a process with ``code``, or None."""
    names = {128 + number: number.name for number in signal.Signals}
    return names.get(exit_code(code))


def exit_code(code: int) -> int:
    """Return the shell's exit code for a ``returncode``: 128 + N after signal N."""
    return code if code >= 0 else 128 - code


def say(text: str) -> None:
    """Print ``text`` on standard error, in one line."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hvdtrain: {text}\n")
        sys.stderr.flush()
