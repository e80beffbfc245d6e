"""Send a packed environment to the hosts of a job, and unpack it there.

    mpirun ... python -m hvdtrain.commands.launch.staging FOLDER ARCHIVE SIZE SHA256

One process per host. Rank 0 reads the archive and broadcasts it in pieces, which each process
passes on to ``tar``, so the shared file system is read once, while all hosts unpack. The copy in
FOLDER is removed by ``launch``, also after an error.

MPI does not authenticate what it brings, and ranks execute the copy. So they are started only if
what arrives has the SHA-256 in the command line.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.commands.launch.staging import BASE, CONFIG, HOME
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.system.folder import exposure
from hvdtrain.system.machine import mpi_library
from hvdtrain.system.output.text import size
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.scratch import LOCK

PIECE = 2**20  # bytes sent at a time; a pipe holds as much, so that a host unpacks meanwhile
MARGIN = 1.1  # of the size: files occupy whole blocks
REMEDY = "set TMPDIR to a directory that each host has on a local disk, and only you can write to"


@contextlib.contextmanager
def _reported() -> Iterator[None]:
    """Convert an ``OSError`` to an error that ``Communicator.together`` reports."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"{error.filename}: {reason}" if error.filename else reason) from error


def make_folder(copy: Path, length: int) -> IO[str]:
    """Create the folder of a copy; return a file in it, whose lock shows that it is in use.

    Raises:
        UsageError: an archive of ``length`` bytes cannot be unpacked and used in its directory.
        OSError: it cannot be created.
    """
    directory = copy.parent
    if not directory.is_dir():
        raise UsageError(f"{directory} is not a directory: {REMEDY}")
    if reason := exposure(directory):
        raise UsageError(f"{reason}: {REMEDY}")
    needed, free = int(MARGIN * length), shutil.disk_usage(directory).free
    if free < needed:
        raise UsageError(f"{size(needed)} are needed in {directory}, {size(free)} are free")
    if os.statvfs(directory).f_flag & os.ST_NOEXEC:
        raise UsageError(f"{directory} is on a file system without execution (noexec)")
    try:
        copy.mkdir(mode=0o700)
    except FileExistsError:  # created on another host
        raise UsageError(f"{directory} is shared by several hosts: {REMEDY}") from None
    lock = (copy / LOCK).open("x")
    fcntl.flock(lock, fcntl.LOCK_EX)
    return lock


@_reported()
def send(communicator: Communicator, archive: Path, length: int, tar: IO[bytes]) -> str:
    """Broadcast an archive to the standard input of ``tar``; return the SHA-256 of what arrived."""
    digest = hashlib.sha256()
    with archive.open("rb") if communicator.is_root else contextlib.nullcontext() as file:
        for start in range(0, length, PIECE):
            piece = np.zeros(min(length - start, PIECE), np.uint8)
            if file:
                file.readinto(piece.data)
            content = communicator.broadcast(piece).tobytes()
            digest.update(content)
            with contextlib.suppress(BrokenPipeError):  # tar has failed: see ``stage``
                tar.write(content)
                tar.flush()
    return digest.hexdigest()


def stage(
    communicator: Communicator, folder: Path, archive: Path, length: int, sha256: str
) -> None:
    """Make a copy on each host.

    Raises:
        HvdtrainError: on all hosts: that failed on one.
    """

    @_reported()
    def begin() -> subprocess.Popen[bytes]:
        stack.enter_context(make_folder(folder.parent, length))
        folder.mkdir()
        tar = subprocess.Popen(
            ("tar", "-x", "-o", "-f", "-", "-C", str(folder)),
            stdin=subprocess.PIPE,
            stderr=messages,
            env={**os.environ, "LC_ALL": "C"},
            pipesize=PIECE,
        )
        stack.callback(tar.communicate)
        return tar

    @_reported()
    def end() -> None:
        tar.communicate()
        messages.seek(0)
        if tar.returncode:
            message = messages.readline().decode(errors="replace").strip()
            raise UsageError(message[:200] or f"tar ended with code {tar.returncode}")
        if received != sha256:
            raise UsageError("the environment arrived damaged: start the job again")
        if (folder / BASE).is_dir():
            config, home = folder / CONFIG, f"{folder / BASE / 'bin'}"
            text = HOME.sub(lambda match: match[1] + home, os.fsdecode(config.read_bytes()))
            config.write_bytes(os.fsencode(text))

    with tempfile.TemporaryFile() as messages, contextlib.ExitStack() as stack:
        tar = communicator.together(begin)
        assert tar.stdin
        received = send(communicator, archive, length, tar.stdin)
        communicator.together(end)
        os.utime(folder.parent)  # ``clear_leftovers`` spares new ones; then the ranks lock it


def main() -> int:
    """Run one process."""
    folder, archive, length, sha256 = sys.argv[1:]
    with mpi_library.required():
        from hvdtrain.collectives.mpi4py import Mpi4py
    stage(Mpi4py(), Path(folder), Path(archive), int(length), sha256)
    return EXIT_OK


if __name__ == "__main__":
    run_and_exit(main)
