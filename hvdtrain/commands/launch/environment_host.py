"""Sends a packed environment to the hosts of a job, and unpacks it there; see ``environment.py``.

    mpirun ... python -m hvdtrain.commands.launch.environment_host stage ARCHIVE DIRECTORY JOB SEAL
    mpirun ... python -m hvdtrain.commands.launch.environment_host remove ARCHIVE DIRECTORY JOB

One process per host. Rank 0 reads the archive, and each process passes the pieces on to the next
while it unpacks them, so the shared file system is read once, and the time hardly depends on the
number of hosts. ``environment_copy.py`` says what is in DIRECTORY.

MPI does not authenticate what it brings, and ranks execute the copy. So a copy counts only if the
description of the archive has the SHA-256 in the command line, SEAL, and the archive has that in
its description.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import queue
import shutil
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.commands.launch.environment import Manifest, description
from hvdtrain.commands.launch.environment_copy import LocalCopy, unpack
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, HvdtrainError, UsageError
from hvdtrain.system.output.text import plural, size
from hvdtrain.system.runtime.command import termination_as_interrupt

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py

PIECE = 2**22  # bytes sent at a time
AHEAD = 4  # pieces received before they are unpacked
NAP = 0.001  # seconds between two attempts
MARGIN = 1.05  # of the space, for folders
FLOCK = "flock"  # of util-linux, which the ranks need
ERROR = "hvdtrain: --stage-env: "  # begins the line with the error


class Stream:
    """The pieces of an archive, which a thread reads in other portions."""

    def __init__(self) -> None:
        self._pieces: queue.Queue[bytes] = queue.Queue(AHEAD)
        self._rest = memoryview(b"")
        self._ended = False
        self._broken = threading.Event()  # nobody reads any more

    def put(self, piece: bytes, progress: Callable[[], object] = lambda: None) -> None:
        """Append a piece, empty at the end; call ``progress`` while the reader is behind."""
        while not self._broken.is_set():
            with contextlib.suppress(queue.Full):
                self._pieces.put(piece, timeout=NAP)
                return
            progress()

    def stop(self) -> None:
        """Drop what is not yet read."""
        self._broken.set()
        with contextlib.suppress(queue.Empty):
            while True:
                self._pieces.get_nowait()
        with contextlib.suppress(queue.Full):
            self._pieces.put_nowait(b"")

    def read(self, number: int) -> memoryview:
        """Return up to ``number`` bytes, none only at the end."""
        if not self._rest and not self._ended:
            self._rest = memoryview(self._pieces.get())
            self._ended = not self._rest
        part, self._rest = self._rest[:number], self._rest[number:]
        return part


class Host:
    """The copy on this host, with the first error."""

    def __init__(self, manifest: Manifest, directory: Path, job: str) -> None:
        self.manifest = manifest
        self.copy = LocalCopy(manifest.digest, directory, job)
        self.error = ""

    def begin(self) -> bool:
        """Return whether the copy is missing here; on an error it is not."""
        with self._reported():
            if shutil.which(FLOCK) is None:
                raise UsageError(f"{FLOCK} is missing: install util-linux")
            if self.copy.reserve():
                self._check(self.copy.part)
                return True
        return False

    def _check(self, folder: Path) -> None:
        needed, free = int(MARGIN * self.manifest.space), shutil.disk_usage(folder).free
        if free < needed:
            raise UsageError(f"{size(needed)} are needed in {folder.parent}, {size(free)} are free")
        if os.statvfs(folder).f_flag & os.ST_NOEXEC:
            raise UsageError(f"{folder.parent} is on a file system without execution (noexec)")

    def unpack(self, stream: Stream) -> None:
        """Unpack the pieces of ``stream``."""
        with self._reported():
            unpack(stream.read, self.manifest, self.copy.part, self.copy.folder)
        stream.stop()

    def complete(self, sha256: str) -> None:
        """Publish the copy if the archive that was received has this checksum."""
        with self._reported():
            if not self.error and sha256 != self.manifest.sha256:
                self.error = "the archive is damaged, or arrived damaged"
            if not self.error:
                self.copy.publish()

    def abandon(self) -> None:
        """Remove the copy, unless another job uses it."""
        with self._reported():
            self.copy.release()

    @contextlib.contextmanager
    def _reported(self) -> Any:
        try:
            yield
        except (OSError, UsageError) as error:
            reason = str(error)
            if isinstance(error, OSError) and error.strerror:
                reason = f"{error.filename or self.copy.folder.parent}: {error.strerror}"
            self.error = self.error or reason


class Chain:
    """The ranks that pass the archive on, each to the next one."""

    def __init__(self, communicator: Communicator, ranks: list[int]) -> None:
        position = ranks.index(communicator.rank)
        self.before = ranks[position - 1] if position else None
        self.after = ranks[position + 1] if position + 1 < len(ranks) else None
        self._communicator = communicator
        self._sending: Any = None
        self._sent = b""  # must not be freed before

    @property
    def _world(self) -> Any:
        return cast("Mpi4py", self._communicator).world  # there are several ranks

    def receive(self) -> bytes:
        """Return the next piece; empty: the end."""
        from mpi4py import MPI

        from hvdtrain.collectives.mpi4py import wait

        piece, status = np.empty(PIECE, np.uint8), MPI.Status()
        wait(self._world.Irecv(piece, source=self.before), status)
        return piece[: status.Get_count(MPI.BYTE)].tobytes()

    def send(self, piece: bytes) -> None:
        """Send a piece, once the one before has been sent."""
        if self.after is not None:
            self.finish()
            self._sent = piece
            self._sending = self._world.Isend(np.frombuffer(piece, np.uint8), dest=self.after)

    def progress(self) -> None:
        """Progress the sending: MPI transfers data only during its calls."""
        if self._sending and self._sending.Test():
            self._sending = None

    def finish(self) -> None:
        """Wait until all is sent."""
        if self._sending:
            from hvdtrain.collectives.mpi4py import wait

            wait(self._sending)
            self._sending = None


def pass_on(chain: Chain, path: Path, host: Host, *, missing: bool) -> None:
    """Send the archive along the ``chain`` of ranks, the first of which reads it."""
    stream, digest = Stream(), hashlib.sha256()
    unpacking = threading.Thread(target=host.unpack, args=(stream,), daemon=True)
    if missing:
        unpacking.start()
    try:
        with _opened(path, host) if chain.before is None else contextlib.nullcontext() as file:
            piece = b"-"
            while piece:
                piece = _read(file, host) if file else chain.receive()
                chain.send(piece)
                digest.update(piece)
                if missing:
                    stream.put(piece, chain.progress)
        chain.finish()
    except BaseException:
        stream.stop()
        raise
    finally:
        if missing:
            unpacking.join()
    if missing:
        host.complete(digest.hexdigest())


def _opened(path: Path, host: Host) -> IO[bytes]:
    try:
        return path.open("rb", 0)
    except OSError as error:
        host.error = f"{path}: {error.strerror}"
        return Path(os.devnull).open("rb")  # the others get an empty archive


def _read(file: IO[bytes], host: Host) -> bytes:
    try:
        return file.read(PIECE)
    except OSError as error:
        host.error = f"{file.name}: {error.strerror}"
        return b""


def stage(communicator: Communicator, path: Path, directory: Path, job: str, seal: str) -> str:
    """Make a copy on each host without one; return why that failed.

    Raises:
        HvdtrainError: on all ranks: the description of the archive is not that which was sealed.
    """
    content = _content(description(path)) if communicator.is_root else b""
    text = communicator.broadcast_bytes(content)

    def check() -> None:
        if hashlib.sha256(text).hexdigest() != seal:
            raise HvdtrainError(f"{description(path)} has changed, or arrived damaged")

    communicator.together(check)
    host = Host(msgspec.json.decode(text, type=Manifest), directory, job)
    try:
        missing = host.begin()
        state = communicator.gather_json([missing, host.error])
        ranks = [rank for rank, (lacks, _) in enumerate(state) if lacks]
        ranks = sorted({0, *ranks}) if ranks and not any(error for _, error in state) else []
        if communicator.rank in ranks:
            pass_on(Chain(communicator, ranks), path, host, missing=missing)
        communicator.wait_for_all()
        error = _first(communicator.gather_json([os.uname().nodename, host.error]))
    except BaseException:
        host.abandon()
        raise
    if error:
        host.abandon()
    return error


def _first(rows: list[list[str]]) -> str:
    """Return the first of the errors by host, and on how many others there are some."""
    failed = [f"host {name}: {error}" for name, error in rows if error]
    more = f" (and {plural(len(failed) - 1, 'more host')})" if len(failed) > 1 else ""
    return f"{failed[0]}{more}" if failed else ""


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def main(arguments: list[str]) -> int:
    """Run one process; print the error, if any, once, and return the exit code."""
    verb, path, directory, job, *seal = arguments
    if verb == "remove":
        LocalCopy(Path(path).stem, Path(directory), job).release()
        return EXIT_OK
    from hvdtrain.collectives.mpi4py import Mpi4py

    communicator = Mpi4py()
    try:
        with termination_as_interrupt():
            error = stage(communicator, Path(path), Path(directory), job, *seal)
    except HvdtrainError as failure:
        error = str(failure)
    except BaseException:
        traceback.print_exc()
        communicator.world.Abort(EXIT_FAILURE)  # the others would wait for ever
        raise
    if error and communicator.is_root:
        sys.stdout.write(f"{ERROR}{error}\n")
    return EXIT_FAILURE if error else EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
