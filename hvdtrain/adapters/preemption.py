"""Requests to stop a training: it saves within a few steps and exits with code 75.

A request is a signal or the approaching end of the job's walltime: PBS leaves only 10 s between
TERM and KILL, and Open MPI's mpirun half a second (version 5) or two (version 4).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.system.runtime.detect import detect, is_restarted
from hvdtrain.system.runtime.exit import (
    FAILURE_TIMEOUT,
    announce,
    claim_stderr,
    leave,
    process_status,
)
from hvdtrain.system.runtime.outlive import is_ended_by_mpirun
from hvdtrain.system.runtime.walltime import IS_NEAR, Walltime, seconds_left

ENDING = ("SIGTERM", "SIGINT")  # mpirun ends its ranks on these and forwards the others
AGAIN = "run the same command again to continue"
NOTHING_SAVED = "nothing was saved (no --checkpoint-dir)"
# Stop signals of batch systems, of `hvdtrain launch` and of the terminal.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGURG, signal.SIGINT)


def on_stop_signal(want_stop: Callable[[str], None]) -> dict[int, Any]:
    """Call ``want_stop`` with the signal's name when this process receives a stop signal.

    PBS and Slurm send TERM (if requested, URG, USR1 or USR2 ahead of time), a terminal INT. A
    second INT ends the process at once.
    """

    def handle(number: int, _: FrameType | None) -> None:
        want_stop(signal.Signals(number).name)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    return {number: signal.signal(number, handle) or signal.SIG_DFL for number in SIGNALS}


def resume_hint() -> str:
    """Return how the training continues after a stop."""
    if is_restarted(os.environ):
        return "the ranks continue when torchrun restarts them, or when the same command is run"
    return AGAIN


def leave_on_signal(directory: Path | None, *, resumes: bool) -> None:
    """Exit on a signal that comes before ``on_stop_signal``, with 75 if there is a checkpoint.

    There is nothing to save yet, and completing the start may take too long. Without checkpoints a
    signal ends this process as usual, at any time; rank 0 reports it if mpirun would end the ranks
    without a message.

    Args:
        directory: directory of the checkpoints; None: nothing is saved.
        resumes: whether the same command would resume from them.
    """
    if directory is None:
        process_status.interrupted = f"interrupted; {NOTHING_SAVED}"
        if is_ended_by_mpirun():
            signal.signal(signal.SIGTERM, _leave_without_checkpoint)
        return

    def end(name: str) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        newest = checkpoints.newest_name(directory) if resumes else None
        if newest:
            text = f"stopped before its first step; {directory / newest} exists: {AGAIN}"
        else:
            text = "stopped before its first step: there is no checkpoint yet"
        if detect(os.environ).is_root:
            announce(f"{name}: {text}", mpirun_ends=name in ENDING)
        elif not process_status.disconnect:  # once MPI has started, it aborts if a rank remains
            time.sleep(FAILURE_TIMEOUT)
        leave(EXIT_PREEMPTED if newest else 128 + signal.Signals[name])

    on_stop_signal(end)


def _leave_without_checkpoint(number: int, _: FrameType | None) -> None:
    """Exit, and report the end on rank 0, which must not wait for a rank that has exited.

    mpirun sends the same signal after the loss of a rank: the failure detector reports that first.
    """
    if detect(os.environ).is_root:
        time.sleep(LOST)
        claim_stderr()
        announce(f"{signal.Signals(number).name}: stopped; {NOTHING_SAVED}", mpirun_ends=True)
        leave(128 + number)
    timer = threading.Timer(FAILURE_TIMEOUT, leave, [128 + number])
    timer.daemon = True
    timer.start()


LOST = 0.1  # seconds for the failure detector to notice the loss of a rank; mpirun waits 0.5
AGENT, POLL = 10.0, 0.05  # seconds until the agent's request at most, and between two checks


def wait_for_agent(stop_requested: Callable[[], bool]) -> None:
    """Wait, if torchrun restarts ranks, until its agent has asked this rank to stop, too.

    Agents learn of a changed world at different times, and all ranks stop at the first request.
    A rank that exits without a request of its agent counts as failed, and uses up a restart.
    """
    end = time.monotonic() + AGENT
    while is_restarted(os.environ) and not stop_requested() and time.monotonic() < end:
        time.sleep(POLL)


class Preemption:
    """Requests to stop a training before its end, and their announcement.

    Args:
        communicator: communicator of all ranks.
        on_request: called when this rank is asked to stop.

    Attributes:
        reason: why this rank was asked to stop; empty: it was not.
        walltime: walltime of the job, known on rank 0 since ``watch``.
    """

    def __init__(
        self, communicator: Communicator, on_request: Callable[[], None] = lambda: None
    ) -> None:
        self.communicator, self._on_request = communicator, on_request
        self.reason = ""
        self.walltime = Walltime(ends=None)
        self._former: dict[int, Any] = {}  # previous signal handlers

    def listen(self) -> None:
        """Take stop signals as requests, until ``ignore``."""
        if not self._former:
            self._former = on_stop_signal(self.want_stop)

    def ignore(self) -> None:
        """Restore the previous signal handlers."""
        while self._former:
            signal.signal(*self._former.popitem())

    def watch(self) -> None:
        """Watch on rank 0 for the end of the walltime."""
        if self.communicator.is_root:
            left = seconds_left()
            # From now on the time of the day may be changed.
            self.walltime.ends = None if left is None else time.monotonic() + left

    def watch_walltime(self, longest_step: float) -> None:
        """Request a stop if the walltime is near; ``longest_step``: seconds to the next check."""
        if self.walltime.is_near(longest_step):
            self.want_stop(IS_NEAR)

    def want_stop(self, reason: str) -> None:
        """Request a stop on this rank."""
        if not self.reason:
            self.reason = reason
            self._on_request()

    def agree(self) -> tuple[str, int]:
        """Return a reason to stop, and the first rank that has it; all ranks must call it.

        All return the same: an empty reason if there is none.
        """
        reasons = [reason.decode() for reason in self.communicator.gather(self.reason.encode())]
        reason = next(filter(None, reasons), "")
        return reason, reasons.index(reason)

    def announce(self, reason: str, rank: int, done: str) -> None:
        """Report on rank 0 why the training stops and what was ``done``."""
        if self.communicator.is_root:
            cause = f"{reason} on rank {rank}" if rank else reason
            text = f"{cause}: {done}: {resume_hint()}"
            announce(text, mpirun_ends=self.reason in ENDING)
