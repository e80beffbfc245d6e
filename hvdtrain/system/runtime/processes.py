"""Processes that end together: when one has failed the others are ended, and its exit code counts.

Signals that ask for a stop are handed on to them, and none is left when this process goes on.
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
POLL = 0.05  # seconds between two looks at the processes
# Seconds that the others have once one has failed: rank 0 has spoken for all of them; where it was
# another one, rank 0 has to tell from which checkpoint the training goes on.
AFTER_ROOT, AFTER_ANOTHER = 0.5, 3.0
AFTER_STOP = 15.0  # where one has left in good order after a signal


class Processes:
    """Processes that run, in the order of their ranks.

    Args:
        asked: signals that have come before.
    """

    def __init__(self, asked: Sequence[int] = ()) -> None:
        self.running: list[subprocess.Popen[bytes]] = []
        self.asked = list(asked)  # signals that came, in order
        self._before: dict[int, Any] = {}  # handlers
        self._deadline = float("inf")  # when those that are left are killed
        self._code = EXIT_OK  # of the first that did not end with 0
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

    def name(self, place: int) -> str:
        """Return how a user calls the process at ``place``."""
        return f"rank {place}"

    def hand_on(self, number: signal.Signals) -> None:
        """Let all hear that ``number`` came."""
        for process in self.running:
            process.send_signal(number)

    def kill(self) -> None:
        """End all, for certain."""
        self._killed = True
        for process in self.running:
            process.kill()
        for process in self.running:
            process.wait()

    def wait(self) -> int:
        """Wait until all have ended; return 0, or the code of the first that ended with another."""
        handed_on = 0
        while not self._have_ended():
            for number in self.asked[handed_on:]:
                handed_on += 1
                self.hand_on(signal.Signals(number))
                if self.asked.count(signal.SIGINT) > 1:  # as an impatient user expects
                    self._end_within(AFTER_ROOT)
            if time.monotonic() > self._deadline:
                self.kill()
            time.sleep(POLL)
        return 128 + self.asked[0] if self.asked and self._code > 128 else self._code

    def _note(self, number: int, _: FrameType | None) -> None:
        self.asked.append(number)

    def _have_ended(self) -> bool:
        """Return whether all have; note the first that failed."""
        codes = [process.poll() for process in self.running]
        # Those that lost one to a signal may be gone before it is: its code counts.
        failed = sorted(
            (signal_of(code) is None, place) for place, code in enumerate(codes) if code
        )
        lost = bool(failed) and not failed[0][0] and not self._killed
        if failed and (self._code == EXIT_OK or (lost and self._code == EXIT_FAILURE)):
            place = failed[0][1]
            code = codes[place] or EXIT_OK
            self._code = exit_code(code)
            if code < 0 and not self.asked:
                say(f"{self.name(place)} was ended by {signal_of(code) or f'signal {-code}'}")
            if code == EXIT_PREEMPTED:
                self._end_within(AFTER_STOP)
            else:
                self._end_within(AFTER_ANOTHER if place else AFTER_ROOT)
        return None not in codes

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline, time.monotonic() + seconds)


def signal_of(code: int) -> str | None:
    """Return the name of the signal that ended a process with ``code``, None if none did."""
    names = {128 + one: one.name for one in signal.Signals}
    return names.get(exit_code(code))


def exit_code(code: int) -> int:
    """Return what a shell makes of a ``returncode``: 128 + N after signal N."""
    return code if code >= 0 else 128 - code


def say(text: str) -> None:
    """Tell the user ``text``, in one line."""
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hvdtrain: {text}\n")
        sys.stderr.flush()
