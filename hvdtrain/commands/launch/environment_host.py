"""Sends a packed environment to the hosts of a job, and unpacks it there; see ``environment.py``.

    mpirun ... python -m hvdtrain.commands.launch.environment_host stage ARCHIVE DIRECTORY JOB SIZE
    mpirun ... python -m hvdtrain.commands.launch.environment_host remove ARCHIVE DIRECTORY JOB

One process per host. Rank 0 reads the archive and broadcasts it in pieces, which each process
passes on to ``tar``, so the shared file system is read once, while all hosts unpack.
``environment_copy.py`` says what is in DIRECTORY.

MPI does not authenticate what it brings, and ranks execute the copy. So a copy counts only if the
archive has the SHA-256 in its name, which is in the command line.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Self

import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.commands.launch.environment import BASE, CONFIG, ERROR, HOME, Archive
from hvdtrain.commands.launch.environment_copy import LocalCopy
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, UsageError
from hvdtrain.system.output.text import plural, size
from hvdtrain.system.runtime.command import termination_as_interrupt

PIECE = 2**20  # bytes sent at a time; a pipe holds as much, so that a host unpacks meanwhile
MARGIN = 1.1  # of the size: files occupy whole blocks
PROGRAMS = ("flock", "tar")  # which a host needs
SHOWN = 200  # characters of tar's message


class Host:
    """The copy on this host, with the first error."""

    def __init__(self, archive: Archive, directory: Path, job: str) -> None:
        self.copy = LocalCopy(archive.digest, directory, job)
        self.error = ""
        self.archive = archive

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Keep an error: the other hosts wait for this one."""
        try:
            yield
        except (OSError, UsageError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = f"{error.filename or self.copy.folder.parent}: {error.strerror}"
            self.error = self.error or reason

    def reserve(self) -> bool:
        """Return whether the copy is missing here.

        Raises:
            UsageError: it is, and cannot be made.
        """
        if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
            raise UsageError(f"{missing[0]} is missing: install util-linux and tar")
        if not self.copy.reserve():
            return False
        folder = self.copy.folder.parent
        needed, free = int(MARGIN * self.archive.size), shutil.disk_usage(folder).free
        if free < needed:
            raise UsageError(f"{size(needed)} are needed in {folder}, {size(free)} are free")
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise UsageError(f"{folder} is on a file system without execution (noexec)")
        return True

    def publish(self, sha256: str) -> None:
        """Complete the copy, if the archive that was received has this checksum.

        Raises:
            UsageError: it has another one.
        """
        assert self.copy.part
        if sha256 != self.archive.sha256:
            raise UsageError(f"{self.archive.path} is damaged, or arrived damaged: remove it")
        config = self.copy.part / CONFIG
        if (self.copy.part / BASE).is_dir():
            home = f"{self.copy.folder / BASE / 'bin'}"
            config.write_text(HOME.sub(lambda match: match[1] + home, config.read_text()))
        self.copy.publish()


class Unpacking:
    """``tar``, which unpacks the pieces that it gets."""

    def __init__(self, folder: Path) -> None:
        self._messages = tempfile.TemporaryFile()  # noqa: SIM115  # a full disk makes many
        self._tar = subprocess.Popen(
            ("tar", "-x", "-o", "-f", "-", "-C", str(folder)),
            stdin=subprocess.PIPE,
            stderr=self._messages,
            env={**os.environ, "LC_ALL": "C"},
            pipesize=PIECE,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tar.kill()
        self._tar.communicate()
        self._messages.close()

    def write(self, piece: bytes) -> None:
        """Unpack a piece, unless there has been an error."""
        assert self._tar.stdin
        with contextlib.suppress(BrokenPipeError):
            self._tar.stdin.write(piece)
            self._tar.stdin.flush()

    def finish(self) -> None:
        """Wait until all is written.

        Raises:
            OSError: it could not be.
        """
        self._tar.communicate()
        if self._tar.returncode:
            self._messages.seek(0)
            message = self._messages.readline().decode(errors="replace").strip()
            raise OSError(message[:SHOWN] or f"tar ended with code {self._tar.returncode}")


def distribute(
    communicator: Communicator, host: Host, file: IO[bytes] | None, *, missing: bool
) -> None:
    """Broadcast the archive, and unpack it on this host if the copy is missing.

    Args:
        communicator: a process per host.
        host: this one.
        file: the archive, on rank 0.
        missing: whether the copy is missing here.
    """
    digest, left = hashlib.sha256(), host.archive.size
    with contextlib.ExitStack() as stack:
        unpacking = None
        with host.reporting():
            if missing and host.copy.part:
                unpacking = stack.enter_context(Unpacking(host.copy.part))
        while left:
            content = b""
            with host.reporting():
                content = file.read(min(left, PIECE)) if file else b""
            # Zeros instead of what cannot be read: the checksum will be another.
            piece = np.zeros(min(left, PIECE), np.uint8)
            piece[: len(content)] = np.frombuffer(content, np.uint8)
            content = communicator.broadcast(piece).tobytes()
            digest.update(content)
            if unpacking:
                unpacking.write(content)
            left -= len(content)
        with host.reporting():
            if unpacking:
                unpacking.finish()
                host.publish(digest.hexdigest())


def stage(communicator: Communicator, archive: Archive, directory: Path, job: str) -> str:
    """Make a copy on each host without one; return why that failed."""
    host, missing = Host(archive, directory, job), False
    with contextlib.ExitStack() as stack:
        file = None
        with host.reporting():
            if communicator.is_root:
                file = stack.enter_context(archive.path.open("rb"))
            missing = host.reserve()
        state = communicator.gather_json([missing, host.error])
        if any(lacks for lacks, _ in state) and not any(error for _, error in state):
            distribute(communicator, host, file, missing=missing)
    error = _first(communicator.gather_json([os.uname().nodename, host.error]))
    if error:
        with host.reporting():
            host.copy.release()
    return error


def _first(rows: list[list[str]]) -> str:
    """Return the first of the errors by host, and on how many others there are some."""
    failed = [f"host {name}: {error}" for name, error in rows if error]
    more = f" (and {plural(len(failed) - 1, 'more host')})" if len(failed) > 1 else ""
    return f"{failed[0]}{more}" if failed else ""


def main(arguments: list[str]) -> int:
    """Run one process; print the error, if any, once, and return the exit code."""
    verb, path, directory, job, *more = arguments
    archive = Archive(Path(path), *map(int, more))
    if verb == "remove":
        LocalCopy(archive.digest, Path(directory), job).release()
        return EXIT_OK
    from hvdtrain.collectives.mpi4py import Mpi4py

    communicator = Mpi4py()
    try:
        with termination_as_interrupt():
            error = stage(communicator, archive, Path(directory), job)
    except BaseException:
        traceback.print_exc()
        communicator.world.Abort(EXIT_FAILURE)  # the others would wait for ever
        raise
    if error and communicator.is_root:
        sys.stdout.write(f"{ERROR}{error}\n")
    return EXIT_FAILURE if error else EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
