"""Outlive Open MPI's mpirun above a rank, which kills its ranks too early, or end it.

After SIGTERM mpirun kills its ranks within half a second, and a save may take longer. After a
failure it orders its daemons to end and waits for all of them, without a limit: if one cannot be
reached, the job never ends. And what a rank appends to the file of mpirun's output, mpirun then
overwrites with its own message.

A rank's worker processes outlive stop signals, which all processes of a job receive, but not the
rank.

This file is also the program that ends mpirun, or writes after its end, as the rank itself is
ended: it imports only the standard library at module level, to start fast.
"""

from __future__ import annotations

import contextlib
import multiprocessing.connection
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import NoReturn

MPIRUNS = ("prterun", "mpirun", "mpiexec", "orterun")
NAMES = (*MPIRUNS, "prted", "orted")  # and its daemons on other hosts
# Prefix of namespaces whose daemons serve several jobs (`prte` and `prun`).
SHARED = "prte-"

# Signals by which batch systems and terminals stop a job. URG is the one that reaches the ranks of
# a PBS job: it goes to every process, and most others would end the login shell above the script.
STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGURG,
)

FORWARD = 1.0  # seconds for mpirun to forward the rank's output
TIMES = 3  # number of SIGINTs: orderly end, warning, immediate end
SIGNAL_INTERVAL = 0.3  # seconds between them
START = 0.1  # seconds for a small program to start
POLL = 0.01  # seconds between two looks at a process
END = 60.0  # seconds for mpirun to end after its ranks


def parent_among(names: Sequence[str]) -> Path | None:
    """Return the /proc directory of the parent process if its name is one of ``names``."""
    parent = Path(f"/proc/{os.getppid()}")
    with contextlib.suppress(OSError):
        if (parent / "comm").read_text().strip() in names:
            return parent
    return None


def is_ended_by_mpirun() -> bool:
    """Return whether mpirun or its daemon started this process; they end a rank by SIGTERM."""
    return parent_among(NAMES) is not None


def terminating_parent(names: Sequence[str]) -> Path | None:
    """Return ``parent_among(names)`` unless it blocks SIGTERM, after which it kills its ranks."""
    parent = parent_among(names)
    with contextlib.suppress(OSError):
        if parent:
            status = (parent / "status").read_text()
            blocked = re.search(r"^SigBlk:\s*(\w+)", status, re.MULTILINE)
            is_blocked = blocked and int(blocked[1], 16) >> (signal.SIGTERM - 1) & 1
            return None if is_blocked else parent
    return None


@contextlib.contextmanager
def surviving_kill(action: Callable[[], object], *, expected: bool = False) -> Iterator[None]:
    """Let a forked copy of this process do ``action`` if mpirun kills it within the block.

    Open MPI's mpirun kills its ranks half a second after receiving SIGTERM, and a save may take
    longer. The copy is forked when the signal arrives, or at once if a kill is ``expected`` because
    the signal has already arrived. It is in a new process group, unknown to mpirun, but in the same
    session, so that a batch system can kill it. It has only this thread, so ``action`` must not
    compute with a framework or call MPI.
    """
    if threading.current_thread() is not threading.main_thread() or not terminating_parent(NAMES):
        yield
        return
    arrived, wake = os.pipe()
    os.set_blocking(wake, False)
    done, finish = os.pipe()  # closed without data if this process is killed
    copies: list[int] = []

    def wait() -> None:
        stopping = expected
        while not stopping and (number := os.read(arrived, 1)):
            stopping = number[0] in (signal.SIGTERM, signal.SIGINT)
        if stopping and (copy := os.fork()):
            copies.append(copy)
        elif stopping:
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
        os._exit(1)


def worker_context() -> ForkServerContext:
    """Return the context to create worker processes in, each of which calls ``end_with_parent``.

    They are started by a fork server: a fork of a process with MPI may hang. A batch system or a
    terminal sends a stop signal to all processes of a job, but a rank needs its workers until it
    has saved: it and they inherit from this call that these signals are blocked.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        resource_tracker.ensure_running()  # unblocks two of them (Python 3.11)
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return multiprocessing.get_context("forkserver")


def end_with_parent(_: int = 0) -> None:
    """End this worker process when the process that created it ends; call it first in a worker.

    The operating system's parent of a worker is the fork server, which waits for its workers; if
    mpirun killed the training process, all of them would keep running. SIGTERM, which
    ``worker_context`` blocks, also ends this process if the training process sends it.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    def wait_for_sigterm() -> None:
        while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent.pid:
            pass
        os._exit(1)

    for wait in (watch, wait_for_sigterm):
        threading.Thread(target=wait, name="end with parent", daemon=True).start()


def end_mpirun() -> bool:
    """End the mpirun or the daemon that started this rank, in ``FORWARD`` seconds.

    Its ranks should not exit earlier: an mpirun on a third host learns of the loss only from this
    daemon, and only while it does not wait for an orderly end yet.

    Returns:
        Whether it will be ended; False if another launcher started this rank.
    """
    import psutil

    from hvdtrain.system.runtime.command import Command, leave_behind

    if os.environ.get("PMIX_NAMESPACE", "").startswith(SHARED):
        return False
    try:
        above = [process for process in psutil.Process().parents() if process.name() in NAMES]
    except psutil.Error:
        return False
    if above:
        leave_behind(Command((sys.executable, "-I", "-S", __file__, str(above[0].pid))))
    return bool(above)


def write_after(process: int, text: str, output: int) -> None:
    """Write ``text`` to the file descriptor ``output`` when ``process`` has ended."""
    from hvdtrain.system.runtime.command import Command, leave_behind

    command = Command((sys.executable, "-I", "-S", __file__, str(process), text))
    leave_behind(command, output=output)
    time.sleep(START)  # mpirun ends as soon as this rank has


def write_when_ended(process: int, text: str) -> None:
    """Write ``text`` to the standard output when ``process`` has ended, at most ``END`` later."""
    deadline = time.monotonic() + END
    while Path(f"/proc/{process}").exists() and time.monotonic() < deadline:
        time.sleep(POLL)
    os.write(1, text.encode())


def end(process: int) -> None:
    """End ``process`` and its children.

    An ssh to a lost host does not end by itself and keeps mpirun's output open, so that a reader,
    as in ``mpirun ... | tee log``, would not end either.
    """
    time.sleep(FORWARD)
    started = _children(process)
    with contextlib.suppress(OSError):  # it has ended
        for _ in range(TIMES):
            os.kill(process, signal.SIGINT)
            time.sleep(SIGNAL_INTERVAL)
    for child in started:
        with contextlib.suppress(OSError):
            os.kill(child, signal.SIGKILL)  # the ssh of `hvdtrain launch` ignores SIGTERM


def _children(process: int) -> list[int]:
    """Return the ids of the live children of ``process``."""
    children = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            after_name = file.read_text().rpartition(")")[2].split()  # state, parent, ...
            if int(after_name[1]) == process:
                children.append(int(file.parent.name))
    return children


if __name__ == "__main__":
    action = write_when_ended if sys.argv[2:] else end
    action(int(sys.argv[1]), *sys.argv[2:])
