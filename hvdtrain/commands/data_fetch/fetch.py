"""Download a dataset into a folder: atomically, and resumable after an interruption.

In addition to the data the folder has ``.data-fetch/DATA_SET``, with a record per installed file
and, meanwhile, FILE.part (incomplete), FILE (complete and checked), FILE.unpacking, and
FILE.unpacked, whose files and folders are finally moved into the folder.
"""

from __future__ import annotations

import errno
import functools
import gzip
import hashlib
import http.client
import json
import os
import shutil
import struct
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

from hvdtrain.commands.data_fetch.catalogue import DataSet, Remote
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.files import check_folder, lock, resumable
from hvdtrain.system.folder import Folder
from hvdtrain.system.output.stderr import Display
from hvdtrain.system.output.text import plural
from hvdtrain.system.output.text import size as shown

# Errors of a damaged or invalid archive.
DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    struct.error,
    EOFError,
    ValueError,
    IndexError,
    RuntimeError,
)
CHUNK = 2**20  # bytes
TIMEOUT = 30.0  # seconds without data, after which a connection is considered lost
TRIES = 8  # number of consecutive attempts without data before giving up: four minutes
MAX_PAUSE = 60.0  # maximum seconds between two attempts
# Temporary HTTP errors, in addition to those from 500 on.
BUSY = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)


class ConnectionLostError(Exception):
    """The connection was lost or failed, or the server is busy; the message is the cause."""


class Fetch:
    """The download of a dataset into ``folder``, created if necessary.

    ``mirror``: base address of the files, instead of their public addresses.
    """

    def __init__(self, data_set: DataSet, folder: Path, mirror: str = "") -> None:
        self.data_set, self.folder, self.mirror = data_set, folder, mirror
        self._work = folder / ".data-fetch" / data_set.name
        self._connected = False  # a server has responded in this run, so the network is available

    def missing(self) -> list[Remote]:
        """Return the files that must still be downloaded or unpacked."""
        return [remote for remote in self.data_set.remotes if not self._is_installed(remote)]

    @property
    def is_done(self) -> bool:
        """Return whether the dataset is complete and all temporary files are removed."""
        return not self.missing() and all(path.suffix == ".json" for path in self._work.iterdir())

    def room(self) -> int:
        """Return the bytes of free space needed, for an archive and its contents at once."""
        added = needed = 0
        for remote in self.missing():
            if not self._is_unpacked(remote):
                received = _size(self._path(remote)) + _size(self._path(remote, "part"))
                unpacked = int(self.data_set.growth * remote.size)
                needed = max(needed, added + remote.size - received + unpacked)
                added += unpacked - received  # the archive is removed then
        return needed

    def address(self, remote: Remote) -> str:
        """Return the address from which a file is downloaded."""
        return f"{self.mirror.rstrip('/')}/{remote.name}" if self.mirror else remote.url

    def run(self) -> None:
        """Download, check and unpack the missing files; one process at a time, others wait.

        Raises:
            UsageError: the folder is not writable, has other files of the same names, or has too
                little free space.
            HvdtrainError: the server does not respond, or has other files than expected; a disk is
                full. Received data are kept, and the next run continues.
        """
        check_folder(self.folder, f"--to {self.folder}")
        with resumable(self.folder):
            self._into = Folder.named(self.folder)
            work = self._into.own(self._work.parent.name)
            self._temporary = work.own(self._work.name)
            with lock(work, "fetches into this folder"), Display() as display:
                for remote in self.data_set.remotes:
                    self._clear(remote, everything=self._is_installed(remote))
                self._check()
                for remote in self.missing():
                    if not self._is_unpacked(remote):
                        self._download(remote, display)
                        self._unpack(remote, display)
                    self._install(remote)
                    self._clear(remote, everything=True)

    def _path(self, remote: Remote, stage: str = "") -> Path:
        return self._work / (f"{remote.name}.{stage}" if stage else remote.name)

    def _is_installed(self, remote: Remote) -> bool:
        return self._path(remote, "json").exists() and all(
            (self.folder / name).exists() for name in remote.holds
        )

    def _is_unpacked(self, remote: Remote) -> bool:
        """Return whether it is completely unpacked, possibly in part already installed."""
        unpacked = self._path(remote, "unpacked")
        return unpacked.exists() and all(
            (unpacked / name).exists() or (self.folder / name).exists() for name in remote.holds
        )

    def _clear(self, remote: Remote, *, everything: bool) -> None:
        """Remove incomplete files of a killed run, or all temporary files."""
        remove = self._temporary.remove
        remove(f"{remote.name}.unpacking")
        if everything or not self._is_unpacked(remote):
            remove(f"{remote.name}.unpacked")
        if everything:
            remove(remote.name)
            remove(f"{remote.name}.part")

    def _check(self) -> None:
        """Check for conflicting files and free space, before anything is downloaded."""
        for remote in self.missing():
            if not self._is_unpacked(remote):
                for name in remote.holds:
                    self._check_free(name)
        free = shutil.disk_usage(self.folder).free
        if free < self.room():
            raise UsageError(
                f"--to {self.folder}: {self.data_set.name} needs up to {shown(self.room())}, and "
                f"{shown(free)} are free: free space, or specify another directory"
            )

    def _check_free(self, name: str) -> None:
        if (self.folder / name).exists():
            raise UsageError(
                f"{self.folder / name} exists and would be overwritten: remove it, or specify "
                "another directory (--to)"
            )

    def _download(self, remote: Remote, display: Display) -> None:
        """Download the rest of a file, and check it."""
        part = self._path(remote, "part")
        if self._path(remote).exists():
            return
        if _size(part) > remote.size:
            self._temporary.remove(part.name)
        url = self.address(remote)
        self._receive(url, part, remote.size, display)
        with self._temporary.open(part.name, "rb") as file:
            new = functools.partial(hashlib.md5, usedforsecurity=False)
            md5 = hashlib.file_digest(file, new).hexdigest()  # type: ignore[arg-type]
        if md5 != remote.md5:
            self._temporary.remove(part.name)
            raise HvdtrainError(
                f"{url}: the file has the MD5 checksum {md5} instead of {remote.md5} and was "
                "removed: run it again, or use another mirror (--mirror)"
            )
        self._temporary.rename(part.name, remote.name)

    def _receive(self, url: str, part: Path, size: int, display: Display) -> None:
        """Append the missing bytes to ``part``; a lost connection is retried."""
        began, first, failures = time.monotonic(), _size(part), 0
        display.stage(f"{part.stem}, {shown(size)}")
        while (start := _size(part)) < size:
            reason = "the connection was closed"
            try:
                with self._temporary.open(part.name, "ab") as file:
                    if os.fstat(file.fileno()).st_nlink > 1:  # of another file
                        raise OSError(errno.EMLINK, "is a hard link", str(part))
                    for chunk in self._chunks(url, start, size):
                        file.write(chunk)
                        received = file.tell()
                        rate = (received - first) / max(1e-3, time.monotonic() - began)
                        text = f"{part.stem} ({shown(received)} of {shown(size)}, {shown(rate)}/s)"
                        display.show(text, received / size)
            except ConnectionLostError as error:
                reason = str(error)
            failures = 0 if _size(part) > start else failures + 1
            if failures == (TRIES if self._connected else 1):
                raise HvdtrainError(
                    f"{url} cannot be downloaded ({reason}): run this on a node with network "
                    "access (a login node), set https_proxy, or use --mirror; received data are "
                    "kept, and the next run continues"
                )
            if failures:
                display.stage(f"{part.stem}: {reason}; retrying")
                time.sleep(min(2.0**failures, MAX_PAUSE))

    def _chunks(self, url: str, start: int, size: int) -> Iterator[bytes]:
        """Yield the file from byte ``start`` on, as it is received.

        Raises:
            ConnectionLostError: the download may be retried.
            HvdtrainError: the server rejects the request, or the file does not have ``size`` bytes.
        """
        headers = {"User-Agent": "hvdtrain", "Range": f"bytes={start}-"}
        try:
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
                self._connected = True
                resumed = response.status == http.client.PARTIAL_CONTENT
                length = response.headers.get("Content-Range" if resumed else "Content-Length", "")
                expected = f"bytes {start}-{size - 1}/{size}" if resumed else f"{size}"
                if length != expected:
                    raise HvdtrainError(
                        f"{url}: expected {size:,} bytes, but the server reports "
                        f"{length or 'an unknown size'}: the file was replaced, or this is a login "
                        "page of your network; use another address (--mirror)"
                    )
                skip = 0 if resumed else start  # this server does not support ranges
                while chunk := response.read1(CHUNK):
                    if rest := chunk[skip:]:
                        yield rest
                    skip = max(0, skip - len(chunk))
        except urllib.error.HTTPError as error:
            self._connected = True
            if error.code < http.client.INTERNAL_SERVER_ERROR and error.code not in BUSY:
                raise HvdtrainError(
                    f"{url}: HTTP error {error.code} {error.reason}; use another address (--mirror)"
                ) from error
            raise ConnectionLostError(f"{error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)  # of a URLError
            raise ConnectionLostError(getattr(reason, "strerror", None) or str(reason)) from error

    def _unpack(self, remote: Remote, display: Display) -> None:
        """Unpack a file into a separate folder, which is renamed when it is complete."""
        partial = self._temporary.enter(f"{remote.name}.unpacking")
        count, damage = 0, ""
        try:
            with self._temporary.open(remote.name, "rb") as archive:
                for name, stream in self.data_set.files(archive):
                    *folders, last = Path(name).parts
                    if ".." in (*folders, last) or Path(name).is_absolute():
                        raise ValueError(f"{name} is outside the target directory")
                    target = functools.reduce(Folder.enter, folders, partial)
                    with target.open(last, "xb") as file:
                        shutil.copyfileobj(stream, file)
                    count += 1
                    display.show(f"unpack {remote.name}: {plural(count, 'file')}")
            if missing := [name for name in remote.holds if name not in partial.names()]:
                damage = f"{', '.join(missing)} is missing"
        except DAMAGED as error:
            damage = f"{error}" or type(error).__name__
        if damage:
            self._temporary.remove(remote.name)
            raise HvdtrainError(
                f"{self.address(remote)} cannot be unpacked ({damage}) and was removed: run it "
                "again, or use another mirror (--mirror)"
            )
        self._temporary.rename(f"{remote.name}.unpacking", f"{remote.name}.unpacked")

    def _install(self, remote: Remote) -> None:
        """Move the unpacked files into the folder."""
        unpacked = self._temporary.enter(f"{remote.name}.unpacked")
        left = unpacked.names()
        for name in remote.holds:
            if name in left:  # otherwise an interrupted run has moved it
                self._check_free(name)
                unpacked.rename(name, name, self._into)
        facts = {"url": self.address(remote), "size": remote.size, "md5": remote.md5}
        self._temporary.replace(f"{remote.name}.json", f"{json.dumps(facts)}\n".encode())


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
