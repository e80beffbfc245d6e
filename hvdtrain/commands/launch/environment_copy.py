"""The copy of an environment in a local directory of a host, shared by the jobs of a user there.

    hvdtrain-env-UID/        this user's only: what is below has predictable names
        DIGEST/              a complete copy; each rank that uses it holds a shared lock on it
        DIGEST.part-XXXX/    one that is being made, locked by who makes it, or removed
        DIGEST.job-JOB       a job that is about to start its ranks there

A copy gets its name when it is complete and loses it before it is removed, so whoever is killed
leaves no copy that lacks a file. Two jobs that need the same copy at once make one each, and the
second one is dropped: if a job waited here for another one, which waits for it on another host,
both would wait for ever. Copies that nobody uses are removed at the end of a job, or by the next.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system.files import claim_folder
from hvdtrain.system.machine.network import boot_id

PREFIX = "hvdtrain-env-"  # of the name of the folder
PART, JOB = ".part-", ".job-"
MARK = ".hvdtrain-environment"  # in a copy: the boot of the host in which it was made
START = 600.0  # seconds in which a job starts its ranks
DAY = 86400.0  # seconds; later, a service may have removed old files from an unused copy
OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
REMEDY = "set TMPDIR to a directory that each host has on a local disk"
# A rank, and what it starts, holds a lock on the copy, its first argument, which then needs no
# reservation, its second one.
HOLD = ("sh", "-c", 'exec 9< "$0" && flock -s 9 && rm -f "$1" && shift && exec "$@"')


def copy_folder(digest: str, directory: Path) -> Path:
    """Return the folder of a copy."""
    return directory / f"{PREFIX}{os.geteuid()}" / digest


def reservation(copy: Path, job: str) -> Path:
    """Return the file of a job that is about to start its ranks from a copy."""
    return copy.with_name(f"{copy.name}{JOB}{job}")


class LocalCopy:
    """The copy of an environment on this host, for one job.

    The methods raise UsageError if the folder is not this user's or not local, and OSError.
    """

    def __init__(self, digest: str, directory: Path, job: str) -> None:
        self.folder = copy_folder(digest, directory)
        self.part: Path | None = None  # the folder to fill, after ``reserve``
        self._root = self.folder.parent
        self._job = reservation(self.folder, job)
        self._lock: int | None = None  # on ``part``

    def reserve(self) -> bool:
        """Keep the copy from being removed until the ranks start; return whether it is missing.

        If it is, fill ``part`` and ``publish`` it.
        """
        with self._exclusive() as take:
            try:
                self._job.touch(exist_ok=False)
            except FileExistsError:  # of the same job on another host
                raise UsageError(f"{self._root} is shared by several hosts: {REMEDY}") from None
            if self.folder.exists() and not _is_sound(self.folder):
                take(self.folder)
            missing = not self.folder.exists()
            if missing:
                prefix = f"{self.folder.name}{PART}"
                self.part = Path(tempfile.mkdtemp(dir=self._root, prefix=prefix))
                self._lock = _lock(self.part)
        return missing

    def publish(self) -> None:
        """Give the complete ``part`` the name of the copy, unless another job was faster."""
        assert self.part
        (self.part / MARK).write_text(boot_id())
        with self._exclusive():
            self._job.touch()
            if not self.folder.exists():
                self.part.rename(self.folder)
            self._unlock()

    def keep(self) -> None:
        """Renew the reservation, when all hosts have their copy.

        Raises:
            UsageError: it had expired, and the copy was removed.
        """
        with _locked(self._root):
            self._job.touch()
            if not self.folder.exists():
                raise UsageError(f"{self.folder} was removed by another job: start the job again")

    def release(self) -> None:
        """End the use by this job."""
        if self._root.exists():
            with self._exclusive():
                self._job.unlink(missing_ok=True)
                self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[Callable[[Path], None]]:
        """Hold the lock of the folder; then remove what nobody uses, which may take minutes.

        Yields a function that takes the name from a folder that is to be removed, too.
        """
        taken: dict[Path, int] = {}  # with their locks

        def take(folder: Path) -> None:
            with contextlib.suppress(BlockingIOError):  # it is in use
                handle = _lock(folder)
                nameless = folder.with_name(f"{folder.name}{PART}{secrets.token_hex(4)}")
                taken[folder.rename(nameless)] = handle

        try:
            with _locked(self._root):
                yield take
                for folder in self._unused():
                    take(folder)
            for folder in taken:
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            for handle in taken.values():
                os.close(handle)
        if taken:
            with _locked(self._root):
                pass  # removes it if it is empty

    def _unused(self) -> list[Path]:
        """Return the folders of which no job is about to start ranks; they may be locked."""
        reserved = set()
        for path in self._root.glob(f"*{JOB}*"):
            with contextlib.suppress(FileNotFoundError):  # a rank has started
                if time.time() - path.lstat().st_mtime < START:
                    reserved.add(path.name.partition(JOB)[0])
                else:
                    path.unlink()
        return [
            path for path in self._root.iterdir() if path.is_dir() and path.name not in reserved
        ]


def _lock(folder: Path) -> int:
    """Lock a folder; return the descriptor of the lock.

    Raises:
        BlockingIOError: it is in use.
    """
    handle = os.open(folder, OPEN)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the lock of the folder ``root``, which is created, and removed if it is left empty.

    Raises:
        UsageError: the folder is not this user's, or cannot be locked.
        OSError: it cannot be created.
    """
    if not root.parent.is_dir():
        raise UsageError(f"{root.parent} is not a directory: {REMEDY}")
    while True:
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        with contextlib.suppress(FileNotFoundError):  # another process has removed it meanwhile
            claim_folder(root)
            handle = os.open(root, OPEN)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX)
            except OSError as error:  # e.g. of NFS
                os.close(handle)
                _remove_empty(root)
                reason = f"{root} cannot be locked ({error.strerror})"
                raise UsageError(f"{reason}: {REMEDY}") from error
            if os.path.samestat(os.fstat(handle), root.lstat()):
                break
            os.close(handle)
    try:
        os.fchmod(handle, 0o700)
        yield
    finally:
        _remove_empty(root)
        os.close(handle)


def _remove_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):  # it is not empty
        folder.rmdir()


def _is_sound(copy: Path) -> bool:
    """Return whether a copy can be relied upon, if no rank uses it.

    After a crash of the host the content of files may be lost, though their names are not.
    """
    try:
        age = time.time() - (copy / MARK).stat().st_mtime
        return age < DAY and (copy / MARK).read_text() == boot_id()
    except OSError:
        return False
