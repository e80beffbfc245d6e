"""End of a process of a job: a one-line message, the correct exit code, no rank left hanging.

mpirun kills all ranks as soon as one exits with a nonzero code, often before another has printed
its message. So rank 0 prints first and exits; any other rank waits for rank 0 to end the job, and
prints only if it is still running: then the error is its own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import io
import logging
import os
import socket
import stat
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from hvdtrain.errors import (
    EXIT_FAILURE,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PREEMPTED,
    HvdtrainError,
    UsageError,
)
from hvdtrain.system.runtime import terminal
from hvdtrain.system.runtime.detect import detect, is_restarted
from hvdtrain.system.runtime.outlive import MPIRUNS, parent_among, terminating_parent, write_after

log = logging.getLogger(__name__)

# Seconds that a rank other than 0 waits for rank 0: a usage error is usually the same on all ranks;
# a failure is usually of one rank, and the job must end within 10 s.
USAGE_TIMEOUT = 5.0
FAILURE_TIMEOUT = 1.0
LOSS_TIMEOUT = 0.3  # for the failure detector to report which rank a collective has lost
PREEMPTED_TIMEOUT = 5.0  # for rank 0 to write the summary, after which all ranks exit together
END_MARK = "HVDTRAIN_END_MARK"  # variable with the path of the file in ``write_end_mark``
MARK_NAME = "hvdtrain-end"  # of such a file in memory


@dataclass
class ProcessStatus:
    """Messages and actions for the end of this process; the instance is ``process_status``."""

    stage: str = ""  # current stage for error messages, e.g. ``step 17``
    checkpoint: str = ""  # newest checkpoint of this run, from which it can resume
    interrupted: str = "interrupted"  # message after Ctrl-C
    reported: int = 0  # exit code of another rank that has failed and reported it
    show: Callable[[], None] | None = None  # prints what precedes the message about its failure
    hangs: bool = False  # whether a thread does not end, for which Python may wait at its exit
    at_exit: list[Callable[[int], None]] = field(default_factory=list)  # called with the exit code
    # Shut down the communication library:
    disconnect: list[Callable[[], None]] = field(default_factory=list)
    _acting: threading.RLock = field(default_factory=threading.RLock, repr=False)

    def act(self, code: int) -> None:
        """Take the actions; more than once if this process may be killed before its end."""
        with self._acting:  # another thread must not end the process meanwhile
            for action in self.at_exit:
                action(code)

    def resume_hint(self) -> str:
        """Return how to resume after a failure that the training did not cause."""
        if is_restarted(os.environ):
            origin = self.checkpoint or "the start: no checkpoint yet"
            return f"Restarted ranks resume from {origin}"
        if self.checkpoint:
            return f"Run the same command again: it resumes from {self.checkpoint}"
        return (
            "No checkpoint was saved: run the same command again (trainers: see --checkpoint-dir)"
        )


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
    except (KeyboardInterrupt, HvdtrainError) as error:
        _end_by(error)
    except Exception as error:
        _end_by(error, "\n" + "".join(traceback.format_exception(error)))
    if code == EXIT_PREEMPTED:
        leave_preempted()
    leave(code)


@functools.cache
def end_by_exceptions() -> None:
    """Let an uncaught exception of this program end all ranks, as one in ``run_and_exit`` does.

    Python alone would wait in the finalizers of MPI, and for threads. The present excepthook shows
    the traceback: Python's, the user's, or that of torch.distributed.
    """
    show = sys.excepthook

    def end(_: object, error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(sys.stderr, io.StringIO):  # of a later hook, which would not print it
            sys.stderr = sys.__stderr__
        name, rows = Path(sys.argv[0]).name, traceback.extract_tb(trace)
        lines = [row.lineno for row in rows if Path(row.filename).name == name]
        detail = f" ({name} line {lines[-1]})" if lines else ""
        _end_by(error, detail, lambda: show(type(error), error, trace))

    sys.excepthook = end


def _end_by(
    error: BaseException, detail: str = "", show: Callable[[], None] | None = None
) -> NoReturn:
    """Report ``error`` and ``detail``, after ``show`` in a user's script, and end the process."""
    code, wait, launch = EXIT_FAILURE, FAILURE_TIMEOUT, detect(os.environ)
    message, common = f"failed: {error!r}{detail}", False
    if isinstance(error, KeyboardInterrupt):
        code, message = EXIT_INTERRUPTED, f"{process_status.interrupted}{detail}"
    elif isinstance(error, HvdtrainError):
        code, message, common = error.exit_code, f"error: {error}{detail}", error.agreed
        if common:
            _disconnect(FAILURE_TIMEOUT)
        if isinstance(error, UsageError):
            # On rank 0, in command line or data, it usually occurs on all ranks.
            wait, common = USAGE_TIMEOUT, common or (launch.is_root and show is None)
    elif launch.is_root and launch.size > 1:
        time.sleep(LOSS_TIMEOUT)
        if process_status.reported:  # a collective has failed, as that rank has exited
            leave(process_status.reported)
    process_status.show = show
    fail(message, code=code, wait=wait, agreed=common)


def leave_preempted() -> NoReturn:
    """Exit with code 75, together with all other ranks."""
    _disconnect(PREEMPTED_TIMEOUT)
    leave(EXIT_PREEMPTED)


def agreed(error: HvdtrainError) -> HvdtrainError:
    """Mark ``error`` as raised by all ranks together, so that only rank 0 prints it."""
    error.agreed = True
    return error


_speaking = threading.Lock()  # never released: its holder ends the process


def _disconnect(timeout: float) -> None:
    """Shut down the communication library before all ranks exit with a nonzero code together.

    Otherwise MPI on other hosts aborts when the first connection breaks, and mpirun returns the
    exit code of the abort. Other ranks are waited for at most ``timeout`` seconds.
    """
    for end in process_status.disconnect:
        thread = threading.Thread(target=end, name="disconnect", daemon=True)
        thread.start()
        thread.join(timeout)


def fail(
    message: str, *, code: int, wait: float = FAILURE_TIMEOUT, agreed: bool = False
) -> NoReturn:
    """Print ``message`` and exit with ``code``; a rank other than 0 waits for rank 0 first."""
    print_error(message, wait=wait, agreed=agreed)
    leave(process_status.reported or code)


def print_error(
    message: str, *, wait: float = FAILURE_TIMEOUT, agreed: bool = False, mpirun_ends: bool = False
) -> None:
    """Print why this process fails; the caller then ends it. See ``fail``.

    Only the first thread prints; any other thread blocks here until the process ends.

    Args:
        message: one or more lines.
        wait: seconds that a rank other than 0 waits for rank 0.
        agreed: all ranks have the same error, so that only rank 0 prints it.
        mpirun_ends: mpirun is about to end all ranks, and no longer forwards their output.
    """
    claim_stderr()
    terminal.clear()
    launch, stage = detect(os.environ), process_status.stage
    if not launch.is_root:
        time.sleep(wait)
    if launch.is_root or not (agreed or process_status.reported):
        if process_status.show:
            process_status.show()
        rank = f"rank {launch.rank} on {socket.gethostname()}"
        prefix = "" if agreed or launch.size == 1 else f"{rank}{', ' + stage if stage else ''}: "
        line = f"hvdtrain: {prefix}{message.rstrip()}\n"
        with contextlib.suppress(OSError):  # mpirun, which reads the output, may have ended
            sys.stdout.flush()
            if not (mpirun_ends and _write_beside(parent_among(MPIRUNS), line)):
                sys.stderr.write(line)


def claim_stderr() -> None:
    """Return in the first thread that calls this; block any other one until the process ends."""
    if not _speaking.acquire(blocking=False):
        threading.Event().wait()


def is_failing() -> bool:
    """Return whether this process has begun to report why it fails."""
    return _speaking.locked()


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
    if not (mpirun_ends and _write_beside(terminating_parent(MPIRUNS), line)):
        with contextlib.suppress(OSError):
            os.write(2, line.encode())


def _write_beside(process: Path | None, line: str) -> bool:
    """Write to the standard error of ``process``, a directory of /proc; return success."""
    if process is None:
        return False
    with contextlib.suppress(OSError):
        try:
            handle = _standard_error_of(process)
        except OSError:  # not permitted, or an old kernel
            handle = os.open(process / "fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            if stat.S_ISREG(os.fstat(handle).st_mode):
                write_after(int(process.name), line, handle)
                return True
        with os.fdopen(handle, "wb", buffering=0) as file:
            file.write(line.encode())
        return True
    return False


PIDFD_GETFD = 438  # number of a system call of Linux, on all architectures


def _standard_error_of(process: Path) -> int:
    """Return a duplicate of the standard error of a process.

    It has the same offset. Otherwise, if it is a file that is not appended to, that process would
    write its next output over the line.
    """
    opened = os.pidfd_open(int(process.name))
    libc = ctypes.CDLL(None, use_errno=True)
    handle: int = libc.syscall(PIDFD_GETFD, opened, 2, 0)
    os.close(opened)
    if handle < 0:
        raise OSError(ctypes.get_errno(), "pidfd_getfd")
    return handle


def leave(code: int) -> NoReturn:
    """Exit at once; with a nonzero code without the finalizers of MPI, Horovod or worker pools.

    After a failure these wait for ranks that have ended; ``os._exit`` cannot hang.
    """
    process_status.act(code)
    with contextlib.suppress(OSError, RuntimeError):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    if code == 0 and not process_status.hangs:
        sys.exit(0)
    if code == 0:
        _disconnect(PREEMPTED_TIMEOUT)
    os._exit(code)


def write_end_mark() -> None:
    """Record in a file how this process, rank 0, ends; no-op if ranks are restarted.

    A launcher's exit code is not reliable: if a host dies while its network stays up, the mpirun of
    Open MPI 5 ends with 0 in the middle of the job. So `hvdtrain launch` and job scripts pass a
    file to rank 0. It contains the job's exit code as far as known: empty for other programs, 1
    from the start of a training, and that of rank 0 at its end. The file of `launch` is in memory,
    and can be opened on the same machine only: on another one rank 0 leaves no mark.
    """
    path = os.environ.get(END_MARK)
    if not path or is_restarted(os.environ):
        return
    process, last = os.getpid(), list[int]()

    def end(code: int) -> None:
        # `atexit` runs after `leave`, and in forked processes too.
        if not last and os.getpid() == process:
            last.append(code)
            _write_mark(path, code)

    _write_mark(path, EXIT_FAILURE)
    process_status.at_exit.append(end)
    # For scripts that end without `leave`, or by an exception.
    atexit.register(lambda: end(EXIT_FAILURE if hasattr(sys, "last_value") else EXIT_OK))


def _write_mark(path: str, code: int) -> None:
    """Replace the file's content without an interval in which it is empty."""
    with contextlib.suppress(OSError):  # the launcher is on another host
        if path.startswith("/proc/") and MARK_NAME not in str(Path(path).readlink()):
            return  # another process with the same id
        handle = os.open(path, os.O_WRONLY | os.O_NOCTTY)
        with contextlib.closing(os.fdopen(handle, "wb", buffering=0)) as file:
            file.truncate(file.write(f"{code}\n".encode()))
