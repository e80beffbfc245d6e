"""The copy of an environment in a local directory of a host, shared by the jobs of a user there.

    hvdtrain-env-UID/            this user's alone; what is below has predictable names
        lock                     held for moments, never while another host is waited for
        DIGEST/                  a complete copy; each rank that uses it holds a shared lock on it
        DIGEST.part-XXXX/        one that is being made, or removed; locked by who does it
        DIGEST.job-JOB           a job that is about to start its ranks there; they remove it

A copy gets its name when it is complete and loses it before it is removed, so whoever is killed
leaves no copy that lacks a file. Two jobs that need the same copy at once make one each, and the
second one is dropped: if a job waited here for another one, which waits for it on another host,
both would wait for ever. Copies that nobody uses are removed by the next job.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hvdtrain.commands.launch.environment import Manifest, Member
from hvdtrain.commands.launch.environment_files import Change
from hvdtrain.errors import UsageError
from hvdtrain.system.files import claim_folder

PREFIX = "hvdtrain-env-"  # of the name of the folder
LOCK, PART, JOB = "lock", ".part-", ".job-"
MARK = ".hvdtrain-environment"  # in a copy: the boot of the host in which it was made
PIECE = 2**20  # bytes written at a time
START = 600.0  # seconds in which a job starts its ranks
DAY = 86400.0  # seconds; later, a service may have removed old files from an unused copy
PATIENCE = 60.0  # seconds for the lock
PAUSE = 0.05  # seconds between two attempts
BOOT = Path("/proc/sys/kernel/random/boot_id")
NOT_FOLLOWED = os.O_NOFOLLOW | os.O_CLOEXEC

Read = Callable[[int], bytes | memoryview]


def copy_folder(digest: str, directory: Path) -> Path:
    """Return the folder of a copy."""
    return directory / f"{PREFIX}{os.geteuid()}" / digest


def reservation(copy: Path, job: str) -> Path:
    """Return the file of a job that is about to start its ranks from a copy."""
    return copy.with_name(f"{copy.name}{JOB}{job}")


class LocalCopy:
    """The copy of an environment on this host, for one job.

    The methods raise UsageError if the folder is not this user's, and OSError.
    """

    def __init__(self, digest: str, directory: Path, job: str) -> None:
        self.folder = copy_folder(digest, directory)
        self._reservation = reservation(self.folder, job)
        self._part: Path | None = None  # of which this process holds the lock
        self._garbage = _Garbage(self.folder.parent)

    @property
    def part(self) -> Path:
        """The folder to unpack to; see ``reserve``."""
        assert self._part
        return self._part

    def reserve(self) -> bool:
        """Keep the copy from being removed until the ranks start; return whether it is missing.

        If it is, ``part`` must be filled. Copies that nobody uses are removed.
        """
        with _locked(self.folder.parent):
            self._reservation.touch()
            if self.folder.exists() and not _is_sound(self.folder):
                self._garbage.take(self.folder)
            self._garbage.collect()
            missing = not self.folder.exists()
            if missing:
                self._part = Path(tempfile.mkdtemp(dir=self.folder.parent, prefix=self._prefix))
                self._garbage.hold(self._part)
        self._garbage.remove(except_for=self._part)
        return missing

    def publish(self) -> None:
        """Give the complete ``part`` the name of the copy, unless another job was faster."""
        (self.part / MARK).write_text(_boot())
        with _locked(self.folder.parent):
            self._reservation.touch()
            if not self.folder.exists():
                self._garbage.release(self.part)
                self.part.rename(self.folder)
        self._part = None
        self._garbage.remove()

    def release(self) -> None:
        """End the use by this job; remove copies, and this one, that nobody uses."""
        with _locked(self.folder.parent):
            self._reservation.unlink(missing_ok=True)
            self._garbage.collect()
        self._part = None
        self._garbage.remove()
        with _locked(self.folder.parent):
            pass  # removes the folder if it is empty

    @property
    def _prefix(self) -> str:
        return f"{self.folder.name}{PART}"


class _Garbage:
    """Folders that this process has locked, in order to remove them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._held: dict[Path, int] = {}  # with the descriptors of the locks

    def hold(self, folder: Path) -> bool:
        """Lock a folder, unless somebody uses it; return whether it is locked."""
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | NOT_FOLLOWED)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BaseException:
                os.close(handle)
                raise
            self._held[folder] = handle
            return True
        return False

    def release(self, folder: Path) -> None:
        """Unlock a folder, which is not to be removed."""
        os.close(self._held.pop(folder))

    def take(self, copy: Path) -> None:
        """Take the name from a copy that nobody uses."""
        if self.hold(copy):
            part = copy.with_name(f"{copy.name}{PART}{secrets.token_hex(4)}")
            copy.rename(part)
            self._held[part] = self._held.pop(copy)

    def collect(self) -> None:
        """Take what no job uses. Call it with the lock of the folder."""
        reserved = set()
        for path in self._root.glob(f"*{JOB}*"):
            if time.time() - path.lstat().st_mtime < START:
                reserved.add(path.name.partition(JOB)[0])
            else:
                path.unlink()
        for path in self._root.iterdir():
            if path.name not in reserved and path not in self._held and path.is_dir():
                self.hold(path) if PART in path.name else self.take(path)

    def remove(self, except_for: Path | None = None) -> None:
        """Remove the folders taken, except one."""
        for folder in [folder for folder in self._held if folder != except_for]:
            shutil.rmtree(folder, ignore_errors=True)
            self.release(folder)


@contextlib.contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Hold the lock of the folder ``root``, which is created, and removed if it is left empty.

    Raises:
        UsageError: the folder is not this user's, or its lock is not released.
    """
    handle = _lock(root)
    try:
        yield
        if [path.name for path in root.iterdir()] == [LOCK]:
            (root / LOCK).unlink()
            root.rmdir()
    finally:
        os.close(handle)


def _lock(root: Path) -> int:
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        # Another process may be removing the folder, or have removed the file that is opened.
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            claim_folder(root)
            handle = os.open(root / LOCK, os.O_RDWR | os.O_CREAT | NOT_FOLLOWED, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(handle), (root / LOCK).lstat()):
                    return handle
                raise FileNotFoundError
            except BaseException:
                os.close(handle)
                raise
        time.sleep(PAUSE)
    raise UsageError(f"{root / LOCK} is held by another process of yours: end it")


def _is_sound(copy: Path) -> bool:
    """Return whether a copy can be relied upon, if no rank uses it.

    After a crash of the host the content of files may be lost, though their names are not.
    """
    try:
        age = time.time() - (copy / MARK).stat().st_mtime
        return age < DAY and (copy / MARK).read_text() == _boot()
    except OSError:
        return False


def _boot() -> str:
    """Return an identifier of the time since the host was started."""
    return BOOT.read_text() if BOOT.exists() else ""


def unpack(read: Read, manifest: Manifest, part: Path, folder: Path) -> None:
    """Unpack an archive to ``part``, with paths in its files adapted to its later name ``folder``.

    Links are made at the end: no file is written through one.

    Args:
        read: returns up to so many bytes of the archive, none only at the end.
        manifest: the description of the archive.
        part: an empty folder.
        folder: the folder that it will be.

    Raises:
        OSError: it cannot be written, or the archive is damaged.
    """
    folders = {part}
    for name in (*(member.name for member in manifest.members), *manifest.links):
        parent = (part / _checked(name)).parent
        if parent not in folders:
            parent.mkdir(parents=True, exist_ok=True)
            folders.add(parent)
    for member in manifest.members:
        _write(part / member.name, member, read)
    if len(read(1)):
        raise OSError("the archive is damaged: it is too long")
    for name, target in manifest.links.items():
        (part / name).symlink_to(target)
    for change in manifest.changes:
        _adapt(part / _checked(change.file), change, str(folder / change.new))


def _checked(name: str) -> str:
    if name.startswith("/") or ".." in name.split("/"):
        raise OSError(f"the archive is damaged: {name} is not in it")
    return name


def _write(path: Path, member: Member, read: Read) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOT_FOLLOWED
    handle = os.open(path, flags, member.mode & 0o777)
    try:
        left = member.size
        while left:
            piece = memoryview(read(min(left, PIECE)))
            if not piece.nbytes:
                raise OSError("the archive is damaged: it ends early")
            left -= piece.nbytes
            while piece.nbytes:
                piece = piece[os.write(handle, piece) :]
        os.utime(handle, (member.time, member.time))
    finally:
        os.close(handle)


def _adapt(path: Path, change: Change, new: str) -> None:
    """Replace a path in a file of a copy, and drop bytecode of it.

    Raises:
        OSError: a string of a binary file has no space for the new path.
    """
    old, content, times = os.fsencode(change.old), path.read_bytes(), path.stat()
    whole = re.compile(re.escape(old) + rb"(?![\w.-])")  # not of a longer name
    target = os.fsencode(new)

    def resized(match: re.Match[bytes]) -> bytes:
        text = match[0].rstrip(b"\0")
        text, number = whole.subn(lambda _: target, text)
        room = len(match[0].rstrip(b"\0")) + number * change.spare
        if len(text) > min(room, len(match[0]) - 1):
            raise OSError(f"{path.name}: there is no space for the path {new}")
        return text.ljust(len(match[0]), b"\0")

    if change.binary:
        adapted = re.sub(re.escape(old) + rb"[^\0]*\0+", resized, content)
    else:
        adapted = whole.sub(lambda _: target, content)
    if adapted == content:
        return
    path.write_bytes(adapted)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()  # it counts as that of a file of this time and size
