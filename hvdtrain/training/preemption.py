"""What asks a training to stop: it saves after the step in hand and leaves with code 75.

A signal, or the end of the job's walltime, which it does not wait for: PBS gives 10 s between TERM
and KILL, and mpirun gives its ranks about 2.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


def on_stop_signal(want_stop: Callable[[], None]) -> None:
    """Call ``want_stop`` when a batch system or a user asks this process to stop.

    PBS and Slurm send TERM (USR1 where asked to, ahead of time), a terminal INT. A second INT ends
    the process at once, as an impatient user expects.
    """

    def handle(number: int, _: FrameType | None) -> None:
        want_stop()
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in SIGNALS:
        signal.signal(number, handle)


RESERVE = 10.0  # seconds for the job's own last lines, and for a clock that is a little off
FIRST_SAVE = 10.0  # seconds that a save is taken to need until one was timed


@dataclass
class Walltime:
    """When the job of this process ends, and how long before that a training has to stop."""

    ends: float | None
    """Seconds since 1970; None: it has no end, or another rank watches it."""
    longest_save: float = FIRST_SAVE
    """Seconds of the slowest save so far."""

    def saved(self, seconds: float) -> None:
        """Take note that a save took ``seconds``."""
        self.longest_save = max(self.longest_save, seconds)

    def is_near(self, longest_step: float) -> bool:
        """Whether there is time for little more than a step and a save, twice over."""
        if self.ends is None:
            return False
        return time.time() + 2 * (longest_step + self.longest_save) + RESERVE > self.ends
