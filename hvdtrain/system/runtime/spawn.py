"""Processes that this one starts and that end together: agents of ``launch``, ranks of ``--spawn``.

If one of them fails, the others are ended, and its exit code is returned. Stop signals are
forwarded to them, and none of them is left running afterwards.

With ``--spawn N`` a trainer starts its ranks on this host, without a launcher. A rank runs the same
command line with the variables that torchrun sets. It shares the parent's terminal, streams and
process group, so that Ctrl-C and Ctrl-Z reach all of them, and it ends with its parent, even if the
parent is killed.
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
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Self

from typing_extensions import override

from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, EXIT_PREEMPTED, UsageError
from hvdtrain.system.runtime.command import PR_SET_PDEATHSIG
from hvdtrain.system.runtime.detect import (
    SINGLE_RANK,
    SPAWN,
    SPAWNED_BY,
    TORCHRUN,
    LaunchInfo,
    detect,
    may_be_shell,
)
from hvdtrain.system.runtime.outlive import STOP_SIGNALS, is_ended_by_mpirun

# A terminal sends Ctrl-C to the ranks too, and a second INT ends them; they block HUP.
FORWARDED = {signal.SIGINT: signal.SIGUSR1, signal.SIGHUP: signal.SIGUSR1}
POLL = 0.05  # seconds between polls of the processes
# Seconds until the others are killed after a failure: of rank 0, which reports for all ranks; of
# another rank, as rank 0 still has to report the checkpoint to resume from.
ROOT_TIMEOUT, OTHER_TIMEOUT = 0.5, 3.0
STOP_TIMEOUT = 15.0  # after one has ended in an orderly way after a signal


class StopSignals:
    """Records signals that request a stop, while it is open, instead of ending this process.

    Open it before the first process starts: signals during the start are forwarded after it.
    """

    def __init__(self) -> None:
        self.received: list[int] = []  # in order
        self._forwarded = 0  # how many of them
        self._before: dict[int, Any] = {}  # handlers
        self._interrupts = False

    def __enter__(self) -> Self:
        for number in STOP_SIGNALS:
            # Ignored signals stay ignored: nohup ignores HUP, a shell INT in the background.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        if self._interrupts:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def interrupting(self) -> Iterator[None]:
        """Raise KeyboardInterrupt on a signal meanwhile, also on one that was received before."""
        self._interrupts = True
        try:
            if self.received:
                raise KeyboardInterrupt
            yield
        finally:
            self._interrupts = False

    def take(self) -> list[signal.Signals]:
        """Return the signals received since the last call."""
        new = self.received[self._forwarded :]
        self._forwarded += len(new)
        return [signal.Signals(number) for number in new]


class Processes:
    """Running processes, in the order of their ranks, which get the ``signals`` of an open object.

    None of them is left running at its end.
    """

    def __init__(self, signals: StopSignals) -> None:
        self.running: list[subprocess.Popen[bytes]] = []
        self.signals = signals
        self._deadline = float("inf")  # when the remaining processes are killed
        self._code = EXIT_OK  # of the first that failed
        self._killed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

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
        received = self.signals.received
        while not self._have_ended():
            for number in self.signals.take():
                self.forward(number)
                if received.count(signal.SIGINT) > 1:  # a second Ctrl-C ends them at once
                    self._end_within(ROOT_TIMEOUT)
            if time.monotonic() > self._deadline:
                self.kill()
            time.sleep(POLL)
        return 128 + received[0] if received and self._code > 128 else self._code

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
            if code < 0 and not self.signals.received:
                say(f"{self.name(index)} was ended by {signal_of(code) or f'signal {-code}'}")
            if code == EXIT_PREEMPTED:
                self._end_within(STOP_TIMEOUT)
            else:
                self._end_within(OTHER_TIMEOUT if index else ROOT_TIMEOUT)
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


def spawned(size: int) -> LaunchInfo:
    """Return the launch information of rank 0 of ``size`` spawned ranks."""
    return LaunchInfo(SPAWN, 0, size, 0, size)


def check_no_launcher(environ: Mapping[str, str]) -> None:
    """Raise ``UsageError`` if a launcher has started this process."""
    launch = detect(environ)
    if launch != SINGLE_RANK and not may_be_shell(environ):
        raise UsageError(
            f"--spawn starts ranks without a launcher, but {launch.launcher} started this process: "
            "omit it"
        )


def spawn(size: int, words: Sequence[str] | None = None) -> int:
    """Run this command line on ``size`` ranks of this host, and return the exit code.

    ``words`` are the arguments of the interpreter; None: those of this process.
    """
    with socket.socket() as held, StopSignals() as signals, Ranks(signals) as ranks:
        # The port stays reserved while the socket is open; rank 0 can bind it by SO_REUSEADDR.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind(("127.0.0.1", 0))
            with socket.socket(type=socket.SOCK_DGRAM) as probe:
                probe.connect(held.getsockname())  # is there a route?
        except OSError as error:
            reason = f"127.0.0.1: {error.strerror}"
            raise UsageError(f"--spawn: {reason}: set up loopback (ip link set lo up)") from error
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


def end_with_launcher(environ: Mapping[str, str] = os.environ) -> None:
    """Let Linux kill this rank if the process that started it is killed: its launcher or a daemon.

    Open MPI aborts a rank after that only if it communicates by MPI: over Gloo or NCCL it would
    continue, and keep the lock of its checkpoints. If a shell is between mpirun and the rank,
    nothing is done, as mpirun's SIGTERM ends the shell before the rank has saved. Hydra and srun
    end their ranks themselves.
    """
    if detect(environ).launcher in (SPAWN, TORCHRUN) or is_ended_by_mpirun():
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def join(environ: Mapping[str, str] = os.environ) -> None:
    """Let a rank end with its parent, and unblock the signals of one started by ``spawn``.

    Call it once, after the signal handlers are installed.
    """
    end_with_launcher(environ)
    if detect(environ).launcher == SPAWN:
        if os.getppid() != int(environ[SPAWNED_BY]):  # the parent has already ended
            os._exit(EXIT_FAILURE)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, set(STOP_SIGNALS) - {signal.SIGHUP})
