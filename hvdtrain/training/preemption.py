"""What asks a training to stop: it saves after the step in hand and leaves with code 75.

A signal, or the end of the job's walltime, which it does not wait for: PBS gives 10 s between TERM
and KILL, and Open MPI's mpirun gives its ranks half a second (5) or two (4).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.system.runtime.detect import TORCHRUN, detect, is_restarted
from hvdtrain.system.runtime.exit import WAIT_FAILURE, announce, leave, process_status

ENDING = ("SIGTERM", "SIGINT")  # by which mpirun ends its ranks; it hands the others on
AGAIN = "run the same command again to go on"

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


def on_stop_signal(want_stop: Callable[[str], None]) -> None:
    """Call ``want_stop`` with the signal's name when this process is asked to stop.

    PBS and Slurm send TERM (USR1 or USR2 where asked to, ahead of time), a terminal INT. A second
    INT ends the process at once, as an impatient user expects.
    """

    def handle(number: int, _: FrameType | None) -> None:
        want_stop(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    for number in SIGNALS:
        signal.signal(number, handle)


def what_goes_on(*, anew: bool) -> str:
    """Return what comes after a stop; ``anew``: the ranks leave to be started anew at once."""
    if anew:
        return "the ranks start anew"
    if detect(os.environ).launcher == TORCHRUN and is_restarted(os.environ):
        return "the ranks go on from there when torchrun starts them anew, or the same command does"
    return AGAIN


def leave_on_signal(directory: Path | None, *, resumes: bool) -> None:
    """Leave on a signal that comes before ``on_stop_signal``: 75 where a checkpoint is there.

    Nothing is trained yet that could be lost, and the start may take longer than there is time.

    Args:
        directory: of the checkpoints; None leaves all signals as they are.
        resumes: whether the same command would go on from them.
    """
    if directory is None:
        return

    def end(name: str) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        found = checkpoints.newest_name(directory) if resumes else None
        if found:
            text = f"stopped before its first step; {directory / found} is there: {AGAIN}"
        else:
            text = "stopped before its first step: there is no checkpoint yet"
        if detect(os.environ).is_root:
            announce(f"{name}: {text}", mpirun_ends=name in ENDING)
        elif (
            not process_status.disconnect
        ):  # else MPI is there, and aborts where a rank stays behind
            time.sleep(WAIT_FAILURE)
        leave(EXIT_PREEMPTED if found else 128 + signal.Signals[name])

    on_stop_signal(end)


AGENT, POLL = 10.0, 0.05  # seconds for the agent to ask, and between two looks


def wait_for_agent(was_asked: Callable[[], bool]) -> None:
    """Wait, where torchrun starts ranks anew, until its agent has asked this rank to stop, too.

    Where the world changes each agent learns it in its own time, and all ranks stop when the first
    of them is asked. To its agent a rank that leaves unasked has failed, and uses up a restart.
    """
    end = time.monotonic() + AGENT
    by_torchrun = detect(os.environ).launcher == TORCHRUN and is_restarted(os.environ)
    while by_torchrun and not was_asked() and time.monotonic() < end:
        time.sleep(POLL)


RESERVE = 10.0  # seconds for the job's own last lines, and for a clock that is a little off
FIRST_SAVE = 10.0  # seconds that a save is taken to need until one was timed


@dataclass
class Walltime:
    """When the job of this process ends, and how long before that a training has to stop."""

    ends: float | None  # seconds since 1970; None: it has no end, or another rank watches it
    longest_save: float = FIRST_SAVE  # seconds of the slowest save so far

    def saved(self, seconds: float) -> None:
        """Take note that a save took ``seconds``."""
        self.longest_save = max(self.longest_save, seconds)

    def is_near(self, longest_step: float) -> bool:
        """Return whether there is time for little more than a step and a save, twice over."""
        if self.ends is None:
            return False
        return time.time() + 2 * (longest_step + self.longest_save) + RESERVE > self.ends
