"""Download a data set into a folder: what is there is whole, what is broken off goes on later.

Besides the data the folder holds ``.data-fetch``, with a note per file that was downloaded and,
meanwhile, NAME.part (coming), NAME (whole and checked), NAME.unpacking, and NAME.unpacked, whose
files and folders are then renamed to where they belong.
"""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.client
import json
import os
import shutil
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
from hvdtrain.system.files import lock
from hvdtrain.system.output.display import Display
from hvdtrain.system.output.text import plural
from hvdtrain.system.output.text import size as shown

# What is raised for an archive that is damaged.
DAMAGED = (
    zipfile.BadZipFile,
    tarfile.TarError,
    gzip.BadGzipFile,
    zlib.error,
    EOFError,
    ValueError,
)
CHUNK = 2**20  # bytes
PATIENCE = 30.0  # seconds in which nothing comes, after which a connection counts as lost
TRIES = 8  # in a row that bring nothing, before it is given up: four minutes
LONGEST_PAUSE = 60.0  # seconds between two of them


class ConnectionLostError(Exception):
    """The connection was lost, or there was none; its text says why."""


class Fetch:
    """One data set on its way into a folder.

    Args:
        data_set: which.
        folder: where it goes; is made.
        mirror: address of a folder that has the files, instead of their public addresses.
    """

    def __init__(self, data_set: DataSet, folder: Path, mirror: str = "") -> None:
        self.data_set, self.folder, self.mirror = data_set, folder, mirror
        self._work = folder / ".data-fetch"

    def missing(self) -> list[Remote]:
        """Return the files that are still to be downloaded or unpacked."""
        return [remote for remote in self.data_set.remotes if not self._is_there(remote)]

    def room(self) -> int:
        """Return how many bytes must be free: images take the room of their archives, once more."""
        missing = self.missing()
        came = sum(_size(self._at(one)) + _size(self._at(one, "part")) for one in missing)
        largest = max((one.size for one in missing), default=0)
        return sum(one.size for one in missing) + largest - came

    def address(self, remote: Remote) -> str:
        """Return where a file is downloaded from."""
        return f"{self.mirror.rstrip('/')}/{remote.name}" if self.mirror else remote.url

    def check(self) -> None:
        """Look for what stands in the way, before anything is downloaded.

        Raises:
            UsageError: the folder cannot be written, holds files of the same names that are not
                from here, or has no room.
        """
        place = next(one for one in (self.folder, *self.folder.absolute().parents) if one.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise UsageError(f"--to {self.folder}: {place} is no folder that you may write to")
        for remote in self.missing():
            for name in remote.holds:
                if (self.folder / name).exists() and not self._at(remote, "unpacked").exists():
                    raise UsageError(
                        f"{self.folder / name} is there already, and would be overwritten: remove "
                        "it, or name another folder (--to)"
                    )
        free = shutil.disk_usage(place).free
        if free < self.room():
            raise UsageError(
                f"--to {self.folder}: {self.data_set.name} takes up to {shown(self.room())} there, "
                f"and {shown(free)} are free: make room, or name another folder"
            )

    def run(self) -> None:
        """Download, check and unpack what is missing; one process at a time, others wait.

        Raises:
            UsageError: see ``check``.
            HvdtrainError: the server does not answer, or has other files than expected; a disk is
                full. What has come stays, and the next call goes on there.
        """
        self.check()
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            with lock(self._work / "lock", "fetches into this folder"), Display() as display:
                for remote in self.missing():
                    if not self._at(remote, "unpacked").exists():
                        self._download(remote, display)
                        self._unpack(remote, display)
                    self._put_in_place(remote)
                for remote in self.data_set.remotes:
                    self._clear(remote)
        except OSError as error:
            raise HvdtrainError(
                f"{error.filename or self.folder}: {error.strerror or error}: run it again, once "
                "this is mended, and it goes on"
            ) from error

    def _at(self, remote: Remote, stage: str = "") -> Path:
        return self._work / (f"{remote.name}.{stage}" if stage else remote.name)

    def _is_there(self, remote: Remote) -> bool:
        return self._at(remote, "json").exists() and all(
            (self.folder / name).exists() for name in remote.holds
        )

    def _download(self, remote: Remote, display: Display) -> None:
        """Get a file to its end, from where it stands, and check it."""
        whole, part = self._at(remote), self._at(remote, "part")
        if whole.exists():
            return
        url = self.address(remote)
        if _size(part) > remote.size:
            part.unlink()
        _receive(url, part, remote.size, display)
        with part.open("rb") as stream:
            md5 = hashlib.file_digest(stream, functools.partial(hashlib.md5, usedforsecurity=False))
        if remote.md5 and md5.hexdigest() != remote.md5:
            part.unlink()
            raise HvdtrainError(
                f"{url}: what came has the MD5 checksum {md5.hexdigest()}, published is "
                f"{remote.md5}; it is removed: run it again, or take another mirror (--mirror)"
            )
        part.replace(whole)

    def _unpack(self, remote: Remote, display: Display) -> None:
        """Unpack a file into a folder of its own, which has its name when it is whole."""
        partial = self._at(remote, "unpacking")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        done = 0
        try:
            for name, stream in self.data_set.files(self._at(remote)):
                target = partial / name
                if ".." in target.parts or name.startswith("/"):
                    raise HvdtrainError(f"{self.address(remote)} holds {name}, outside its folder")
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(stream, file)
                done += 1
                display.show(f"unpack {remote.name}: {plural(done, 'file')}")
            lacks = [name for name in remote.holds if not (partial / name).exists()]
            damage = f"{', '.join(lacks)} is not in it" if lacks else ""
        except DAMAGED as error:
            damage = f"{error}"
        if damage:
            self._at(remote).unlink()
            raise HvdtrainError(
                f"{self.address(remote)} cannot be unpacked ({damage}); it is removed: run it "
                "again, or take another mirror (--mirror)"
            )
        partial.rename(self._at(remote, "unpacked"))

    def _put_in_place(self, remote: Remote) -> None:
        unpacked = self._at(remote, "unpacked")
        for name in remote.holds:
            if (unpacked / name).exists():  # else it was moved by a call that was ended
                (unpacked / name).replace(self.folder / name)
        facts = {"url": self.address(remote), "size": remote.size, "md5": remote.md5}
        self._at(remote, "json").write_text(json.dumps(facts) + "\n")

    def _clear(self, remote: Remote) -> None:
        """Remove what was needed on the way."""
        self._at(remote).unlink(missing_ok=True)
        for stage in ("unpacking", "unpacked"):
            shutil.rmtree(self._at(remote, stage), ignore_errors=True)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(url: str, part: Path, size: int, display: Display) -> None:
    """Append to ``part`` what is missing of it; a connection that is lost is made again.

    Raises:
        HvdtrainError: the server refuses, has a file of another size, or cannot be reached.
    """
    began, first, idle = time.monotonic(), _size(part), 0
    display.stage(f"{part.stem}, {shown(size)}")
    while (have := _size(part)) < size:
        why = "the connection was closed"
        try:
            with part.open("ab") as file:
                for chunk in _chunks(url, have, size):
                    file.write(chunk)
                    came = file.tell()
                    rate = (came - first) / max(1e-3, time.monotonic() - began)
                    text = f"{part.stem} ({shown(came)} of {shown(size)}, {shown(rate)}/s)"
                    display.show(text, came / size)
        except ConnectionLostError as error:
            why = str(error)
        idle = 0 if _size(part) > have else idle + 1
        if idle == (TRIES if _size(part) > first else 1):
            raise HvdtrainError(
                f"{url} cannot be reached ({why}): run this where there is network, on a login "
                "node; https_proxy names a proxy, --mirror another address. What has come stays, "
                "and the next call goes on there"
            )
        if idle:
            display.stage(f"{part.stem}: {why}; trying again")
            time.sleep(min(2.0**idle, LONGEST_PAUSE))


def _chunks(url: str, have: int, size: int) -> Iterator[bytes]:
    """Yield the file from byte ``have`` on, as it comes.

    Raises:
        ConnectionLostError: the connection was lost, or there was none.
        HvdtrainError: the server refuses, or its file has not ``size`` bytes.
    """
    headers = {"User-Agent": "hvdtrain", "Range": f"bytes={have}-"}
    try:
        request = urllib.request.Request(url, headers=headers)
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            resumed = answer.status == http.client.PARTIAL_CONTENT
            told = answer.headers.get("Content-Range" if resumed else "Content-Length", "")
            total = told.rpartition("/")[2]  # of `bytes FIRST-LAST/TOTAL`, or of the number alone
            if total.isdigit() and int(total) != size:
                raise HvdtrainError(
                    f"{url} has {int(total):,} bytes, {size:,} were expected: it is another file "
                    "now; --mirror names another address"
                )
            skip = 0 if resumed else have  # this server sends it from its beginning
            while chunk := answer.read(CHUNK):
                if rest := chunk[skip:]:
                    yield rest
                skip = max(0, skip - len(chunk))
    except urllib.error.HTTPError as error:
        if error.code < http.client.INTERNAL_SERVER_ERROR:
            raise HvdtrainError(
                f"{url}: the server answers {error.code} {error.reason}; --mirror names another "
                "address"
            ) from error
        raise ConnectionLostError(f"{error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)  # of an URLError, which may be an OSError
        raise ConnectionLostError(getattr(reason, "strerror", None) or str(reason)) from error
