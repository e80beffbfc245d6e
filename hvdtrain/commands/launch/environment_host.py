"""Sends a packed environment to the hosts of a job, and unpacks it there; see ``environment.py``.

    mpirun ... python -m hvdtrain.commands.launch.environment_host stage ARCHIVE DIRECTORY SEAL
    mpirun ... python -m hvdtrain.commands.launch.environment_host remove ARCHIVE DIRECTORY

One process per host. Rank 0 reads the archive, and each process passes the pieces on to the next
while it unpacks them, so the shared file system is read once, and the time hardly depends on the
number of hosts. Ranks hold a shared lock on the copy, so that no other job removes it.

MPI does not authenticate what it brings, and ranks execute the copy. So a copy counts only if the
description of the archive has the SHA-256 in the command line, SEAL, and the archive has that in
its description.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import queue
import shutil
import sys
import tarfile
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec
import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.commands.launch.environment import Change, Manifest, description
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, HvdtrainError, UsageError
from hvdtrain.system.files import claim_folder
from hvdtrain.system.output.text import size

if TYPE_CHECKING:
    from hvdtrain.collectives.mpi4py import Mpi4py

PIECE = 2**22  # bytes sent at a time
AHEAD = 4  # pieces received before they are unpacked
PREFIX = "hvdtrain-env-"  # of the names of copies
LOCK = ".lock"  # suffix of a file beside a copy: shared by those who use it
READY = ".ready"  # in a copy that is complete
MARGIN = 1.1  # of the space: files occupy whole blocks


def copy_folder(digest: str, directory: Path) -> Path:
    """Return the folder of a copy on each host."""
    return directory / f"{PREFIX}{os.geteuid()}-{digest}"


def lock_file(folder: Path) -> Path:
    """Return the file whose lock those who use a copy share."""
    return folder.with_name(folder.name + LOCK)


class Stream:
    """The pieces of an archive as a file, for ``tarfile``; a thread writes them."""

    def __init__(self) -> None:
        self._pieces: queue.Queue[bytes] = queue.Queue(AHEAD)
        self._rest = b""
        self.broken = threading.Event()  # nobody reads any more

    def put(self, piece: bytes) -> None:
        """Append a piece; empty: the end."""
        while not self.broken.is_set():
            with contextlib.suppress(queue.Full):
                self._pieces.put(piece, timeout=0.1)
                return

    def read(self, number: int) -> bytes:
        """Return up to ``number`` bytes, fewer only at the end."""
        parts, missing = [], number
        while missing:
            if not self._rest:
                self._rest = self._pieces.get()
                if not self._rest:
                    self._pieces.put(b"")
                    break
            part, self._rest = self._rest[:missing], self._rest[missing:]
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


def unpack(stream: Any, folder: Path, changes: tuple[Change, ...]) -> None:
    """Unpack an archive to ``folder``, and adapt the paths in its files.

    Raises:
        OSError, tarfile.TarError: it cannot be written, or the archive is damaged.
    """
    with tarfile.open(fileobj=stream, mode="r|", bufsize=PIECE) as archive:
        while member := archive.next():
            archive.extract(member, folder, set_attrs=not member.issym(), filter="tar")
    for change in changes:
        _adapt(folder / change.file, change, str(folder / change.new))


def _adapt(path: Path, change: Change, new: str) -> None:
    """Replace a path in a file of a copy.

    Raises:
        OSError: a string of a binary file has no space for the new path.
    """
    old, content, times = change.old.encode(), path.read_bytes(), path.stat()
    if not change.binary:
        content = content.replace(old, new.rstrip("/").encode())
    else:
        pieces = content.split(old)
        for index in range(1, len(pieces)):
            text, zero, rest = pieces[index].partition(b"\0")
            room = len(old) - len(new)
            if room < 0:
                raise OSError(f"{path}: {new} is longer than {change.old}")
            pieces[index] = text + b"\0" * room + zero + rest
        content = new.encode().join(pieces)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class Host:
    """The copy on this host."""

    def __init__(self, manifest: Manifest, directory: Path) -> None:
        self.manifest = manifest
        self.folder = copy_folder(manifest.digest, directory)
        self.error = ""
        self._lock: IO[bytes] | None = None

    def begin(self) -> bool:
        """Return whether the copy is missing here; remove copies that nobody uses.

        On an error it is not missing; see ``error``.
        """
        try:
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            for other in self.folder.parent.glob(f"{PREFIX}{os.geteuid()}-*{LOCK}"):
                if other != lock_file(self.folder):
                    remove(other.with_name(other.name.removesuffix(LOCK)))
            self._lock = lock_file(self.folder).open("ab")
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if (self.folder / READY).exists():
                return False
            shutil.rmtree(self.folder, ignore_errors=True)
            claim_folder(self.folder, "--stage-env: ")
            needed = int(MARGIN * self.manifest.bytes)
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                self.error = f"{size(needed)} are needed in {self.folder}, {size(free)} are free"
        except (OSError, UsageError) as error:
            self.error = f"{self.folder}: {getattr(error, 'strerror', None) or error}"
        return not self.error

    def unpack(self, stream: Stream) -> None:
        """Unpack the pieces of ``stream``."""
        try:
            unpack(stream, self.folder, self.manifest.changes)
        except (OSError, tarfile.TarError, ValueError) as error:
            stream.broken.set()
            self.error = f"{self.folder}: {getattr(error, 'strerror', None) or error}"

    def complete(self, sha256: str) -> None:
        """Mark the copy as complete if the archive that was received has this checksum."""
        if not self.error and sha256 != self.manifest.sha256:
            self.error = f"{self.folder}: the archive arrived damaged"
        if not self.error:
            (self.folder / READY).touch()

    def end(self) -> None:
        """Release the copy, and remove one that is incomplete."""
        if not (self.folder / READY).exists():
            shutil.rmtree(self.folder, ignore_errors=True)
        if self._lock:
            self._lock.close()


def remove(folder: Path) -> None:
    """Remove a copy, unless somebody uses it."""
    with contextlib.suppress(OSError), lock_file(folder).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
        lock_file(folder).unlink(missing_ok=True)


class Chain:
    """The ranks that pass the archive on, each to the next one."""

    def __init__(self, communicator: Communicator, ranks: list[int]) -> None:
        position = ranks.index(communicator.rank)
        self.before = ranks[position - 1] if position else None
        self.after = ranks[position + 1] if position + 1 < len(ranks) else None
        self._communicator = communicator
        self._sending: Any = None

    @property
    def _world(self) -> Any:
        communicator: Mpi4py = self._communicator  # type: ignore[assignment]  # several ranks
        return communicator.world

    def receive(self) -> bytes:
        """Return the next piece; empty: the end."""
        from mpi4py import MPI

        piece, status = np.empty(PIECE, np.uint8), MPI.Status()
        self._world.Recv(piece, source=self.before, status=status)
        return piece[: status.Get_count(MPI.BYTE)].tobytes()

    def send(self, piece: bytes) -> None:
        """Send a piece, once the one before has been sent."""
        if self.after is not None:
            self.finish()
            self._sending = self._world.Isend(np.frombuffer(piece, np.uint8), dest=self.after)

    def finish(self) -> None:
        """Wait until all is sent."""
        if self._sending:
            self._sending.Wait()


def pass_on(chain: Chain, path: Path, host: Host, *, missing: bool) -> None:
    """Send the archive along the ``chain`` of ranks, the first of which reads it."""
    stream, digest = Stream(), hashlib.sha256()
    unpacking = threading.Thread(target=host.unpack, args=(stream,))
    if missing:
        unpacking.start()
    with path.open("rb") if chain.before is None else contextlib.nullcontext() as file:
        while True:
            piece = file.read(PIECE) if file else chain.receive()
            chain.send(piece)
            digest.update(piece)
            if missing:
                stream.put(piece)
            if not piece:
                break
    chain.finish()
    if missing:
        unpacking.join()
        host.complete(digest.hexdigest())


def stage(communicator: Communicator, path: Path, directory: Path, seal: str) -> str:
    """Make a copy on each host without one; return why that failed, by host.

    Raises:
        HvdtrainError: on all ranks: the description of the archive is not that which was sealed.
    """
    text = communicator.broadcast_bytes(_read(description(path)) if communicator.is_root else b"")
    if hashlib.sha256(text).hexdigest() != seal:
        raise HvdtrainError(f"{description(path)} has changed, or arrived damaged")
    host = Host(msgspec.json.decode(text, type=Manifest), directory)
    missing = host.begin()
    state = communicator.gather_json([missing, host.error])
    if not any(error for _, error in state):
        ranks = [rank for rank, (lacks, _) in enumerate(state) if lacks]
        ranks = sorted({0, *ranks}) if ranks else []
        if communicator.rank in ranks:
            pass_on(Chain(communicator, ranks), path, host, missing=missing)
    host.end()
    rows = communicator.gather_json([os.uname().nodename, host.error])
    return "; ".join(f"host {name}: {error}" for name, error in rows if error)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def main(arguments: list[str]) -> int:
    """Run one process; rank 0 prints the error, if any, and all return the exit code."""
    verb, path, directory, *seal = arguments
    from hvdtrain.collectives.mpi4py import Mpi4py

    communicator = Mpi4py()
    if verb == "remove":
        remove(copy_folder(Path(path).stem, Path(directory)))
        return EXIT_OK
    try:
        error = stage(communicator, Path(path), Path(directory), *seal)
    except HvdtrainError as failure:
        error = str(failure)
    if error and communicator.is_root:
        sys.stdout.write(f"{error}\n")
    return EXIT_FAILURE if error else EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
