"""Copies packed data to a local disk of each host before the training (``--stage DIR``).

One rank of each host copies ``--data`` to ``DIR/NAME-DIGEST``, which has an index only when it is
complete. Meanwhile all ranks exchange their progress every second, so an error on one host ends all
at once, and no rank waits so long in a collective that it is considered lost.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.files import FULL, file_digest, lock
from hvdtrain.system.folder import Folder
from hvdtrain.system.output.text import duration, plural, printable, size
from hvdtrain.system.runtime import terminal
from hvdtrain.workloads.data.packed import INDEX, Pack, Shard, is_packed

log = logging.getLogger(__name__)

CHUNK = 2**23  # bytes read at a time
AT_ONCE = 4  # number of shards that a host copies at a time
FIRST_PAUSE, PAUSE = 0.05, 1.0  # seconds between two exchanges of the progress
STOP = 1.0  # seconds for a copy to abort
LINE_EVERY = 30.0  # seconds between two progress lines if there is no terminal


def stage(adapter: CommonAdapter, data: Path, directory: Path) -> tuple[Path, str]:
    """Copy the packed ``data`` to ``directory``, once per host; all ranks must call it together.

    Returns the folder of the copy on this host, and a report for the user.

    Raises:
        UsageError: on every rank: the data is not packed or damaged, or a disk is too small.
        HvdtrainError: on every rank: a disk cannot be written.
    """
    communicator, together = adapter.communicator, adapter.communicator.together
    copy = together(lambda: Copy(data, directory))
    copies = adapter.world.local_rank == 0
    if copies:
        copy.thread.start()
    began = last = time.monotonic()
    pause = FIRST_PAUSE
    while True:
        over, failed = not copy.thread.is_alive(), copy.error is not None
        mine = [copy.done, copy.size, over, failed] if copies else None
        hosts = [row for row in communicator.gather_json(mine) if row]
        if all(row[2] for row in hosts) or any(row[3] for row in hosts):
            break
        done, total = (sum(row[column] for row in hosts) for column in (0, 1))
        text = f"copying the data to {printable(directory)}, {size(done)} of {size(total)}"
        terminal.status(text)
        if time.monotonic() - last >= LINE_EVERY and adapter.world.is_writer:
            last = time.monotonic()
            log.warning("%s, %.0f s", text, last - began)
        time.sleep(pause)
        pause = min(PAUSE, 2 * pause)
    if copies:
        copy.stop()
    together(copy.raise_error)
    copied = sum(communicator.gather_json(copy.copied))
    report = (
        f"{size(copied)} copied in {duration(time.monotonic() - began)}" if copied else "as it was"
    )
    return copy.folder, f"data staged in {copy.folder} on {plural(len(hosts), 'host')}: {report}"


class Copy:
    """Copies packed ``data`` to a folder in ``directory`` of one host, in a thread."""

    def __init__(self, data: Path, directory: Path) -> None:
        if not data.is_dir():
            raise UsageError(f"--data {data}: no such directory")
        if not is_packed(data):
            raise UsageError(
                f"--stage copies packed data, and {data} is not packed: run `hvdtrain pack {data} "
                "OUT`, then use --data OUT"
            )
        self.data, self.directory = data, directory
        self.shards = Pack(data).contents.shards
        self._index = (data / INDEX).read_bytes()
        digest = hashlib.sha256(self._index).hexdigest()
        self.folder = directory / f"{data.resolve().name}-{digest[:12]}"
        self.size = sum(shard.size for shard in self.shards)  # bytes
        self.done = self.copied = 0  # bytes present; bytes copied
        self.error: HvdtrainError | None = None
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name="staging", daemon=True)

    def stop(self) -> None:
        """Abort the copy, because another host has failed; no effect if it is complete.

        A thread that waits for the lock of another session is left behind: it copies nothing.
        """
        self._stop.set()
        self.thread.join(STOP)

    def raise_error(self) -> None:
        """Raise the error of the copy, if any."""
        if self.error:
            raise self.error

    def _run(self) -> None:
        try:
            parent = Folder.named(self.directory)
            self._into = parent.own(self.folder.name, f"--stage {self.directory}: ")
            with lock(self._into, "copies data to this folder"):
                self._copy()
        except HvdtrainError as error:
            self.error = error
        except OSError as error:
            kind = HvdtrainError if error.errno in FULL else UsageError
            where = error.filename or self.folder
            self.error = kind(f"--stage {self.directory}: {where}: {error.strerror or error}")

    def _copy(self) -> None:
        """Copy the missing shards, then the index."""
        with ThreadPoolExecutor(AT_ONCE) as pool:
            there = list(pool.map(self._is_there, self.shards))
            missing = [shard for shard, done in zip(self.shards, there, strict=True) if not done]
            if self._stop.is_set():
                return
            room = sum(shard.size for shard in missing)
            free = shutil.disk_usage(self.folder).free
            if free < room:
                raise UsageError(
                    f"--stage {self.directory}: {size(room)} are needed, {size(free)} are free: "
                    "free some space, use another directory, or omit it"
                )
            if missing:
                self._into.remove(INDEX)
            list(pool.map(self._fetch, missing))
        if not self._stop.is_set() and not (self.folder / INDEX).exists():
            self._into.replace(INDEX, self._index)

    def _is_there(self, shard: Shard) -> bool:
        path = self.folder / shard.name
        if self._stop.is_set() or not path.exists() or path.stat().st_size != shard.size:
            return False
        if file_digest(path, "sha256") != shard.sha256:
            return False
        self.done += shard.size
        return True

    def _fetch(self, shard: Shard) -> None:
        """Copy a shard, and verify its checksum."""
        source, digest = self.data / shard.name, hashlib.sha256()
        partial = f"{shard.name}.part"
        try:
            self._into.remove(partial)
            with source.open("rb", 0) as file, self._into.open(partial, "xb") as copy:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
                while chunk := file.read(CHUNK):
                    if self._stop.is_set():
                        return
                    digest.update(chunk)
                    copy.write(chunk)
                    self.done += len(chunk)
                    self.copied += len(chunk)
        except OSError:
            self._stop.set()  # the other shards need not be copied
            raise
        if digest.hexdigest() != shard.sha256:
            self._stop.set()
            raise UsageError(
                f"{source} is damaged (its SHA-256 differs from that of the packed file): copy it "
                "again from its source, or pack the data again"
            )
        self._into.rename(partial, shard.name)
