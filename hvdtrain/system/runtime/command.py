"""Run other programs: ``Command`` describes a program, ``run`` and ``start`` execute it."""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import queue
import re
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

from hvdtrain.errors import escaped

log = logging.getLogger(__name__)

# Seconds between SIGTERM and SIGKILL. mpirun needs about 2 to end its ranks; otherwise they would
# be left running.
GRACE = 10.0
NOT_FOUND = 127  # exit code of a shell for a missing program
TIMED_OUT = 124  # exit code of timeout(1)
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
LAST_WORDS = 2.0  # seconds to wait for the remaining output of a killed program
POLL_INTERVAL = 1.0  # maximum seconds until a signal is handled


@dataclass(frozen=True)
class Command:
    """A program to run."""

    argv: tuple[str, ...]  # the program and its arguments
    env: Mapping[str, str | None] = field(default_factory=dict)  # changes; None: unset
    cwd: Path | None = None  # working directory; None: the current one

    def environ(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """Return the complete environment of the program."""
        merged = {**inherited, **{k: v for k, v in self.env.items() if v is not None}}
        return {k: v for k, v in merged.items() if self.env.get(k, v) is not None}

    def show(self) -> str:
        """Return an equivalent command for bash, in printable characters."""
        return " ".join(map(_quoted, self.words))

    @property
    def words(self) -> list[str]:
        """The program and its arguments, after an ``env`` with the changes, if any."""
        words = []
        if self.env or self.cwd:
            words = ["env"]
            words += [f"--chdir={self.cwd}"] if self.cwd else []
            for name in sorted(k for k, v in self.env.items() if v is None):
                words += ["-u", name]
            words += [f"{k}={v}" for k, v in sorted(self.env.items()) if v is not None]
        return [*words, *self.argv]


def _quoted(word: str) -> str:
    r"""Return ``word`` quoted for bash: as ``$'\xff'`` if it is not printable, e.g. not UTF-8."""
    if escaped(word, keep="\n\t") == word:
        return shlex.quote(word)
    text = os.fsencode(word).decode("latin-1")
    return "$'" + re.sub(r"[^ -~]|['\\]", lambda match: f"\\x{ord(match[0]):02x}", text) + "'"


@dataclass(frozen=True)
class CommandResult:
    """Exit code and output of a program."""

    command: Command  # the command
    exit_code: int  # 127 if the program does not exist, 124 after a timeout
    output: str  # standard output and standard error together, in the order written

    @property
    def ok(self) -> bool:
        """Whether the exit code is 0."""
        return self.exit_code == 0


def run(
    command: Command,
    on_line: Callable[[str], None] | None = None,
    timeout: float | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> CommandResult:
    """Run ``command`` to its end; ``on_line`` is called with each line, ``meanwhile`` each second.

    The program leads a new process group, which is ended after the timeout or if this process is
    interrupted: a compiler must not keep running after Ctrl-C.
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
            return CommandResult(command, NOT_FOUND, f"{command.argv[0]}: {error.strerror}")
        try:
            held.release()
            lines, late = _read(process, on_line, timeout, meanwhile)
        except BaseException:
            _end_group(process)
            raise
    code = process.wait()
    return CommandResult(command, TIMED_OUT if late else code, "".join(lines))


def _open(command: Command, **options: Any) -> subprocess.Popen[Any]:
    """Start ``command``, by default without access to this process's standard input."""
    return subprocess.Popen(
        command.argv,
        env=command.environ(os.environ),
        cwd=command.cwd,
        **{"stdin": subprocess.DEVNULL, **options},
    )


class HeldSignals:
    """Defer Ctrl-C and SIGTERM to the end of the block, or to ``release``.

    ``run`` needs it while a program is started but not yet known to the code that must end it. Only
    signals with a Python handler are deferred, and only in the main thread, where handlers run,
    between any two steps of Popen.
    """

    def __enter__(self) -> Self:
        self._deferred: list[int] = []
        self._handlers: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if callable(signal.getsignal(number)):
                    self._handlers[number] = signal.signal(
                        number, lambda received, _frame: self._deferred.append(received)
                    )
        return self

    def release(self) -> None:
        """Restore the handlers and raise the deferred signals."""
        while self._handlers:
            signal.signal(*self._handlers.popitem())
        deferred, self._deferred = self._deferred, []
        for number in deferred:
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
    """Start ``command`` in a new process group of this session, without waiting.

    Its standard input is empty by default: otherwise it would consume a job script that is read
    from standard input.

    Args:
        command: the command.
        fed: connect its standard input to a pipe.
        piped: connect its output to a pipe; else it inherits this process's, e.g. a terminal.
        errors_piped: connect its standard error to a pipe.
        blocked: signals to block in the program.
        dies_with_parent: signal to send to it when the calling thread ends, also if killed.

    Raises:
        OSError: it cannot be started.
    """
    output = subprocess.PIPE if piped else None
    errors = subprocess.PIPE if errors_piped else output
    # The new process inherits the signal mask.
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
    """Return a function for the new process that requests ``number`` on its parent's death."""
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def request() -> None:
        prctl(PR_SET_PDEATHSIG, int(number))
        if os.getppid() != parent:  # it has already ended
            os.kill(os.getpid(), number)

    return request


def leave_behind(command: Command, output: int = subprocess.DEVNULL) -> None:
    """Start ``command`` in a new session, so that it outlives this process.

    Its standard output is the file descriptor ``output``.
    """
    with contextlib.suppress(OSError):
        _open(command, stdout=output, stderr=subprocess.DEVNULL, start_new_session=True)


@contextlib.contextmanager
def termination_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM, as on Ctrl-C, which also ends programs of ``run``.

    Must be called in the main thread.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> NoReturn:
        raise KeyboardInterrupt

    former = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _read(
    process: subprocess.Popen[str],
    on_line: Callable[[str], None] | None,
    timeout: float | None,
    meanwhile: Callable[[], None] | None,
) -> tuple[list[str], bool]:
    """Return the lines of ``process`` until its output is closed, and whether it timed out.

    Another thread reads, as Python would handle a signal only after a blocking read.
    """
    arrived: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    threading.Thread(target=_forward_lines, args=(process, arrived), daemon=True).start()
    end = float("inf") if timeout is None else time.monotonic() + timeout
    lines: list[str] = []
    late = False
    while True:
        if time.monotonic() >= end:
            if late:  # a process in another session keeps the output open
                return lines, late
            _end_group(process)
            late, end = True, time.monotonic() + LAST_WORDS
        with contextlib.suppress(queue.Empty):
            line = arrived.get(timeout=max(0.0, min(POLL_INTERVAL, end - time.monotonic())))
            if line is None:
                return lines, late
            lines.append(line)
            if on_line:
                on_line(line.rstrip("\n"))
        if meanwhile:
            meanwhile()


def _forward_lines(process: subprocess.Popen[str], arrived: queue.SimpleQueue[str | None]) -> None:
    assert process.stdout is not None
    try:
        with process.stdout:
            for line in process.stdout:
                arrived.put(line)
    finally:
        arrived.put(None)


def _end_group(process: subprocess.Popen[str]) -> None:
    """End ``process`` and its descendants with SIGTERM, then SIGKILL."""
    for number, timeout in ((signal.SIGTERM, GRACE), (signal.SIGKILL, None)):
        # SIGKILL is sent even if the leader has ended: a child may ignore SIGTERM.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout)
    for folder in Path("/proc").glob("[0-9]*"):
        # E.g. mpirun's ssh, which has its own process group and ignores SIGTERM.
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(int(folder.name)) == process.pid:
                os.kill(int(folder.name), signal.SIGKILL)
