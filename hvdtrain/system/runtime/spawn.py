"""``--spawn N``: the trainer starts its ranks itself, on this host, where there is no launcher.

A rank is the same command line once more, with the variables that torchrun sets. It shares the
parent's terminal and streams, and its process group, so Ctrl-C and Ctrl-Z reach all of them. The
parent hands on the signals that reach it alone, ends the others where one rank has failed, and
leaves with the code of the rank that failed first. A rank ends with its parent, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence

from typing_extensions import override

from hvdtrain.errors import EXIT_FAILURE, UsageError
from hvdtrain.system.runtime.detect import (
    ALONE,
    HOROVODRUN,
    SPAWN,
    SPAWNED_BY,
    TORCHRUN,
    LaunchInfo,
    detect,
)
from hvdtrain.system.runtime.processes import STOP_SIGNALS, Processes

# A terminal gives Ctrl-C to the ranks too, where a second INT ends them; HUP they do not hear.
HANDED_ON = {signal.SIGINT: signal.SIGUSR1, signal.SIGHUP: signal.SIGUSR1}
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


class Ranks(Processes):
    """The ranks that this process has started."""

    def start(self, size: int, port: int, words: Sequence[str]) -> None:
        """Start ``size`` ranks, which meet at ``port``."""
        # They hear a signal once they have their handlers (``join``); until then it waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for rank in range(size):
                variables = _variables(rank, size, port)
                self.running.append(
                    subprocess.Popen(
                        [sys.executable, *words],
                        env={"GLOO_SOCKET_IFNAME": "lo", **os.environ, **variables},
                        stdin=subprocess.DEVNULL,
                    )
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @override
    def hand_on(self, number: signal.Signals) -> None:
        super().hand_on(HANDED_ON.get(number, number))


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return what torchrun tells a rank, on one host."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, SPAWNED_BY: os.getpid()}
    return {name: str(value) for name, value in {**place, **meeting}.items()}


def join(environ: Mapping[str, str] = os.environ) -> None:
    """Let a rank that ``spawn`` or an agent of torchrun started end with its parent, and listen.

    To be called once, when its handlers of signals are in place.
    """
    launcher = detect(environ).launcher
    if launcher in (SPAWN, TORCHRUN, HOROVODRUN):  # other launchers see to it themselves
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher == SPAWN:
        if os.getppid() != int(environ[SPAWNED_BY]):  # it has ended already
            os._exit(EXIT_FAILURE)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(STOP_SIGNALS) - {signal.SIGHUP})
