"""Sends a packed environment to the hosts of a job, and unpacks it there; see ``environment.py``.

    mpirun ... python -m hvdtrain.commands.launch.environment_host stage ARCHIVE DIRECTORY
    mpirun ... python -m hvdtrain.commands.launch.environment_host remove ARCHIVE DIRECTORY

One process per host. Rank 0 reads the archive, and each process passes the pieces on to the next
while it unpacks them, so the shared file system is read once, and the time hardly depends on the
number of hosts. Ranks hold a shared lock on the copy, so that no other job removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import queue
import shutil
import sys
import tarfile
import threading
from pathlib import Path
from typing import IO, Any

from hvdtrain.commands.launch.environment import MANIFEST, Archive, Manifest, read_manifest
from hvdtrain.errors import EXIT_FAILURE, EXIT_OK, UsageError
from hvdtrain.system.files import claim_folder
from hvdtrain.system.output.text import size

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


def unpack(stream: Any, folder: Path) -> Manifest:
    """Unpack an archive to ``folder``, and adapt the paths in its files.

    Raises:
        OSError, tarfile.TarError: it cannot be written, or the archive is damaged.
    """
    with tarfile.open(fileobj=stream, mode="r|", bufsize=PIECE) as archive:
        first = archive.next()
        content = archive.extractfile(first) if first and first.name == MANIFEST else None
        if content is None:
            raise tarfile.TarError("no description")
        text = content.read()
        while member := archive.next():
            archive.extract(member, folder, set_attrs=not member.issym(), filter="tar")
    (folder / MANIFEST).write_bytes(text)
    manifest = Manifest(**{**json.loads(text), "changes": ()})
    for change in json.loads(text)["changes"]:
        _adapt(folder / change["file"], change, str(folder / change["new"]))
    return manifest


def _adapt(path: Path, change: dict[str, Any], new: str) -> None:
    """Replace a path in a file of a copy.

    Raises:
        OSError: a string of a binary file has no space for the new path.
    """
    old, content, times = change["old"].encode(), path.read_bytes(), path.stat()
    if not change["binary"]:
        content = content.replace(old, new.rstrip("/").encode())
    else:
        pieces = content.split(old)
        for index in range(1, len(pieces)):
            text, zero, rest = pieces[index].partition(b"\0")
            room = len(old) - len(new)
            if room < 0:
                raise OSError(f"{path}: {new} is longer than {change['old']}")
            pieces[index] = text + b"\0" * room + zero + rest
        content = new.encode().join(pieces)
    path.write_bytes(content)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


class Host:
    """The copy on this host."""

    def __init__(self, archive: Archive, directory: Path) -> None:
        self.archive = archive
        self.folder = copy_folder(archive.manifest.digest, directory)
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
            needed = int(MARGIN * self.archive.manifest.bytes)
            free = shutil.disk_usage(self.folder).free
            if free < needed:
                self.error = f"{size(needed)} are needed in {self.folder}, {size(free)} are free"
        except (OSError, UsageError) as error:
            self.error = f"{self.folder}: {getattr(error, 'strerror', None) or error}"
        return not self.error

    def unpack(self, stream: Stream) -> None:
        """Unpack the pieces of ``stream``."""
        try:
            unpack(stream, self.folder)
            (self.folder / READY).touch()
        except (OSError, tarfile.TarError, ValueError) as error:
            stream.broken.set()
            self.error = f"{self.folder}: {getattr(error, 'strerror', None) or error}"

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


def pass_on(comm: Any, path: Path, chain: list[int], host: Host, *, missing: bool) -> None:
    """Send the archive along the ``chain`` of ranks, the first of which reads it."""
    position = chain.index(comm.rank)
    before = chain[position - 1] if position else None
    after = chain[position + 1] if position + 1 < len(chain) else None
    stream = Stream()
    unpacking = threading.Thread(target=host.unpack, args=(stream,))
    if missing:
        unpacking.start()
    sending: Any = None
    digest = hashlib.sha256()
    with path.open("rb") if before is None else contextlib.nullcontext() as file:
        while True:
            piece = file.read(PIECE) if file else comm.recv(source=before)
            if sending:
                sending.wait()
            sending = comm.isend(piece, dest=after) if after is not None else None
            digest.update(piece)
            if missing:
                stream.put(piece)
            if not piece:
                break
    if sending:
        sending.wait()
    if missing:
        unpacking.join()


def stage(comm: Any, path: Path, directory: Path) -> str:
    """Make a copy on each host without one; return why that failed, by host."""
    archive = Archive(path, comm.bcast(read_manifest(path) if comm.rank == 0 else None))
    host = Host(archive, directory)
    missing = host.begin()
    state = comm.allgather((missing, host.error))
    if not any(error for _, error in state):
        chain = [rank for rank, (lacks, _) in enumerate(state) if lacks]
        if chain:
            chain = sorted({0, *chain})
            if comm.rank in chain:
                pass_on(comm, path, chain, host, missing=missing)
    host.end()
    rows = comm.gather((os.uname().nodename, host.error))
    return "; ".join(f"host {name}: {error}" for name, error in rows or () if error)


class _Comm:
    """One process without MPI."""

    rank = 0

    def bcast(self, value: Any) -> Any:
        return value

    def allgather(self, value: Any) -> list[Any]:
        return [value]

    gather = allgather


def main(arguments: list[str]) -> int:
    """Run one process; rank 0 prints the error, if any, and all return the exit code."""
    verb, path, directory = arguments
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if verb == "remove":
        remove(copy_folder(Path(path).stem, Path(directory)))
        return EXIT_OK
    error = comm.bcast(stage(comm, Path(path), Path(directory)))
    if error and comm.rank == 0:
        sys.stdout.write(f"{error}\n")
    return EXIT_FAILURE if error else EXIT_OK


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
