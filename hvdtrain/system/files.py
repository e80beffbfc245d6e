"""Output files named by the user.

Symbolic links are followed. Devices and pipes are written to. A regular file is appended to, or
replaced when its new content is complete.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.folder import Folder

log = logging.getLogger(__name__)

MAX_READ = 2**28  # bytes: far more than tables, records and states of trainings have
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors that are solved by freeing space


def check_working_directory() -> None:
    """Raise ``UsageError`` if the working directory was removed."""
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UsageError("the working directory was removed: cd to another") from None


def check_writable(path: Path | None, option: str) -> None:
    """Check before a long training that ``path`` can be written at its end, without opening it.

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
    # A file is replaced by one that is created in the same directory.
    target = path if special else Path(os.path.realpath(path)).parent
    if path.is_dir() or not os.access(target, os.W_OK):
        raise UsageError(f"{name}: cannot be written")


def check_folder(path: Path, name: str) -> None:
    """Check that the directory ``path`` is writable, or can be created.

    Raises:
        UsageError: beginning with ``name``.
    """
    try:
        parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    except OSError as error:  # e.g. it is in a directory that this user may not enter
        raise UsageError(f"{name}: {error.strerror}") from error
    if not (parent.is_dir() and os.access(parent, os.W_OK)):
        raise UsageError(f"{name}: {parent} is not a writable directory")


def check_input(folder: Path, name: str) -> None:
    """Check that the directory ``folder`` exists and can be read.

    Raises:
        UsageError: beginning with ``name``.
    """
    if not folder.is_dir():
        raise UsageError(f"{name}: {'not a' if folder.exists() else 'no such'} directory")
    if not os.access(folder, os.R_OK | os.X_OK):
        raise UsageError(f"{name}: {os.strerror(errno.EACCES)}")


def is_file(path: Path, name: str) -> bool:
    """Return whether ``path`` is a file, or a link to one.

    Raises:
        UsageError: beginning with ``name``; it cannot be looked up, e.g. as the user may not enter
            a directory of it.
    """
    try:
        return path.is_file()
    except OSError as error:
        raise UsageError(f"{name}: {error.strerror}") from error


def cache_root(environ: Mapping[str, str]) -> Path:
    """Return the cache of hvdtrain: HVDTRAIN_CACHE, or a part of the user's cache directory."""
    if environ.get("HVDTRAIN_CACHE"):
        return Path(environ["HVDTRAIN_CACHE"]).absolute()
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home()) / ".cache"
    return Path(base).absolute() / "hvdtrain"


@contextlib.contextmanager
def resumable(folder: Path) -> Iterator[None]:
    """Convert an ``OSError`` in work in ``folder``, which the next run continues."""
    try:
        yield
    except OSError as error:
        raise HvdtrainError(
            f"{error.filename or folder}: {error.strerror or error}: resolve this and run it again "
            "to continue"
        ) from error


def is_regular(path: Path) -> bool:
    """Return whether ``path``, links followed, is a regular file: no directory, device or pipe.

    Raises:
        OSError: it does not exist.
    """
    return stat.S_ISREG(path.stat().st_mode)


def file_digest(path: Path, algorithm: str | Callable[[], Any]) -> str:
    """Return the digest of a regular file; ``algorithm`` as of ``hashlib.file_digest``.

    Raises:
        OSError: it cannot be read, or is not a regular file.
    """
    if not is_regular(path):
        raise OSError(f"{path} is not a regular file")
    with path.open("rb") as file:
        return hashlib.file_digest(file, algorithm).hexdigest()


@contextlib.contextmanager
def lock(folder: Folder, activity: str) -> Iterator[None]:
    """Hold a lock file in ``folder``; wait, with a message, for another session that ``activity``.

    The kernel (flock) releases it when the process ends, for any reason.

    Raises:
        OSError: the file cannot be opened.
    """
    path = folder.path / "lock"
    with folder.open(path.name, "ab") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.info("waiting for another session that %s (lock %s)", activity, path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # Two sessions may do the same work then; results get their name when they are complete.
            log.warning("%s: this file system has no locks; do not run two sessions at once", path)
        yield


def read_regular(path: Path, most: int = MAX_READ) -> bytes:
    """Read a whole file; unlike plain ``open``, never wait for a pipe or read a device.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than ``most`` bytes.
    """
    if not is_regular(path):
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    if path.stat().st_size > most:
        raise OSError(errno.EFBIG, f"more than {most:,} bytes", str(path))
    return path.read_bytes()


class Output:
    """An output file named by the user; a pipe is opened at once and kept open.

    Args:
        path: the file; its directory must exist.
        option: the option that names it, for the messages.

    Raises:
        UsageError: it cannot be written, or is a pipe without a reader.
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
        """Whether it is a pipe or a device: not seekable."""
        return self._stream is not None

    @contextlib.contextmanager
    def replacing(self) -> Iterator[IO[bytes]]:
        """Open a temporary file that replaces this one when it is complete.

        Raises:
            UsageError: it cannot be created.
            HvdtrainError: writing failed.
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
        """Append ``data`` and flush.

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
        """Close it; the reader of a pipe sees end of file."""
        if self._stream:
            with self._failing():
                self._stream.close()

    @contextlib.contextmanager
    def _refused(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            if error.errno == errno.ENXIO:
                reason = "the pipe has no reader; start its reader first"
            raise UsageError(f"{self.name} cannot be written: {reason}") from error

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if self._stream:  # its buffer cannot be written either
                with contextlib.suppress(OSError):
                    self._stream.close()
                self._stream = None
            reason = error.strerror or error
            raise HvdtrainError(f"{self.name} cannot be written: {reason}") from error


@contextlib.contextmanager
def replacing(path: Path, option: str = "") -> Iterator[IO[bytes]]:
    """Open an ``Output`` to be written once; see ``Output.replacing``."""
    output = Output(path, option)
    try:
        with output.replacing() as file:
            yield file
    finally:
        output.close()


def _special(path: Path) -> int | None:
    """Open a device, pipe or standard stream; return None for a regular or a missing file."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    for standard in (1, 2):  # /dev/stdout redirected to a file: its content must be kept
        with contextlib.suppress(OSError):
            if os.path.samestat(status, os.fstat(standard)):
                return os.dup(standard)
    if stat.S_ISREG(status.st_mode):
        return None
    handle = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
    os.set_blocking(handle, True)
    return handle
