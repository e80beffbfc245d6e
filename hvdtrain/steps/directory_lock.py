"""Lock of a checkpoint directory for one training, which does not outlast a crash.

The lock is a file that names its owner and is touched by it every few seconds. On the owner's host
it is valid while that process is alive; on another host while it is touched, measured by the clock
of the file system, so that the hosts' clocks need not agree. (Kernel file locks would be simpler,
but are local to a host, or unsupported, on many parallel file systems.)
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from hvdtrain.errors import CheckpointError, UsageError
from hvdtrain.system.files import read_regular
from hvdtrain.system.folder import Folder
from hvdtrain.system.machine.network import boot_id
from hvdtrain.system.runtime.detect import JOB_VARIABLES

log = logging.getLogger(__name__)

NAME = ".lock"
BEAT = 5.0  # seconds between two touches
SILENCE = (
    4 * BEAT
)  # seconds without a touch after which an owner on another host is considered dead
EXIT_TIMEOUT = 3.0  # seconds to wait for the end of a process that may be terminating
POLL_INTERVAL = 0.2  # seconds between checks


@dataclass(frozen=True)
class Owner:
    """The process that holds a lock."""

    user: str
    host: str
    pid: int
    born: float  # start time of the process, as its id may be reused
    machine: str  # scope of ``pid``: the host since its boot, or a container
    job: str  # id of the batch job; empty outside of one
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @staticmethod
    def this_process() -> Owner:
        """Return this process as an owner."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container without an entry for this user
            user = str(os.getuid())
        boot = boot_id() or socket.gethostname()
        with contextlib.suppress(OSError):
            boot += str(Path("/proc/self/ns/pid").readlink())
        job = next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), "")
        born = psutil.Process().create_time()
        return Owner(user, socket.gethostname(), os.getpid(), born, boot, job)

    def __str__(self) -> str:
        """Return a description for messages."""
        job = f"job {self.job}, " if self.job else ""
        began = time.strftime("%d %b %H:%M", time.localtime(self.born))
        return f"{job}process {self.pid} of {self.user} on {self.host}, since {began}"

    def lives(self) -> bool:
        """Return whether the process is alive; valid on its machine only."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(self.pid)
            # The resolution of start times is 10 ms.
            same = abs(process.create_time() - self.born) < 0.02
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False


Holder = tuple[Owner | None, int]
"""The owner, None if unreadable, and the time of the last touch in nanoseconds."""


class DirectoryLock:
    """Lock of an existing ``directory``, taken by one rank of a training."""

    def __init__(self, directory: Path, owner: Owner | None = None) -> None:
        self.directory, self.path = directory, directory / NAME
        self.owner = owner or Owner.this_process()
        self._over = threading.Event()

    def take(self) -> None:
        """Take the lock, also that of a dead owner, and hold it until ``release``.

        Raises:
            UsageError: another training holds it, which is named; or it cannot be created.
        """
        try:
            while not self._create():
                self._wait()
        except OSError as error:
            raise UsageError(
                f"--checkpoint-dir {self.directory}: its lock {NAME}: {error.strerror or error}"
            ) from error
        threading.Thread(target=self._beat, name="checkpoint lock", daemon=True).start()

    def check(self) -> None:
        """Check before a save that the lock is still held; recreate it if it was removed.

        Raises:
            CheckpointError: another training has taken it.
        """
        with contextlib.suppress(OSError):  # the save itself reports the error
            if self._create():
                log.warning(
                    "the lock of the checkpoint directory %s is missing: the directory was removed "
                    "or emptied, or its file system was unmounted. Check that; later checkpoints "
                    "are written to it as it is now",
                    self.directory,
                )
        holder = _read_holder(self.path)
        if holder and holder[0] and holder[0].token != self.owner.token:
            raise CheckpointError(
                f"--checkpoint-dir {self.directory} was taken over by another training "
                f"({holder[0]}): no checkpoint is saved there any more"
            )

    def release(self) -> None:
        """Release the lock; no-op if another owner holds it."""
        self._over.set()
        holder = _read_holder(self.path)
        if holder and holder[0] and holder[0].token == self.owner.token:
            with contextlib.suppress(OSError):
                Folder.named(self.directory).remove(NAME)

    def _create(self) -> bool:
        try:
            with Folder.named(self.directory).open(NAME, "xb") as file:
                file.write(msgspec.json.encode(self.owner))
        except FileExistsError:
            return False
        return True

    def _wait(self) -> None:
        """Wait until the lock is removed; remove that of a dead owner.

        Raises:
            UsageError: the owner is alive.
        """
        began, first = time.monotonic(), _read_holder(self.path)
        while first and (now := _read_holder(self.path)) and now[0] == first[0]:
            owner, waited = now[0], time.monotonic() - began
            if owner and owner.machine == self.owner.machine:
                dead = owner.pid == self.owner.pid or not owner.lives()
                alive = waited > EXIT_TIMEOUT
            else:
                dead = waited > SILENCE or self._age(now[1]) > SILENCE
                alive = now[1] != first[1]
            if alive and not dead:
                raise UsageError(
                    f"--checkpoint-dir {self.directory} is in use by another training"
                    f"{f' ({owner})' if owner else ''}: wait until it has ended, or use another "
                    "directory"
                )
            if dead:
                return self._remove(owner)
            time.sleep(POLL_INTERVAL)
        return None

    def _age(self, touched: int) -> float:
        """Return seconds since ``touched``, by the clock of the file system."""
        with tempfile.NamedTemporaryFile(prefix=f"{NAME}-", dir=self.directory) as probe:
            return (os.fstat(probe.fileno()).st_mtime_ns - touched) / 1e9

    def _remove(self, dead: Owner | None) -> None:
        folder, aside = Folder.named(self.directory), f"{NAME}-{self.owner.token}"
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            folder.rename(NAME, aside)
            holder = _read_holder(self.directory / aside)
            if holder and holder[0] != dead:  # another process has taken it over: restore its lock
                with contextlib.suppress(FileExistsError):
                    os.link(aside, NAME, src_dir_fd=folder.handle, dst_dir_fd=folder.handle)
            folder.remove(aside)

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):
                folder = Folder.named(self.directory, create=False)
                os.utime(NAME, dir_fd=folder.handle, follow_symlinks=False)


def _read_holder(path: Path) -> Holder | None:
    """Return the holder of the lock ``path``, or None."""
    owner = None
    # The owner is unknown if the file is incomplete or not readable.
    with contextlib.suppress(OSError, ValueError):
        owner = msgspec.json.decode(read_regular(path), type=Owner)
    try:
        return owner, path.lstat().st_mtime_ns
    except OSError:
        return None
