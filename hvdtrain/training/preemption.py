"""Signals that ask a training to stop: it saves after the step in hand and leaves with code 75."""

from __future__ import annotations

import signal
from collections.abc import Callable
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
