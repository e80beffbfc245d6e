"""What asks a training to stop: it saves after the step in hand and leaves with code 75.

A signal, or the end of the job's walltime, which it does not wait for: PBS gives 10 s between TERM
and KILL, and Open MPI's mpirun gives its ranks half a second (5) or two (4).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.errors import EXIT_PREEMPTED
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.system.runtime import elastic
from hvdtrain.system.runtime.detect import TORCHRUN, detect, is_elastic, is_restarted
from hvdtrain.system.runtime.exit import (
    WAIT_FAILURE,
    announce,
    be_the_first_to_speak,
    is_ended_by_mpirun,
    leave,
    process_status,
    start_anew,
)
from hvdtrain.system.runtime.walltime import Walltime, ends_at

ENDING = ("SIGTERM", "SIGINT")  # by which mpirun ends its ranks; it hands the others on
AGAIN = "run the same command again to go on"
NOTHING_SAVED = "nothing was saved (no --checkpoint-dir)"
ANOTHER = "another rank was asked to stop"  # and this one was not
HOSTS_CHANGED = "the hosts have changed"

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
    """Leave on a signal that comes before ``on_stop_signal``: 75 if a checkpoint is there.

    Nothing is trained yet that could be lost, and the start may take longer than there is time.
    Without checkpoints a signal ends this process as usual, at any time; rank 0 reports it if
    mpirun would end the ranks without a word.

    Args:
        directory: of the checkpoints; None: nothing is saved.
        resumes: whether the same command would go on from them.
    """
    if directory is None:
        process_status.interrupted = f"interrupted; {NOTHING_SAVED}"
        if is_ended_by_mpirun():
            signal.signal(signal.SIGTERM, _leave_without_checkpoint)
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


def _leave_without_checkpoint(number: int, _: FrameType | None) -> None:
    """Report the end on rank 0, which must not meanwhile wait for a rank that has left.

    It is mpirun's signal, too, after another rank is lost: its failure detector reports that first.
    """
    if detect(os.environ).is_root:
        time.sleep(LOST)
        be_the_first_to_speak()
        announce(f"{signal.Signals(number).name}: stopped; {NOTHING_SAVED}", mpirun_ends=True)
        leave(128 + number)
    timer = threading.Timer(WAIT_FAILURE, leave, [128 + number])
    timer.daemon = True
    timer.start()


LOST = 0.2  # seconds for the failure detector to notice that a rank is lost; mpirun waits 0.5
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


class Preemption:
    """What asks a training to stop before its end, and what comes after that.

    What one rank is asked reaches the others with the gradients, by ``adapter.stop_wanted``.
    """

    def __init__(self, adapter: CommonAdapter) -> None:
        self.adapter = adapter
        self.walltime = Walltime(ends=None)
        self._why = ANOTHER

    def listen(self) -> None:
        """Stop on a signal from now on; on rank 0 also before the walltime, and for new slots."""
        on_stop_signal(self._want_stop)
        if self.adapter.world.is_writer:
            self.walltime = Walltime(ends_at())
            if is_elastic(os.environ):
                elastic.watch_hosts(lambda: self._want_stop(HOSTS_CHANGED))

    def watch_walltime(self, longest_step: float) -> None:
        """Ask for a stop where the walltime is near; ``longest_step``: seconds to the next look."""
        if self.walltime.is_near(longest_step):
            self._want_stop("the walltime is near")

    def _want_stop(self, why: str) -> None:
        if not self.adapter.stop_wanted or self._why == HOSTS_CHANGED:
            self.adapter.stop_wanted, self._why = True, why

    def announce(self, done: str) -> None:
        """Say why the training stops, and what is ``done``; all ranks call it.

        Where nothing but the slots of an elastic job has changed, each leaves to be started anew.
        """
        anew = is_elastic(os.environ) and self._only_hosts_changed()
        if self.adapter.world.is_writer:
            text = f"{self._why}: {done}: {what_goes_on(anew=anew)}"
            announce(text, mpirun_ends=self._why in ENDING)
        if anew:
            start_anew()

    def _only_hosts_changed(self) -> bool:
        """Return whether no rank was asked to stop for another reason; all ranks call it."""
        asked = self._why if self.adapter.stop_wanted else HOSTS_CHANGED
        return set(self.adapter.communicator.gather(asked.encode())) == {HOSTS_CHANGED.encode()}

    def wait_for_agent(self) -> None:
        """Wait for the agent of torchrun to ask this rank, as ``wait_for_agent`` says."""
        wait_for_agent(lambda: self._why != ANOTHER)
