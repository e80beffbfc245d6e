"""Files that the user names keep their kind.

A link is followed. What is no regular file, a device or a pipe, is written to. A regular file is
appended to, or replaced when all of its new content has been written: never by half of it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hvdtrain.errors import HvdtrainError, UsageError

log = logging.getLogger(__name__)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors that free space would mend


def check_writable(path: Path | None, option: str) -> None:
    """Make sure, before a long training, that ``path`` can be written at its end; opens nothing.

    Raises:
        UsageError: naming the option.
    """
    if path is None:
        return
    name = f"{option} {path}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        special = not is_regular(path)
    except FileNotFoundError:
        special = False
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error
    # A file is replaced by one that is made beside it.
    place = path if special else Path(os.path.realpath(path)).parent
    if path.is_dir() or not os.access(place, os.W_OK):
        raise UsageError(f"{name}: it cannot be written")


def is_regular(path: Path) -> bool:
    """Return whether ``path``, or what it links to, is neither folder, device nor pipe.

    Raises:
        OSError: it is not there.
    """
    return stat.S_ISREG(path.stat().st_mode)


@contextlib.contextmanager
def lock(path: Path, what: str) -> Iterator[None]:
    """Hold the lock of the file ``path``; another session that ``what`` is waited for, and told of.

    It is the kernel's (flock): it ends with the process that holds it, however that ends.

    Raises:
        OSError: the file cannot be opened.
    """
    with path.open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another session that %s (lock %s)", what, path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # Two sessions may do the same work then; what they make gets its name when it is whole.
            log.warning("%s: this file system has no locks; do not run two sessions at once", path)
        yield


def read_regular(path: Path, most: int = sys.maxsize - 1) -> bytes:
    """Read the whole file; unlike a plain ``open``, never wait for a pipe or read a device.

    Raises:
        OSError: it cannot be read, is no regular file, or has more than ``most`` bytes.
    """
    if not is_regular(path):
        raise OSError(errno.EINVAL, "no regular file", str(path))
    if path.stat().st_size > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return path.read_bytes()


class Output:
    """A file to write to, named by the user; a pipe is opened at once, and kept open.

    Args:
        path: the file; its folder must be there.
        option: what the user named it by, for the messages.

    Raises:
        UsageError: it cannot be written, or is a pipe that nobody reads.
    """

    def __init__(self, path: Path, option: str = "") -> None:
        self.path, self.name = path, f"{option} {path}".lstrip()
        self._stream: IO[bytes] | None = None
        with self._refused():
            handle = _special(path)
        if handle is not None:
            self._stream = os.fdopen(handle, "wb")

    @property
    def is_stream(self) -> bool:
        """Whether it is a pipe or a device, in which nobody can seek."""
        return self._stream is not None

    @contextlib.contextmanager
    def replacing(self) -> Iterator[IO[bytes]]:
        """Open a file whose content becomes this one's when all has been written.

        Raises:
            UsageError: it cannot be made.
            HvdtrainError: it cannot be written to its end.
        """
        if self._stream:
            with self._failing():
                yield self._stream
                self._stream.flush()
            return
        target = Path(os.path.realpath(self.path))
        partial = target.with_name(f".{target.name}.partial-{os.getpid()}")
        try:
            with self._refused():
                partial.unlink(missing_ok=True)
                opened = partial.open("xb")
            with self._failing():
                with opened as file:
                    with contextlib.suppress(FileNotFoundError):
                        os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                partial.replace(target)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink()

    def append(self, data: bytes) -> None:
        """Add ``data`` at the end, to be seen at once.

        Raises:
            UsageError: a file cannot be opened.
            HvdtrainError: it cannot be written.
        """
        if self._stream is None:
            with self._refused():
                self._stream = self.path.open("ab")
        with self._failing():
            self._stream.write(data)
            self._stream.flush()

    def close(self) -> None:
        """Close it; the reader of a pipe sees its end."""
        if self._stream:
            with self._failing():
                self._stream.close()

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            why = error.strerror or error
            if error.errno == errno.ENXIO:
                why = "nobody reads this pipe; start its reader first"
            raise UsageError(f"{self.name} cannot be written: {why}") from error

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._stream:  # what it still holds cannot be written either
                with contextlib.suppress(OSError):
                    self._stream.close()
                self._stream = None
            why = error.strerror or error
            raise HvdtrainError(f"{self.name} cannot be written: {why}") from error


@contextlib.contextmanager
def replacing(path: Path, option: str = "") -> Iterator[IO[bytes]]:
    """Open an ``Output`` to be written once; see there."""
    output = Output(path, option)
    try:
        with output.replacing() as file:
            yield file
    finally:
        output.close()


def _special(path: Path) -> int | None:
    """Open what is no regular file or folder; None where it is one, or nothing yet."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    for own in (1, 2):  # /dev/stdout, where it is a file: what was written there stays
        with contextlib.suppress(OSError):
            if os.path.samestat(found, os.fstat(own)):
                return os.dup(own)
    if stat.S_ISREG(found.st_mode):
        return None
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(handle, True)
    return handle
