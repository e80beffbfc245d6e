"""Temporary files of a rank: gone when it ends, and if it could not, at the user's next start."""

from __future__ import annotations

import contextlib
import fcntl
import multiprocessing
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.system.runtime.detect import detect

LONGEST_FOLDER = 50  # characters; sockets in it have names of at most 108
LOCK = "lock"  # a file in the folder of a process, locked while that lives
SHARED = Path("/dev/shm")
PROCESSES = Path("/proc")
FIRST_NAMESPACE = "pid:[4026531836]"  # proc_ns.h: in it all processes of a machine are seen
NEW = 60.0  # seconds for which nothing is a leftover: it may just be in the making

CLEAR = 'trap "" HUP INT TERM; read -r _; rm -rf "$1" /dev/shm/sem."$2"-*'  # a shell's work

_clearing: list[subprocess.Popen[bytes]] = []  # keeps open what tells it that this process lives
_locks: list[int] = []  # held until this process ends, and those that it has forked


def leave_nothing_behind() -> None:
    """Give this process a folder for its temporary files that goes when it ends, however it ends.

    Reading with worker processes leaves sockets and semaphores, TensorFlow the code that it has
    made, where the process is killed; and mpirun kills all ranks when one has failed. So a shell
    in a session of its own waits for the end and clears away. It opens nothing of this process.
    """
    usual = tempfile.gettempdir()
    if _clearing or len(usual) > LONGEST_FOLDER:
        return
    if detect(os.environ).local_rank == 0:
        clear_leftovers()
    folder = Path(tempfile.mkdtemp(prefix="hvdtrain-"))
    with contextlib.suppress(OSError):  # a file system without locks: nobody else clears it then
        handle = os.open(folder / LOCK, os.O_CREAT | os.O_WRONLY, 0o600)
        _locks.append(handle)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    _clearing.append(
        subprocess.Popen(
            ["/bin/sh", "-c", CLEAR, "sh", str(folder), folder.name],
            stdin=subprocess.PIPE,  # its end is this process's end
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )
    )
    tempfile.tempdir = os.environ["TMPDIR"] = str(folder)
    # How multiprocessing begins the names of semaphores; no public name leads there.
    config = getattr(multiprocessing.current_process(), "_config", {})
    config["semprefix"] = f"/{folder.name}"
    # Its resource tracker, which is started with these, need not report what it clears away.
    sys.warnoptions.append("ignore:resource_tracker:UserWarning")


def clear_leftovers(temporary: Path | None = None, shared: Path = SHARED, new: float = NEW) -> None:
    """Remove what jobs of this user that were killed have left on this host.

    That is the folders of ranks, and Open MPI's: ``ompi.PID`` and segments of shared memory. What
    a process may still use stays: a folder that is locked, one whose process lives, and whatever
    is mapped by a process, or might be by one that is not seen here.

    Args:
        temporary: the folder for temporary files; None: the usual one.
        shared: where shared memory has its names.
        new: seconds for which nothing is a leftover.
    """
    temporary = temporary or Path(tempfile.gettempdir())
    for folder in _old(temporary, r"hvdtrain-\w{8}", new):
        if _is_unlocked(folder / LOCK):
            shutil.rmtree(folder, ignore_errors=True)
            for semaphore in shared.glob(f"sem.{folder.name}-*"):
                semaphore.unlink(missing_ok=True)
    host = re.escape(socket.gethostname())
    folders = [one for one in _old(temporary, r"ompi\.\d+", new) if _is_of_dead(one, host)]
    segments = list(_old(shared, rf"sm_segment\.{host}\.{os.getuid()}\.[0-9a-f]+\.\d+", new))
    mapped = _mapped_files() if folders or segments else None
    for path in [*folders, *segments] if mapped is not None else []:
        if not any(name == str(path) or name.startswith(f"{path}/") for name in mapped or ()):
            shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                path.unlink()


def _old(folder: Path, pattern: str, new: float) -> Iterator[Path]:
    """Yield this user's entries of ``folder`` that are called so and are not new."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if re.fullmatch(pattern, path.name):
                with contextlib.suppress(OSError):  # it goes just now
                    entry = path.lstat()
                    if entry.st_uid == os.getuid() and time.time() - entry.st_mtime >= new:
                        yield path


def _is_unlocked(lock: Path) -> bool:
    """Return whether the process that made ``lock`` has ended, and those that it forked."""
    try:
        handle = os.open(lock, os.O_WRONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _is_of_dead(folder: Path, host: str) -> bool:
    """Return whether the daemon that made ``folder`` was one of this host, and is no more."""
    names = (path.name for path in folder.rglob("pmix*"))
    here = any(re.match(rf"pmix(-gds-\w+)?\.{host}[.-]", name) for name in names)
    return here and not (PROCESSES / folder.suffix.removeprefix(".")).exists()


def _mapped_files() -> set[str] | None:
    """Return the files that this user's processes have mapped; None if some are not seen."""
    found: set[str] = set()
    try:
        if str((PROCESSES / "self/ns/pid").readlink()) != FIRST_NAMESPACE:
            return None
        for process in PROCESSES.glob("[0-9]*"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ends just now
                if process.name != "1" and process.stat().st_uid == os.getuid():
                    lines = (process / "maps").read_text(errors="replace").splitlines()
                    found |= {line.split(maxsplit=5)[-1] for line in lines}
    except OSError:
        return None
    return found
