"""How a process of a job ends: one line for the user, the right exit code, no rank left hanging.

mpirun kills all ranks as soon as one exits with a code other than 0, often before another has
printed a word. So rank 0 speaks first and leaves; any other rank waits for the job to be
ended by rank 0, and speaks only if it is still there: then the error was its own.
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

# Seconds that a rank other than 0 waits for rank 0 to speak: wrong use is most often the same on
# all ranks; a failure is most often one rank's own, and the job must be over within 10 s.
WAIT_USAGE = 5.0
WAIT_FAILURE = 1.0
WAIT_LOSS = 5.0  # for the failure detector to say which rank it is that a collective has lost
LOOK, LOOKS = 0.3, 5  # seconds before each look for a lost rank, and how many where it is elastic
WAIT_PREEMPTED = 5.0  # for rank 0 to sum up, after which all leave together
MPIRUNS = tuple(name for name in daemon.NAMES if not name.endswith("ted"))  # not on other hosts


@dataclass
class ProcessStatus:
    """What this process has to say and to do when it ends; there is one, ``process_status``."""

    stage: str = ""  # what it is doing, such as ``step 17``; named where it fails
    checkpoint: str = ""  # the newest one of this run, which the same command goes on from
    interrupted: str = "interrupted"  # what is said after Ctrl-C
    at_exit: list[Callable[[int], None]] = field(default_factory=list)  # given the exit code
    disconnect: list[Callable[[], None]] = field(default_factory=list)  # ends the runtime in order

    def how_to_go_on(self) -> str:
        """Say what to do after a failure that is not the training's own, or what is done."""
        if is_restarted(os.environ):
            where = self.checkpoint or "the start: nothing is saved yet"
            return f"Ranks that are started anew go on from {where}"
        if self.checkpoint:
            return f"Run the same command again: it goes on from {self.checkpoint}"
        return (
            "It left no checkpoint: run the same command again (--checkpoint-dir keeps what is "
            "done)"
        )


process_status = ProcessStatus()


def run_and_exit(main: Callable[[], int]) -> NoReturn:
    """Call ``main`` and end the process with what it returns, whatever happens in it.

    An ``HvdtrainError`` becomes one line on standard error and its exit code; anything else is a
    defect or a broken machine: its traceback is shown, headed by rank and host, and the code is 1.
    """
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILURE if stop.code else 0
        if code and process_status.stage and detect(os.environ).size > 1:
            reason = "" if isinstance(stop.code, int) else f" ({stop.code})"
            left = f"the program called sys.exit{reason}, exit code {code}"
            fail(f"{left}. {process_status.how_to_go_on()}", code=code)
    except KeyboardInterrupt:
        fail(process_status.interrupted, code=EXIT_INTERRUPTED)
    except HvdtrainError as error:
        wait = WAIT_USAGE if isinstance(error, UsageError) else WAIT_FAILURE
        # What rank 0 finds wrong in the command line or the data is most often so for all ranks.
        common = is_agreed(error) or (isinstance(error, UsageError) and detect(os.environ).is_root)
        if is_agreed(error):
            _disconnect(WAIT_FAILURE)
        fail(f"error: {error}", code=error.exit_code, wait=wait, agreed=common)
    except Exception as error:
        if is_elastic(os.environ):
            outlive_loss()
        elif (launch := detect(os.environ)).is_root and launch.size > 1:
            time.sleep(LOOK)  # a collective fails of a lost rank: which one, its detector says
        detail = "".join(traceback.format_exception(error))
        fail(f"failed: {error!r}\n{detail}", code=EXIT_FAILURE, wait=WAIT_FAILURE)
    if code == EXIT_PREEMPTED:
        _disconnect(WAIT_PREEMPTED)
    leave(code)


def outlive_loss() -> None:
    """Start anew where another rank is lost, which an error of a collective comes of.

    The failure detector does so meanwhile; while the ranks are still connecting there is none.
    What all ranks fail of is no loss: each asks before the first of them has left.
    """
    for _ in range(LOOKS):
        time.sleep(LOOK)
        if elastic.another_is_lost():
            start_anew()
    time.sleep(WAIT_LOSS - LOOKS * LOOK)


def end_after_loss() -> NoReturn:
    """End this process because another rank is lost; it is started anew where that is the way."""
    if is_elastic(os.environ):
        start_anew()
    leave(EXIT_FAILURE)


def start_anew() -> NoReturn:
    """End this rank to be started anew, from the newest checkpoint (``elastic.py``)."""
    terminal.clear()
    leave(elastic.EXIT_ANEW)


def agreed(error: HvdtrainError) -> HvdtrainError:
    """Mark ``error`` as one that all ranks raise together, so that rank 0 alone speaks."""
    error.__notes__ = [*getattr(error, "__notes__", []), _AGREED]
    return error


def is_agreed(error: BaseException) -> bool:
    """Return whether all ranks raise this error together."""
    return _AGREED in getattr(error, "__notes__", [])


_AGREED = "agreed by all ranks"

_speaking = threading.Lock()  # never released: who has it ends the process


def _disconnect(patience: float) -> None:
    """End the runtime in good order before all ranks leave with a code other than 0 together.

    Otherwise MPI on other hosts sees the first connection break, aborts, and mpirun's exit code is
    that of the abort. A rank that does not come is waited for ``patience`` seconds.
    """
    for end in process_status.disconnect:
        thread = threading.Thread(target=end, name="disconnect", daemon=True)
        thread.start()
        thread.join(patience)


def fail(message: str, *, code: int, wait: float = WAIT_FAILURE, agreed: bool = False) -> NoReturn:
    """Say ``message`` and leave with ``code``; a rank other than 0 lets rank 0 go first."""
    speak(message, wait=wait, agreed=agreed)
    leave(code)


def speak(
    message: str, *, wait: float = WAIT_FAILURE, agreed: bool = False, mpirun_ends: bool = False
) -> None:
    """Say why this process fails; the caller ends it then. See ``fail``.

    Of several threads the first one speaks; the others wait here for the end.

    Args:
        message: the line, or lines.
        wait: seconds that a rank other than 0 lets rank 0 go first.
        agreed: all ranks fail of the same, so rank 0 alone speaks.
        mpirun_ends: mpirun is about to end all ranks, and no longer passes on what they say.
    """
    be_the_first_to_speak()
    terminal.clear()
    launch, stage = detect(os.environ), process_status.stage
    if not launch.is_root:
        time.sleep(wait)
    if launch.is_root or not agreed:
        who = f"rank {launch.rank} on {socket.gethostname()}"
        where = "" if agreed or launch.size == 1 else f"{who}{', ' + stage if stage else ''}: "
        line = f"hvdtrain: {where}{message.rstrip()}\n"
        with contextlib.suppress(OSError):  # mpirun, which reads what is said, may be gone
            sys.stdout.flush()
            if not (mpirun_ends and _write_beside(_parent(MPIRUNS), line)):
                sys.stderr.write(line)


def be_the_first_to_speak() -> None:
    """Return in the first thread that comes here; any other one waits for the end."""
    if not _speaking.acquire(blocking=False):
        threading.Event().wait()


def announce(text: str, *, mpirun_ends: bool) -> None:
    """Write a line for the user, to be called on rank 0: why it stops in good order.

    Args:
        text: the line.
        mpirun_ends: Open MPI's mpirun has been told to end, too, unless it does not hear TERM (see
            ``launch.watch``). It then throws away what its ranks say, so the line goes to its own
            standard error.
    """
    terminal.clear()
    # mpirun passes on what comes on two streams in any order: a bar may still be there.
    line = f"{terminal.ERASE if terminal.columns() else ''}hvdtrain: {text}\n"
    with contextlib.suppress(OSError, RuntimeError):  # a signal may have come within a flush
        sys.stdout.flush()
    if not (mpirun_ends and _write_beside(_impatient(MPIRUNS), line)):
        with contextlib.suppress(OSError):
            os.write(2, line.encode())


def _write_beside(process: Path | None, line: str) -> bool:
    """Write to the standard error of ``process``, a folder of /proc; return whether it was done."""
    if process is None:
        return False
    with contextlib.suppress(OSError):
        # Where it is a file, to its end: it may have been written from its beginning.
        handle = os.open(process / "fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
        with os.fdopen(handle, "wb", buffering=0) as file:
            file.write(line.encode())
        return True
    return False


def _parent(names: Sequence[str]) -> Path | None:
    """Find /proc of this process's parent, if it is one of ``names``."""
    parent = Path(f"/proc/{os.getppid()}")
    with contextlib.suppress(OSError):
        if (parent / "comm").read_text().strip() in names:
            return parent
    return None


def _impatient(names: Sequence[str]) -> Path | None:
    """Find /proc of this process's parent, if it is one of ``names`` that kills soon after TERM."""
    with contextlib.suppress(OSError):
        if parent := _parent(names):
            status = (parent / "status").read_text()
            blocked = re.search(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)
            deaf = blocked and int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1
            return None if deaf else parent
    return None


def is_ended_by_mpirun() -> bool:
    """Return whether mpirun or its daemon started this process; they send TERM to end a rank."""
    return _parent(daemon.NAMES) is not None


@contextlib.contextmanager
def outlived(action: Callable[[], object]) -> Iterator[None]:
    """Have a copy of this process do ``action`` if mpirun kills it before the block has ended.

    Open MPI's mpirun kills its ranks half a second after it got TERM itself, and a save may take
    longer. The copy is made when the signal comes, in a process group of its own, which mpirun does
    not know, and in the same session, where a batch system's KILL finds it. It has this thread
    alone, so ``action`` must not compute with a framework or call MPI.
    """
    if threading.current_thread() is not threading.main_thread() or not _impatient(daemon.NAMES):
        yield
        return
    came, wake = os.pipe()
    os.set_blocking(wake, False)
    done, finish = os.pipe()  # closed without a word when this process is killed
    copies: list[int] = []

    def wait() -> None:
        while (number := os.read(came, 1)) and number[0] not in (signal.SIGTERM, signal.SIGINT):
            pass
        if number and (copy := os.fork()):
            copies.append(copy)
        elif number:
            _act_after(done, finish, action)

    # It is told at once, also while the main thread waits for the disk.
    former = signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    thread = threading.Thread(target=wait, name="outlived", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(former)
        os.close(wake)
        thread.join()
        os.write(finish, b".")
        for handle in (came, done, finish):
            os.close(handle)
        for copy in copies:
            os.waitpid(copy, 0)


def _act_after(done: int, finish: int, action: Callable[[], object]) -> NoReturn:
    """Do ``action``, in the copy, when ``done`` is closed without a word; then end."""
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
    """End this worker process when the process that asked for it ends; to be called first in it.

    A worker's parent in the system's eyes is the fork server, which itself waits for its workers;
    if mpirun kills the training process, all of them would stay for ever.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(EXIT_FAILURE)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()


def leave(code: int) -> NoReturn:
    """End the process at once, without the finalizers of MPI, Horovod or worker pools.

    After a failure those wait for ranks that will never come; ``os._exit`` cannot hang.
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
