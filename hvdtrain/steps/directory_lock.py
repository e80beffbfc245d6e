"""One training per checkpoint directory: a lock that a crash does not leave behind for ever.

The lock is a file that names its owner, who touches it every few seconds. On the owner's host it
counts as long as that process lives. On another host it counts as long as it is touched; the file
system's own clock tells that, so the clocks of the hosts need not agree. (File locks of the kernel
would be simpler, and are local to a host, or refused, on many a parallel file system.)
"""

from __future__ import annotations

import contextlib
import getpass
import json
import logging
import os
import socket
import tempfile
import threading
import time
import uuid
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from hvdtrain.errors import CheckpointError, UsageError
from hvdtrain.steps.integrity import BOOT_ID
from hvdtrain.system.files import read_regular
from hvdtrain.system.runtime.detect import JOB_VARIABLES

log = logging.getLogger(__name__)

NAME = ".lock"
BEAT = 5.0  # seconds between two touches
SILENCE = 4 * BEAT  # without a touch, after which an owner on another host counts as dead
PATIENCE = 3.0  # seconds in which a process that is being ended may still go
LOOK = 0.2  # seconds between two looks at it


@dataclass(frozen=True)
class Owner:
    """Who holds a lock."""

    user: str
    host: str
    pid: int
    born: float  # when the process began: a later one may have its number
    machine: str  # where ``pid`` counts: the host since its boot, or a container on it
    job: str  # number of the batch job; empty outside of one
    token: str = field(default_factory=lambda: uuid.uuid4().hex)

    @staticmethod
    def this_process() -> Owner:
        """Return this process as an owner."""
        try:
            user = getpass.getuser()
        except (KeyError, OSError):  # a container without an entry for this user
            user = str(os.getuid())
        boot = BOOT_ID.read_text().strip() if BOOT_ID.is_file() else socket.gethostname()
        with contextlib.suppress(OSError):
            boot += str(Path("/proc/self/ns/pid").readlink())
        job = next((os.environ[name] for name in JOB_VARIABLES if os.environ.get(name)), "")
        born = psutil.Process().create_time()
        return Owner(user, socket.gethostname(), os.getpid(), born, boot, job)

    def __str__(self) -> str:
        """Return it as a message names it."""
        job = f"job {self.job}, " if self.job else ""
        began = time.strftime("%d %b %H:%M", time.localtime(self.born))
        return f"{job}process {self.pid} of {self.user} on {self.host}, since {began}"

    def lives(self) -> bool:
        """Return whether its process is there; to be asked on its machine."""
        with contextlib.suppress(psutil.Error, ValueError, OverflowError):
            process = psutil.Process(self.pid)
            # Its clock ticks a hundred times per second.
            same = abs(process.create_time() - self.born) < 0.02
            return same and process.status() != psutil.STATUS_ZOMBIE
        return False


Holder = tuple[Owner | None, int]
"""The owner, None where that cannot be read, and when it touched its lock (nanoseconds)."""


class DirectoryLock:
    """The lock of ``directory``, which is there; one rank of a training takes it."""

    def __init__(self, directory: Path, owner: Owner | None = None) -> None:
        self.directory, self.path = directory, directory / NAME
        self.owner = owner or Owner.this_process()
        self._over = threading.Event()

    def take(self) -> None:
        """Take the lock, a dead owner's too, and hold it until ``release``.

        Raises:
            UsageError: another training holds it, which is named; or it cannot be made.
        """
        try:
            while not self._create():
                self._outlive()
        except OSError as error:
            raise UsageError(
                f"--checkpoint-dir {self.directory}: its lock {NAME}: {error.strerror or error}"
            ) from error
        threading.Thread(target=self._beat, name="checkpoint lock", daemon=True).start()

    def check(self) -> None:
        """Make sure, before a save, that it is still ours; what was removed is made again.

        Raises:
            CheckpointError: another training has taken it.
        """
        with contextlib.suppress(OSError):  # the save itself tells what is wrong
            if not self.directory.exists():
                self.directory.mkdir(parents=True)
                log.warning(
                    "the checkpoint directory %s was removed meanwhile, with what was in it: it is "
                    "made again",
                    self.directory,
                )
            self._create()
        holder = _look(self.path)
        if holder and holder[0] and holder[0].token != self.owner.token:
            raise CheckpointError(
                f"--checkpoint-dir {self.directory} was taken over by another training meanwhile "
                f"({holder[0]}): nothing is saved there any more"
            )

    def release(self) -> None:
        """Give the lock back; does nothing where it is not ours."""
        self._over.set()
        holder = _look(self.path)
        if holder and holder[0] and holder[0].token == self.owner.token:
            with contextlib.suppress(OSError):
                self.path.unlink()

    def _create(self) -> bool:
        try:
            with self.path.open("x") as file:
                json.dump(asdict(self.owner), file)
        except FileExistsError:
            return False
        return True

    def _outlive(self) -> None:
        """Return when the lock is gone, removing that of a dead owner.

        Raises:
            UsageError: the owner is alive.
        """
        began, first = time.monotonic(), _look(self.path)
        while first and (now := _look(self.path)) and now[0] == first[0]:
            owner, waited = now[0], time.monotonic() - began
            if owner and owner.machine == self.owner.machine:
                dead = owner.pid == self.owner.pid or not owner.lives()
                alive = waited > PATIENCE
            else:
                dead = waited > SILENCE or self._age(now[1]) > SILENCE
                alive = now[1] != first[1]
            if alive and not dead:
                raise UsageError(
                    f"--checkpoint-dir {self.directory} is in use by another training"
                    f"{f' ({owner})' if owner else ''}: wait until it has ended, or give another "
                    "directory"
                )
            if dead:
                return self._remove(owner)
            time.sleep(LOOK)
        return None

    def _age(self, touched: int) -> float:
        """Return seconds since ``touched``, by the clock of the file system."""
        with tempfile.NamedTemporaryFile(prefix=f"{NAME}-", dir=self.directory) as probe:
            return (os.fstat(probe.fileno()).st_mtime_ns - touched) / 1e9

    def _remove(self, dead: Owner | None) -> None:
        aside = self.directory / f"{NAME}-{self.owner.token}"
        with contextlib.suppress(FileNotFoundError):  # somebody else was quicker
            self.path.rename(aside)
            holder = _look(aside)
            if holder and holder[0] != dead:  # somebody else has taken it over: give it back
                with contextlib.suppress(FileExistsError):
                    self.path.hardlink_to(aside)
            aside.unlink()

    def _beat(self) -> None:
        while not self._over.wait(BEAT):
            with contextlib.suppress(OSError):
                os.utime(self.path)


def _look(path: Path) -> Holder | None:
    """Return who holds the lock ``path``; None: nobody."""
    owner = None
    # What is just being written, is damaged or not for us to read, tells no owner.
    with contextlib.suppress(OSError, ValueError, TypeError, OverflowError, RecursionError):
        owner = Owner(**json.loads(read_regular(path)))
        str(owner)
    try:
        return owner, path.lstat().st_mtime_ns
    except OSError:
        return None
