"""``--spawn N``: a trainer starts its ranks on this host, without a launcher.

A rank runs the same command line with the variables that torchrun sets. It shares the parent's
terminal, streams and process group, so that Ctrl-C and Ctrl-Z reach all of them. The parent
forwards other signals, ends the other ranks if one fails, and exits with the code of the rank that
failed first. A rank ends with its parent, even if the parent is killed.
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
    HOROVODRUN,
    SINGLE_RANK,
    SPAWN,
    SPAWNED_BY,
    TORCHRUN,
    LaunchInfo,
    detect,
)
from hvdtrain.system.runtime.processes import STOP_SIGNALS, Processes

# A terminal sends Ctrl-C to the ranks too, and a second INT ends them; they block HUP.
FORWARDED = {signal.SIGINT: signal.SIGUSR1, signal.SIGHUP: signal.SIGUSR1}
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def spawned(size: int) -> LaunchInfo:
    """Return the launch information of rank 0 of ``size`` spawned ranks."""
    return LaunchInfo(SPAWN, 0, size, 0, size)


def check_no_launcher(environ: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if a launcher has started this process."""
    launch = detect(environ)
    if launch != SINGLE_RANK:
        raise UsageError(
            f"--spawn starts ranks without a launcher, but {launch.launcher} started this process: "
            "leave the option out"
        )


def spawn(size: int, words: Sequence[str] | None = None) -> int:
    """Run this command line on ``size`` ranks of this host, and return the exit code.

    Args:
        size: number of ranks.
        words: arguments of the interpreter; None: those of this process.
    """
    with socket.socket() as held, Ranks() as ranks:
        # The port stays reserved while the socket is open; rank 0 can bind it by SO_REUSEADDR.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        ranks.start(size, held.getsockname()[1], sys.orig_argv[1:] if words is None else words)
        return ranks.wait()


class Ranks(Processes):
    """Ranks started by this process."""

    def start(self, size: int, port: int, words: Sequence[str]) -> None:
        """Start ``size`` ranks, with the rendezvous at ``port``."""
        # Signals stay blocked in a rank until its handlers are installed (``join``).
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
    def forward(self, number: signal.Signals) -> None:
        super().forward(FORWARDED.get(number, number))


def _variables(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets for a rank, on one host."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, SPAWNED_BY: os.getpid()}
    return {name: str(value) for name, value in {**ranks, **rendezvous}.items()}


def join(environ: Mapping[str, str] = os.environ) -> None:
    """Let a rank started by ``spawn`` or an agent end with its parent, and unblock its signals.

    Call it once, after the signal handlers are installed.
    """
    launcher = detect(environ).launcher
    if launcher in (SPAWN, TORCHRUN, HOROVODRUN):  # other launchers do so themselves
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if launcher == SPAWN:
        if os.getppid() != int(environ[SPAWNED_BY]):  # the parent has already ended
            os._exit(EXIT_FAILURE)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(STOP_SIGNALS) - {signal.SIGHUP})
