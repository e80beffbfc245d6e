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
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import Self, TypeVar

import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.commands.launch.environment import BASE, CONFIG, ERROR, HOME, Archive
from hvdtrain.commands.launch.environment_copy import LocalCopy
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, HvdtrainError, UsageError
from hvdtrain.system.machine import mpi_library
from hvdtrain.system.output.text import plural, size
from hvdtrain.system.runtime.command import termination_as_interrupt

Result = TypeVar("Result")
PIECE = 2**20  # bytes sent at a time; a pipe holds as much, so that a host unpacks meanwhile
MARGIN = 1.1  # of the size: files occupy whole blocks
PROGRAMS = ("flock", "tar")  # which a host needs
SHOWN = 200  # characters of tar's message


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


def reserve(copy: LocalCopy, archive: Archive) -> bool:
    """Return whether the copy is missing here.

    Raises:
        UsageError: it is, and cannot be made.
    """
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        raise UsageError(f"{missing[0]} is missing: install util-linux and tar")
    if not copy.reserve():
        return False
    folder = copy.folder.parent
    needed, free = int(MARGIN * archive.size), shutil.disk_usage(folder).free
    if free < needed:
        raise UsageError(f"{size(needed)} are needed in {folder}, {size(free)} are free")
    if os.statvfs(folder).f_flag & os.ST_NOEXEC:
        raise UsageError(f"{folder} is on a file system without execution (noexec)")
    return True


def distribute(
    communicator: Communicator,
    length: int,
    file: BufferedReader | None,
    unpacking: Unpacking | None,
) -> str:
    """Broadcast an archive, and unpack it; return the SHA-256 of what was received.

    Args:
        communicator: a process per host.
        length: its bytes.
        file: its content, on rank 0.
        unpacking: on hosts without a copy.
    """
    digest = hashlib.sha256()
    for start in range(0, length, PIECE):
        piece = np.zeros(min(length - start, PIECE), np.uint8)
        if file:  # what cannot be read stays zero: the checksum will be another
            with contextlib.suppress(OSError):
                file.readinto(piece.data)
        content = communicator.broadcast(piece).tobytes()
        digest.update(content)
        if unpacking:
            unpacking.write(content)
    return digest.hexdigest()


def publish(copy: LocalCopy, archive: Archive, sha256: str) -> None:
    """Complete the copy, if the archive that was received has this checksum.

    Raises:
        UsageError: it has another one.
    """
    assert copy.part
    if sha256 != archive.sha256:
        raise UsageError(f"{archive.path} is damaged, or arrived damaged: remove it")
    if (copy.part / BASE).is_dir():
        config, home = copy.part / CONFIG, f"{copy.folder / BASE / 'bin'}"
        text = HOME.sub(lambda match: match[1] + home, os.fsdecode(config.read_bytes()))
        config.write_bytes(os.fsencode(text))
    copy.publish()


def stage(communicator: Communicator, archive: Archive, directory: Path, job: str) -> None:
    """Make a copy on each host without one.

    Raises:
        HvdtrainError: on all hosts, after no copy is left: that failed on one.
    """
    copy = LocalCopy(archive.digest, directory, job)
    file: BufferedReader | None = None
    unpacking: Unpacking | None = None

    def begin() -> bool:
        nonlocal file, unpacking
        if communicator.is_root:
            file = stack.enter_context(archive.path.open("rb"))
        if reserve(copy, archive) and copy.part:
            unpacking = stack.enter_context(Unpacking(copy.part))
        return unpacking is not None

    def end() -> None:
        if unpacking:
            unpacking.finish()
            publish(copy, archive, sha256)

    with contextlib.ExitStack() as stack:
        try:
            missing = on_all_hosts(communicator, begin)
            if any(communicator.gather_json(missing)):
                sha256 = distribute(communicator, archive.size, file, unpacking)
                on_all_hosts(communicator, end)
            on_all_hosts(communicator, copy.keep)
        except HvdtrainError:
            with contextlib.suppress(OSError, UsageError):
                copy.release()
            communicator.wait_for_all()  # mpirun kills the others when the first one exits
            raise


def on_all_hosts(communicator: Communicator, action: Callable[[], Result]) -> Result:
    """Return the result of an action on this host, which all hosts do.

    Raises:
        HvdtrainError: on all hosts: it failed on one.
    """
    error = ""
    try:
        result = action()
    except UsageError as failure:
        error = str(failure)
    except OSError as failure:
        reason = failure.strerror or str(failure)
        error = f"{failure.filename}: {reason}" if failure.filename else reason
    rows = communicator.gather_json([os.uname().nodename, error])
    failed = [f"host {name}: {text}" for name, text in rows if text]
    if failed:
        more = f" (and {plural(len(failed) - 1, 'more host')})" if len(failed) > 1 else ""
        raise HvdtrainError(f"{failed[0]}{more}")
    return result


def main(arguments: list[str]) -> int:
    """Run one process; print the error, if any, once, and return the exit code."""
    verb, path, directory, job, *more = arguments
    archive = Archive(Path(path), *map(int, more))
    if verb == "remove":
        LocalCopy(archive.digest, Path(directory), job).release()
        return EXIT_OK
    try:
        with mpi_library.required():
            from hvdtrain.collectives.mpi4py import Mpi4py
    except UsageError as error:
        sys.stdout.write(f"{ERROR}host {os.uname().nodename}: {error}\n")
        return EXIT_FAILURE
    communicator = Mpi4py()
    try:
        with termination_as_interrupt():
            stage(communicator, archive, Path(directory), job)
    except HvdtrainError as error:
        if communicator.is_root:
            sys.stdout.write(f"{ERROR}{error}\n")
        return EXIT_FAILURE
    except BaseException:
        traceback.print_exc()
        communicator.world.Abort(EXIT_FAILURE)  # the others would wait for ever
        raise
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
