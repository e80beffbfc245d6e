"""Directories in which others may write: used by descriptor, so that nobody can exchange them.

Whoever may write to a directory, or to one above it, can put a link in the place of anything there,
at any time. So each part of a path is opened relative to the one above, and no link is followed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hvdtrain.errors import UsageError

OPEN = os.O_DIRECTORY | os.O_NOFOLLOW
PASS = OPEN | os.O_PATH  # for a directory that may not be readable
OTHERS = 0o022  # bits of a mode: others may write

_targets: dict[Path, str] = {}  # of the paths that were named, without links


class Folder:
    """An open directory, with names of entries in it; an ``OSError`` has the whole path."""

    def __init__(self, path: Path, handle: int) -> None:
        self.path, self.handle = path, handle
        weakref.finalize(self, os.close, handle)

    @staticmethod
    def named(path: Path, *, create: bool = True) -> Folder:
        """Open the directory that a user named; it is created if necessary.

        Links in its path are followed as at the first call. If it leads elsewhere later, somebody
        else may have put a link into it, and it is an error.
        """
        target = os.path.realpath(path)
        if _targets.setdefault(path.absolute(), target) != target:
            raise OSError(errno.ELOOP, f"it now leads to {target}", str(path))
        *above, name = Path(target).parts[1:] or (".",)
        folder = Folder(Path("/"), os.open("/", PASS))
        for part in above:
            folder = folder.enter(part, create=create, flags=PASS)
        folder = folder.enter(name, create=create)
        folder.path = path
        return folder

    def enter(self, name: str, *, create: bool = True, flags: int = OPEN) -> Folder:
        """Open a directory; it is created if necessary."""
        with self._naming(name):
            try:
                handle = os.open(name, flags, dir_fd=self.handle)
            except FileNotFoundError:
                if not create:
                    raise
                with contextlib.suppress(FileExistsError):
                    os.mkdir(name, dir_fd=self.handle)
                handle = os.open(name, flags, dir_fd=self.handle)
            return Folder(self.path / name, handle)

    def own(self, name: str, prefix: str = "") -> Folder:
        """Open a directory with a predictable name; it is created if necessary.

        Raises:
            UsageError: it is another user's, or a link; the message begins with ``prefix``.
        """
        with contextlib.suppress(NotADirectoryError, PermissionError):
            folder = self.enter(name)
            owner, probe = os.fstat(folder.handle).st_uid, f".{secrets.token_hex(8)}"
            if owner == os.getuid():
                return folder
            # NFS may show all files as nobody's.
            with folder.open(probe, "xb") as file:
                folder.remove(probe)
                if os.fstat(file.fileno()).st_uid == owner:
                    return folder
        reason = f"{self.path / name} is not a directory of yours"
        raise UsageError(f"{prefix}{reason}: remove it, or use another directory")

    def open(self, name: str, mode: str, buffering: int = -1) -> IO[bytes]:
        """Open a regular file: a new one (``xb``), or to read or append."""

        def opener(_: str, flags: int) -> int:
            flags |= os.O_NOFOLLOW | os.O_NONBLOCK  # not to wait for a pipe
            return os.open(name, flags, 0o666, dir_fd=self.handle)

        with self._naming(name):
            file = open(self.path / name, mode, buffering, opener=opener)  # noqa: SIM115
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.close()
                raise OSError(errno.EINVAL, "not a regular file", name)
            return file

    def write(self, name: str, data: bytes) -> None:
        """Write a new file, to the disk."""
        with self.open(name, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def replace(self, name: str, data: bytes) -> None:
        """Write a file, which replaces an existing one when it is complete."""
        self.remove(f"{name}.part")
        self.write(f"{name}.part", data)
        self.rename(f"{name}.part", name)

    def names(self) -> list[str]:
        """Return the names of all entries."""
        with self._naming(""):
            return os.listdir(self.handle)  # noqa: PTH208

    def rename(self, old: str, new: str, into: Folder | None = None) -> None:
        """Rename an entry, or move it ``into`` another directory."""
        with self._naming(old):
            os.rename(old, new, src_dir_fd=self.handle, dst_dir_fd=(into or self).handle)

    def remove(self, name: str) -> None:
        """Remove an entry, if it exists; of a directory, all that can be removed."""
        with self._naming(name), contextlib.suppress(FileNotFoundError):
            try:
                os.unlink(name, dir_fd=self.handle)
            except IsADirectoryError:
                shutil.rmtree(name, ignore_errors=True, dir_fd=self.handle)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self.path / name)
            raise


def private_folder(path: Path, option: str, remedy: str) -> str:
    """Create a directory for files that are executed or unpickled, or check it; return its path.

    Raises:
        UsageError: others can write to it, or exchange it.
    """
    try:
        if reason := exposure(path.parent):
            raise UsageError(f"{option}: {reason}: {remedy}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        status = path.lstat()
    except OSError as error:
        raise UsageError(f"{option}: {error.filename}: {error.strerror}: {remedy}") from error
    is_own = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
    if not is_own or status.st_mode & OTHERS:
        reason = f"{path} is not a directory that only you can write to"
        raise UsageError(f"{option}: {reason}: remove it, or {remedy}")
    return str(path)


def exposure(path: Path) -> str:
    """Return which part of ``path`` others can exchange, and how; empty if none."""
    trusted = {0, os.getuid()}
    with contextlib.suppress(OSError):
        # In a container without root's id, root's files seem to be of the overflow id.
        if Path("/proc/self/uid_map").read_text().split()[:2] != ["0", "0"]:
            trusted.add(int(Path("/proc/sys/kernel/overflowuid").read_text()))
    for part in (*reversed(path.parents), path):
        status = part.lstat()
        if status.st_uid not in trusted:
            return f"{part} belongs to another user, who could exchange what you execute there"
        if part.is_symlink():
            if reason := exposure(part.parent / part.readlink()):
                return reason
        elif status.st_mode & OTHERS and not status.st_mode & stat.S_ISVTX:
            return f"others may write to {part}, and could exchange what you execute there"
    return ""
