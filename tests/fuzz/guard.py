"""The promise that each reader keeps for any input: no action elsewhere, bounded time and memory.

Readers of checkpoints and of messages between ranks also promise a result, or one line of error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hvdtrain.errors import MAX_LENGTH, HvdtrainError
from tests.fuzz.targets import Target

SECONDS = 2.0  # maximum time of this process, not of a busy machine
HANG = 10.0  # seconds of it after which it is interrupted
WAIT = 60.0  # seconds after which it is interrupted in any case, also if it only waits
STRICT = ("checkpoints", "ranks")  # groups that raise no other error than HvdtrainError
GROWTH = 200 * 2**10  # maximum growth of memory, in KiB
STARTS = ("subprocess.Popen", "os.exec", "os.posix_spawn", "os.system", "os.fork")
CONNECTS = ("socket.connect", "socket.sendto")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
# Number of paths of each event that changes a file or folder.
CHANGES = dict.fromkeys(("os.link", "os.rename", "os.symlink"), 2) | dict.fromkeys(
    ("os.chmod", "os.chown", "os.mkdir", "os.remove", "os.rmdir", "os.truncate", "os.utime"), 1
)


class BrokenPromiseError(AssertionError):
    """An input for which a reader does something else."""


class _Audit:
    """Records forbidden actions while a reader runs; audit hooks cannot be removed."""

    def __init__(self) -> None:
        self.folder: str | None = None  # the only one to write to; None: no reader runs
        self.forbidden: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.folder is None:
            return
        count = CHANGES.get(event, 0)
        if event == "open" and arguments[0] != os.devnull:
            count = int(isinstance(arguments[2], int) and arguments[2] & WRITES != 0)
        for path in arguments[:count]:
            path = f"/proc/self/fd/{path}" if isinstance(path, int) else os.fsdecode(path)
            real = os.path.realpath(path)  # a path relative to an open folder counts as outside
            if real != self.folder and not real.startswith(f"{self.folder}/"):
                self.forbid(f"{event} {arguments[:2]!r}")
        if event in STARTS or event in CONNECTS:
            self.forbid(f"{event} {arguments[:2]!r}")

    def forbid(self, action: str) -> None:
        """Record ``action``, as a reader may catch any exception, and raise."""
        self.forbidden.append(action)
        raise BrokenPromiseError(action)


_audit = _Audit()


def _give_up(*_: object) -> None:
    _audit.forbid(f"it still runs after {HANG:.0f} s of computing, or {WAIT:.0f} s of waiting")


@contextlib.contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Forbid actions outside ``folder``, and drop all output."""
    _audit.forbidden.clear()
    logging.disable()
    handler = signal.signal(signal.SIGVTALRM, _give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG)
    # Not ITIMER_REAL: that of pytest-timeout, or of libFuzzer.
    alarm = (threading.get_ident(), signal.SIGVTALRM)
    watchdog = threading.Timer(WAIT, signal.pthread_kill, alarm)
    watchdog.daemon = True
    watchdog.start()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            with contextlib.redirect_stderr(io.StringIO()):
                _audit.folder = os.path.realpath(folder)
                yield
    finally:
        _audit.folder = None
        watchdog.cancel()
        watchdog.join()
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, handler)
        logging.disable(logging.NOTSET)


def prepare(target: Target, folder: Path) -> None:
    """Import what ``target`` needs, unobserved: that writes compiled modules."""
    for data in (*target.seeds()[:1], b""):
        folder.mkdir()
        with contextlib.suppress(Exception), contextlib.redirect_stdout(io.StringIO()):
            target.read(data, folder)
        shutil.rmtree(folder)


def _kibibytes(name: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition(f"{name}:")[2].split(maxsplit=1)[0])


def check(target: Target, data: bytes, folder: Path) -> Exception | None:
    """Let ``target`` read ``data`` in ``folder``, which is emptied first; return its error.

    Raises:
        BrokenPromiseError: it writes elsewhere, starts a process, or takes too long or too much.
        Exception: whatever else than an ``HvdtrainError`` of one line a ``STRICT`` reader raises.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is measured anew
    memory, began = _kibibytes("VmRSS"), time.process_time()
    refusal: Exception | None = None
    with _quiet(folder):
        try:
            target.read(data, folder)
        except SystemExit as error:
            raise BrokenPromiseError(f"it ends the process with {error.code}") from error
        except HvdtrainError as error:
            refusal, line = error, str(error)
            if (
                len(line.splitlines()) != 1
                or not line.isprintable()
                or len(line) > 1.1 * MAX_LENGTH
            ):
                raise BrokenPromiseError(
                    f"not one printable line: {line[:MAX_LENGTH]!r}"
                ) from error
        except Exception as error:
            if _audit.forbidden:  # a library raised another error from it
                raise BrokenPromiseError(_audit.forbidden[0]) from error
            if target.group in STRICT or isinstance(error, AssertionError):
                raise
            refusal = error
    growth = _kibibytes("VmHWM") - memory
    seconds = time.process_time() - began
    if _audit.forbidden:
        raise BrokenPromiseError(_audit.forbidden[0])
    if growth > GROWTH or seconds > SECONDS:
        raise BrokenPromiseError(f"{seconds:.1f} s, {growth / 2**10:.0f} MiB more memory")
    return refusal
