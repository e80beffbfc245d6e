"""End of a process of a job: a one-line message, the correct exit code, no rank left hanging.

mpirun kills all ranks as soon as one exits with a nonzero code, often before another has printed
its message. So rank 0 prints first and exits; any other rank waits for rank 0 to end the job, and
prints only if it is still running: then the error is its own.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing.connection
import os
import re
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from hvdtrain.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    HvdtrainError,
    UsageError,
)
from hvdtrain.system.runtime import elastic, terminal
from hvdtrain.system.runtime import mpirun_daemon as daemon
from hvdtrain.system.runtime.detect import detect, is_elastic, is_restarted

log = logging.getLogger(__name__)

# Seconds that a rank other than 0 waits for rank 0: a usage error is usually the same on all ranks;
# a failure is usually of one rank, and the job must end within 10 s.
WAIT_USAGE = 5.0
WAIT_FAILURE = 1.0
WAIT_LOSS = 5.0  # for the failure detector to report which rank a collective has lost
LOSS_POLL = 0.3  # seconds before each check for a lost rank
LOSS_POLLS = 5  # number of checks by an elastic rank
WAIT_PREEMPTED = 5.0  # for rank 0 to write the summary, after which all ranks exit together
# Without prted and orted, its daemons on other hosts.
MPIRUNS = tuple(name for name in daemon.NAMES if not name.endswith("ted"))


@dataclass
class ProcessStatus:
    """Messages and actions for the end of this process; the instance is ``process_status``."""

    stage: str = ""  # current stage for error messages, e.g. ``step 17``
    checkpoint: str = ""  # newest checkpoint of this run, from which it can resume
    interrupted: str = "interrupted"  # message after Ctrl-C
    at_exit: list[Callable[[int], None]] = field(default_factory=list)  # called with the exit code
    # Shut down the communication library:
    disconnect: list[Callable[[], None]] = field(default_factory=list)

    def resume_hint(self) -> str:
        """Return how to resume after a failure that the training did not cause."""
        if is_restarted(os.environ):
            origin = self.checkpoint or "the start: no checkpoint yet"
            return f"Restarted ranks resume from {origin}"
        if self.checkpoint:
            return f"Run the same command again: it resumes from {self.checkpoint}"
        return "No checkpoint was saved: run the same command again (see --checkpoint-dir)"


process_status = ProcessStatus()


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and end the process with its exit code.

    An ``HvdtrainError`` is printed as one line on standard error, with its exit code; any other
    exception with its traceback after rank and host, and exit code 1.
    """
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILURE if stop.code else 0
        if code and process_status.stage and detect(os.environ).size > 1:
            reason = "" if isinstance(stop.code, int) else f" ({stop.code})"
            message = f"the program called sys.exit{reason}, exit code {code}"
            fail(f"{message}. {process_status.resume_hint()}", code=code)
        if isinstance(stop.code, str):  # as Python does
            sys.stderr.write(f"{stop.code}\n")
    except KeyboardInterrupt:
        fail(process_status.interrupted, code=EXIT_INTERRUPTED)
    except HvdtrainError as error:
        wait = WAIT_USAGE if isinstance(error, UsageError) else WAIT_FAILURE
        # A usage error on rank 0, in command line or data, usually occurs on all ranks.
        common = is_agreed(error) or (isinstance(error, UsageError) and detect(os.environ).is_root)
        if is_agreed(error):
            _disconnect(WAIT_FAILURE)
        fail(f"error: {error}", code=error.exit_code, wait=wait, agreed=common)
    except Exception as error:
        if is_elastic(os.environ):
            restart_after_rank_loss()
        elif (launch := detect(os.environ)).is_root and launch.size > 1:
            time.sleep(LOSS_POLL)  # if a rank is lost, the failure detector reports which one
        detail = "".join(traceback.format_exception(error))
        fail(f"failed: {error!r}\n{detail}", code=EXIT_FAILURE, wait=WAIT_FAILURE)
    if code == EXIT_PREEMPTED:
        _disconnect(WAIT_PREEMPTED)
    leave(code)


def restart_after_rank_loss() -> None:
    """Restart this rank if another rank is lost, after a collective has failed.

    The failure detector does the same, but it is not running while the ranks connect. An error on
    all ranks is no loss: each rank checks before the first one has exited.
    """
    for _ in range(LOSS_POLLS):
        time.sleep(LOSS_POLL)
        if elastic.is_rank_lost():
            restart_ranks()
    time.sleep(WAIT_LOSS - LOSS_POLLS * LOSS_POLL)


def end_after_loss() -> NoReturn:
    """End this process because another rank is lost; elastic ranks are restarted."""
    if is_elastic(os.environ):
        restart_ranks()
    leave(EXIT_FAILURE)


def restart_ranks() -> NoReturn:
    """End this rank so that it is restarted from the newest checkpoint (``elastic.py``)."""
    terminal.clear()
    leave(elastic.EXIT_RESTART)


def agreed(error: HvdtrainError) -> HvdtrainError:
    """Mark ``error`` as raised by all ranks together, so that only rank 0 prints it."""
    error.__notes__ = [*getattr(error, "__notes__", []), _AGREED]
    return error


def is_agreed(error: BaseException) -> bool:
    """Return whether ``error`` is raised by all ranks together."""
    return _AGREED in getattr(error, "__notes__", [])


_AGREED = "agreed by all ranks"

_speaking = threading.Lock()  # never released: its holder ends the process


def _disconnect(patience: float) -> None:
    """Shut down the communication library before all ranks exit with a nonzero code together.

    Otherwise MPI on other hosts aborts when the first connection breaks, and mpirun returns the
    exit code of the abort. Other ranks are waited for at most ``patience`` seconds.
    """
    for end in process_status.disconnect:
        thread = threading.Thread(target=end, name="disconnect", daemon=True)
        thread.start()
        thread.join(patience)


def fail(message: str, *, code: int, wait: float = WAIT_FAILURE, agreed: bool = False) -> NoReturn:
    """Print ``message`` and exit with ``code``; a rank other than 0 waits for rank 0 first."""
    speak(message, wait=wait, agreed=agreed)
    leave(code)


def speak(
    message: str, *, wait: float = WAIT_FAILURE, agreed: bool = False, mpirun_ends: bool = False
) -> None:
    """Print why this process fails; the caller then ends it. See ``fail``.

    Only the first thread prints; any other thread blocks here until the process ends.

    Args:
        message: one or more lines.
        wait: seconds that a rank other than 0 waits for rank 0.
        agreed: all ranks have the same error, so that only rank 0 prints it.
        mpirun_ends: mpirun is about to end all ranks, and no longer forwards their output.
    """
    claim_error_output()
    terminal.clear()
    launch, stage = detect(os.environ), process_status.stage
    if not launch.is_root:
        time.sleep(wait)
    if launch.is_root or not agreed:
        rank = f"rank {launch.rank} on {socket.gethostname()}"
        prefix = "" if agreed or launch.size == 1 else f"{rank}{', ' + stage if stage else ''}: "
        line = f"hvdtrain: {prefix}{message.rstrip()}\n"
        with contextlib.suppress(OSError):  # mpirun, which reads the output, may have ended
            sys.stdout.flush()
            if not (mpirun_ends and _write_beside(_parent(MPIRUNS), line)):
                sys.stderr.write(line)


def claim_error_output() -> None:
    """Return in the first thread that calls this; block any other one until the process ends."""
    if not _speaking.acquire(blocking=False):
        threading.Event().wait()


def announce(text: str, *, mpirun_ends: bool) -> None:
    """Print on rank 0 why the job stops in an orderly way.

    Args:
        text: the line.
        mpirun_ends: Open MPI's mpirun has received SIGTERM too, unless it is blocked (see
            ``launch.watch``). It then discards the output of its ranks, so the line is written to
            mpirun's standard error.
    """
    terminal.clear()
    # mpirun forwards two streams in any order, so a progress bar may still be shown.
    line = f"{terminal.ERASE if terminal.columns() else ''}hvdtrain: {text}\n"
    with contextlib.suppress(OSError, RuntimeError):  # a signal may have interrupted a flush
        sys.stdout.flush()
    if not (mpirun_ends and _write_beside(_impatient(MPIRUNS), line)):
        with contextlib.suppress(OSError):
            os.write(2, line.encode())


def _write_beside(process: Path | None, line: str) -> bool:
    """Write to the standard error of ``process``, a directory of /proc; return success."""
    if process is None:
        return False
    with contextlib.suppress(OSError):
        # A file is appended to, as its offset may be elsewhere.
        handle = os.open(process / "fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        with os.fdopen(handle, "wb", buffering=0) as file:
            file.write(line.encode())
        return True
    return False


def _parent(names: Sequence[str]) -> Path | None:
    """Return the /proc directory of the parent process if its name is one of ``names``."""
    parent = Path(f"/proc/{os.getppid()}")
    with contextlib.suppress(OSError):
        if (parent / "comm").read_text().strip() in names:
            return parent
    return None


def _impatient(names: Sequence[str]) -> Path | None:
    """Return ``_parent(names)`` unless it blocks SIGTERM; mpirun kills its ranks soon after it."""
    with contextlib.suppress(OSError):
        if parent := _parent(names):
            status = (parent / "status").read_text()
            blocked = re.search(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)
            is_blocked = blocked and int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1
            return None if is_blocked else parent
    return None


def is_ended_by_mpirun() -> bool:
    """Return whether mpirun or its daemon started this process; they end a rank by SIGTERM."""
    return _parent(daemon.NAMES) is not None


@contextlib.contextmanager
def surviving_kill(action: Callable[[], object]) -> Iterator[None]:
    """Let a forked copy of this process do ``action`` if mpirun kills it within the block.

    Open MPI's mpirun kills its ranks half a second after receiving SIGTERM, and a save may take
    longer. The copy is forked when the signal arrives, in a new process group, unknown to mpirun,
    but in the same session, so that a batch system can kill it. It has only this thread, so
    ``action`` must not compute with a framework or call MPI.
    """
    if threading.current_thread() is not threading.main_thread() or not _impatient(daemon.NAMES):
        yield
        return
    arrived, wake = os.pipe()
    os.set_blocking(wake, False)
    done, finish = os.pipe()  # closed without data if this process is killed
    copies: list[int] = []

    def wait() -> None:
        while (number := os.read(arrived, 1)) and number[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        if number and (copy := os.fork()):
            copies.append(copy)
        elif number:
            _act_after(done, finish, action)

    # The thread is woken at once, even while the main thread waits for the disk.
    former = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, name="surviving_kill", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        os.close(wake)
        thread.join()
        os.write(finish, b".")
        for handle in (arrived, done, finish):
            os.close(handle)
        for copy in copies:
            os.waitpid(copy, 0)


def _act_after(done: int, finish: int, action: Callable[[], object]) -> NoReturn:
    """Do ``action``, in the copy, if ``done`` is closed without data; then exit."""
    try:
        os.setpgid(0, 0)
        os.close(finish)
        nowhere = os.open(os.devnull, os.O_RDWR)
        for handle in range(3):
            os.dup2(nowhere, handle)
        if os.read(done, 1) == b"":
            action()
    finally:
        os._exit(EXIT_FAILURE)


def end_with_parent(_: int = 0) -> None:
    """End this worker process when the process that created it ends; call it first in a worker.

    The operating system's parent of a worker is the fork server, which waits for its workers; if
    mpirun killed the training process, all of them would keep running.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(EXIT_FAILURE)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def leave(code: int) -> NoReturn:
    """Exit at once; with a nonzero code without the finalizers of MPI, Horovod or worker pools.

    After a failure these wait for ranks that have ended; ``os._exit`` cannot hang.
    """
    for action in process_status.at_exit:
        action(code)
    with contextlib.suppress(OSError, RuntimeError):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    if code == 0:
        sys.exit(0)
    os._exit(code)
