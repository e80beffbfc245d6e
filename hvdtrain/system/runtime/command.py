"""Running other programs: a command is a value, and one function runs it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

log = logging.getLogger(__name__)

# Seconds that a program has to end after SIGTERM before it is killed. mpirun needs about 2 of them
# to end its ranks; without that time they would be left behind.
GRACE = 10.0
NOT_FOUND = 127  # what a shell answers for a program that does not exist
TIMED_OUT = 124  # what timeout(1) answers
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
LAST_WORDS = 2.0  # seconds in which the output of a program that was killed may still come
LOOK = 1.0  # seconds after which a signal is heard at the latest


@dataclass(frozen=True)
class Command:
    """A program to run."""

    argv: tuple[str, ...]  # the program and its arguments
    env: Mapping[str, str | None] = field(default_factory=dict)  # what differs; None: unset
    cwd: Path | None = None  # directory to run in; None is the current one

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the whole environment that the program gets."""
        merged = {**inherited, **{k: v for k, v in self.env.items() if v is not None}}
        return {k: v for k, v in merged.items() if self.env.get(k, v) is not None}

    def show(self) -> str:
        """Return one line that does the same when pasted into a shell."""
        words = []
        if self.env or self.cwd:
            words = ["env"]
            words += [f"--chdir={self.cwd}"] if self.cwd else []
            for name in sorted(k for k, v in self.env.items() if v is None):
                words += ["-u", name]
            words += [f"{k}={v}" for k, v in sorted(self.env.items()) if v is not None]
        return shlex.join([*words, *self.argv])


@dataclass(frozen=True)
class Result:
    """How a program ended."""

    command: Command  # what was run
    exit_code: int  # 127 where the program does not exist, 124 where its time ran out
    output: str  # standard output and standard error together, in the order written

    @property
    def ok(self) -> bool:
        """Whether it ended with exit code 0."""
        return self.exit_code == 0


def run(
    command: Command, on_line: Callable[[str], None] | None = None, timeout: float | None = None
) -> Result:
    """Run ``command`` to its end; ``on_line`` sees each line as it is written.

    The program leads a process group of its own, and the whole group is ended when the time runs
    out or when this process is interrupted: a compiler must not live on after Ctrl-C.
    """
    with HeldSignals() as held:
        try:
            process: subprocess.Popen[str] = _open(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            return Result(command, NOT_FOUND, f"{command.argv[0]}: {error.strerror}")
        try:
            held.release()
            lines, late = _read(process, on_line, timeout)
        except BaseException:
            _end_group(process)
            raise
    code = process.wait()
    return Result(command, TIMED_OUT if late else code, "".join(lines))


def _open(command: Command, **how: Any) -> subprocess.Popen[Any]:
    """Start ``command``; nothing that it starts can read what is meant for this process."""
    return subprocess.Popen(
        command.argv,
        env=command.environ(os.environ),
        cwd=command.cwd,
        **{"stdin": subprocess.DEVNULL, **how},
    )


class HeldSignals:
    """Let Ctrl-C and SIGTERM wait for the end of the block, or for ``release``.

    ``run`` needs it until a program is started, and known to whoever has to end it. Only those
    signals wait that a function of this process handles, and only in the main thread: there alone
    does a handler run, between any two steps of Popen.
    """

    def __enter__(self) -> Self:
        self._came: list[int] = []
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(signal.getsignal(number)):
                    self._handlers[number] = signal.signal(
                        number, lambda which, _frame: self._came.append(which)
                    )
        return self

    def release(self) -> None:
        """Let the signals through, those too that have come meanwhile."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        came, self._came = self._came, []
        for number in came:
            signal.raise_signal(number)

    def __exit__(self, *_: object) -> None:
        self.release()


def start(
    command: Command,
    *,
    fed: bool = False,
    piped: bool = False,
    errors_piped: bool = False,
    blocked: frozenset[signal.Signals] = frozenset(),
    dies_with_parent: signal.Signals | None = None,
) -> subprocess.Popen[bytes]:
    """Start ``command`` in a process group of its own, in this session; nothing is waited for.

    Its standard input is empty: a program that reads along would swallow the rest of a job script
    that is itself read from standard input.

    Args:
        command: what to start.
        fed: hand its standard input over, which is else empty.
        piped: hand its output over; else it writes where this process writes, a terminal included.
        errors_piped: hand standard error over, whatever becomes of its output.
        blocked: signals that the program is not to hear, unless it unblocks them.
        dies_with_parent: the signal that it is sent when the calling thread ends, by KILL too.

    Raises:
        OSError: it cannot be started.
    """
    output = subprocess.PIPE if piped else None
    errors = subprocess.PIPE if errors_piped else output
    # What is blocked here stays so in the new process.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    try:
        source = subprocess.PIPE if fed else subprocess.DEVNULL
        return _open(
            command,
            stdin=source,
            stdout=output,
            stderr=errors,
            process_group=0,
            preexec_fn=_death_signal(dies_with_parent) if dies_with_parent else None,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _death_signal(number: signal.Signals) -> Callable[[], None]:
    """Return what a new process calls to be sent ``number`` when its parent ends (prctl(2))."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def request() -> None:
        prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it has ended meanwhile
            os.kill(os.getpid(), number)

    return request


def leave_behind(command: Command) -> None:
    """Start ``command`` without waiting for it: it outlives this process, and says nothing.

    It leads a session of its own, so that what ends this process and its group leaves it alone.
    """
    with contextlib.suppress(OSError):
        nowhere = subprocess.DEVNULL
        _open(command, stdout=nowhere, stderr=nowhere, start_new_session=True)


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Let SIGTERM (a batch system's, or ``kill``) clean up as Ctrl-C does: by KeyboardInterrupt.

    What ``run`` has started is ended then too. Call it in the main thread.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _read(
    process: subprocess.Popen[str], on_line: Callable[[str], None] | None, timeout: float | None
) -> tuple[list[str], bool]:
    """Collect the output of ``process`` until it is closed; tell whether it ran out of time.

    Another thread reads: a signal that comes just before a read is heard after it, which may be
    much later.
    """
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_hand_on, args=(process, arrived), daemon=True).start()
    end = float("inf") if timeout is None else time.monotonic() + timeout
    lines: list[str] = []
    late = False
    while True:
        if time.monotonic() >= end:
            if late:  # what has left the session holds the output open
                return lines, late
            _end_group(process)
            late, end = True, time.monotonic() + LAST_WORDS
        with contextlib.suppress(queue.Empty):
            line = arrived.get(timeout=max(0.0, min(LOOK, end - time.monotonic())))
            if line is None:
                return lines, late
            lines.append(line)
            if on_line:
                on_line(line.rstrip("\n"))


def _hand_on(process: subprocess.Popen[str], arrived: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                arrived.put(line)
    finally:
        arrived.put(None)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End ``process`` and all that it started: politely first, then for certain."""
    for number, patience in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        # SIGKILL follows also where the leader has ended: a child of it may not have listened.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    for folder in Path("/proc").glob("[0-9]*"):
        # As mpirun's ssh, which leads a group of its own and is deaf to TERM.
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == process.pid:
                os.kill(int(folder.name), signal.SIGKILL)
