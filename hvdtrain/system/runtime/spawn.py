"""``--spawn N``: the trainer starts its ranks itself, on this host, where there is no launcher.

A rank is the same command line once more, with the variables that torchrun sets. It shares the
parent's terminal and streams, and its process group, so Ctrl-C and Ctrl-Z reach all of them. The
parent hands on the signals that reach it alone, ends the others where one rank has failed, and
leaves with the code of the rank that failed first. A rank ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, EXIT_PREEMPTED, UsageError
from hvdtrain.system.runtime.detect import ALONE, SPAWN, SPAWNED_BY, LaunchInfo, detect

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# A terminal gives Ctrl-C to the ranks too, where a second INT ends them; HUP they do not hear.
HANDED_ON = {signal.SIGINT: signal.SIGUSR1, signal.SIGHUP: signal.SIGUSR1}
POLL = 0.05  # seconds between two looks at the ranks
# Seconds that the others have once a rank has failed: rank 0 has spoken for all of them; where it
# was another one, rank 0 has to tell from which checkpoint the training goes on.
AFTER_ROOT, AFTER_ANOTHER = 0.5, 3.0
AFTER_STOP = 15.0  # where a rank has left in good order after a signal
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def spawned(size: int) -> LaunchInfo:
    """Return what rank 0 of ``size`` spawned ranks is told."""
    return LaunchInfo(SPAWN, 0, size, 0, size)


def check_alone(environ: Mapping[str, str]) -> None:
    """Raise ``UsageError`` where a launcher has started this process."""
    launch = detect(environ)
    if launch != ALONE:
        raise UsageError(
            f"--spawn starts ranks where there is no launcher, and {launch.launcher} started this "
            "process: leave the option out"
        )


def spawn(size: int, words: Sequence[str] | None = None) -> int:
    """Run this command line on ``size`` ranks of this host, and return the exit code.

    Args:
        size: how many.
        words: arguments of the interpreter; None: this process's own.
    """
    with socket.socket() as held, Ranks() as ranks:
        # Nobody else gets the port while it is held; rank 0 does, since it only says "reuse".
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        ranks.start(size, held.getsockname()[1], sys.orig_argv[1:] if words is None else words)
        return ranks.wait()


@dataclass
class Ranks:
    """The processes that this one has started; on leaving none of them is left."""

    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)  # by rank
    asked: list[int] = field(default_factory=list)  # signals that came, in order
    _before: dict[int, object] = field(default_factory=dict)
    _deadline: float | None = None  # when those that are left are killed
    _failed: tuple[int, int] | None = None  # the first rank that did not end with 0, and its code

    def __enter__(self) -> Ranks:
        for number in STOP_SIGNALS:
            if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._kill()
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def start(self, size: int, port: int, words: Sequence[str]) -> None:
        """Start ``size`` ranks, which meet at ``port``."""
        # They hear a signal once they have their handlers (``join``); until then it waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for rank in range(size):
                variables = _variables(rank, size, port)
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *words],
                        env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                    )
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def wait(self) -> int:
        """Wait until all have ended; return 0, or the code of the first that ended with another."""
        handed_on = 0
        while self._running():
            for number in self.asked[handed_on:]:
                handed_on += 1
                self._hand_on(signal.Signals(number))
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._kill()
            time.sleep(POLL)
        if self._failed is None:
            return EXIT_OK
        _, code = self._failed
        return 128 + self.asked[0] if self.asked and code > 128 else code

    def _note(self, number: int, _: FrameType | None) -> None:
        self.asked.append(number)

    def _hand_on(self, number: signal.Signals) -> None:
        for process in self.processes:
            process.send_signal(HANDED_ON.get(number, number))
        if self.asked.count(signal.SIGINT) > 1:  # as an impatient user expects
            self._end_within(AFTER_ROOT)

    def _running(self) -> bool:
        """Note who has ended; return whether any rank has not."""
        codes = [process.poll() for process in self.processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]
        if failed and self._failed is None:
            rank, code = failed[0]
            self._failed = rank, code if code > 0 else 128 - code
            if code < 0 and not self.asked:
                _say(f"rank {rank} was ended by {signal.Signals(-code).name}")
            if code == EXIT_PREEMPTED:
                self._end_within(AFTER_STOP)
            else:
                self._end_within(AFTER_ANOTHER if rank else AFTER_ROOT)
        return None in codes

    def _end_within(self, seconds: float) -> None:
        self._deadline = min(self._deadline or float("inf"), time.monotonic() + seconds)

    def _kill(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.wait()


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank, on one host."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, SPAWNED_BY: os.getpid()}
    return {name: str(value) for name, value in {**place, **meeting}.items()}


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        sys.stderr.write(f"hvdtrain: {text}\n")
        sys.stderr.flush()


def join(environ: Mapping[str, str] = os.environ) -> None:
    """Make this process, if ``spawn`` started it, a rank that hears signals and ends as it should.

    To be called once, when its handlers of signals are in place.
    """
    parent = environ.get(SPAWNED_BY)
    if parent is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):  # it has ended already
        os._exit(EXIT_FAILURE)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(STOP_SIGNALS) - {signal.SIGHUP})
