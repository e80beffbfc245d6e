"""Download a data set into a folder: what is there is whole, what is broken off goes on later.

Besides the data the folder holds ``.data-fetch/DATA_SET``, with a note per file that has come and,
meanwhile, FILE.part (coming), FILE (whole and checked), FILE.unpacking, and FILE.unpacked, whose
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
from hvdtrain.system.files import lock
from hvdtrain.system.output.display import Display
from hvdtrain.system.output.text import plural
from hvdtrain.system.output.text import size as shown

# What is raised for an archive that is damaged, or holds what it should not.
DAMAGED = (
    *(zipfile.BadZipFile, tarfile.TarError, gzip.BadGzipFile, zlib.error, struct.error, EOFError),
    *(ValueError, IndexError, NotImplementedError, RuntimeError),
)
CHUNK = 2**20  # bytes
PATIENCE = 30.0  # seconds in which nothing comes, after which a connection counts as lost
TRIES = 8  # in a row that bring nothing, before it is given up: four minutes
LONGEST_PAUSE = 60.0  # seconds between two of them
# Answers of a server that may be others in a minute; those from 500 on may, too.
BUSY = (http.client.REQUEST_TIMEOUT, http.client.TOO_MANY_REQUESTS)


class ConnectionLostError(Exception):
    """The connection was lost, there was none, or the server is busy; its text says why."""


class Fetch:
    """One data set on its way into a folder.

    Args:
        data_set: which.
        folder: where it goes; is made.
        mirror: address of a folder that has the files, instead of their public addresses.
    """

    def __init__(self, data_set: DataSet, folder: Path, mirror: str = "") -> None:
        self.data_set, self.folder, self.mirror = data_set, folder, mirror
        self._work = folder / ".data-fetch" / data_set.name
        self._connected = False  # a server has answered in this call: there is network

    def missing(self) -> list[Remote]:
        """Return the files that are still to be downloaded or unpacked."""
        return [remote for remote in self.data_set.remotes if not self._is_there(remote)]

    @property
    def is_done(self) -> bool:
        """Whether all is there, and nothing else that is needed on the way only."""
        return not self.missing() and all(one.suffix == ".json" for one in self._work.iterdir())

    def room(self) -> int:
        """Return how many bytes must be free: a file's archive and what it holds, at once."""
        added = most = 0
        for remote in self.missing():
            if not self._is_unpacked(remote):
                came = _size(self._at(remote)) + _size(self._at(remote, "part"))
                unpacked = int(self.data_set.growth * remote.size)
                most = max(most, added + remote.size - came + unpacked)
                added += unpacked - came  # the archive is removed then
        return most

    def address(self, remote: Remote) -> str:
        """Return where a file is downloaded from."""
        return f"{self.mirror.rstrip('/')}/{remote.name}" if self.mirror else remote.url

    def run(self) -> None:
        """Download, check and unpack what is missing; one process at a time, others wait.

        Raises:
            UsageError: the folder cannot be written, holds files of the same names that are not
                from here, or has no room.
            HvdtrainError: the server does not answer, or has other files than expected; a disk is
                full. What has come stays, and the next call goes on there.
        """
        place = next(one for one in (self.folder, *self.folder.absolute().parents) if one.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise UsageError(f"--to {self.folder}: {place} is no folder that you may write to")
        try:
            self._work.mkdir(parents=True, exist_ok=True)
            with lock(self._work.parent / "lock", "fetches into this folder"), Display() as display:
                for remote in self.data_set.remotes:
                    self._clear(remote, all_of_it=self._is_there(remote))
                self._check()
                for remote in self.missing():
                    if not self._is_unpacked(remote):
                        self._download(remote, display)
                        self._unpack(remote, display)
                    self._put_in_place(remote)
                    self._clear(remote, all_of_it=True)
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

    def _is_unpacked(self, remote: Remote) -> bool:
        """Whether all of it is unpacked, some of it perhaps in its place already."""
        unpacked = self._at(remote, "unpacked")
        return unpacked.exists() and all(
            (unpacked / name).exists() or (self.folder / name).exists() for name in remote.holds
        )

    def _clear(self, remote: Remote, *, all_of_it: bool) -> None:
        """Remove what a killed call has left half done, or all that was needed on the way."""
        shutil.rmtree(self._at(remote, "unpacking"), ignore_errors=True)
        if all_of_it or not self._is_unpacked(remote):
            shutil.rmtree(self._at(remote, "unpacked"), ignore_errors=True)
        if all_of_it:
            for stage in ("", "part"):
                self._at(remote, stage).unlink(missing_ok=True)

    def _check(self) -> None:
        """Look for what stands in the way, before anything is downloaded."""
        for remote in self.missing():
            if not self._is_unpacked(remote):
                for name in remote.holds:
                    self._check_free(name)
        free = shutil.disk_usage(self.folder).free
        if free < self.room():
            raise UsageError(
                f"--to {self.folder}: {self.data_set.name} takes up to {shown(self.room())} there, "
                f"and {shown(free)} are free: make room, or name another folder"
            )

    def _check_free(self, name: str) -> None:
        if (self.folder / name).exists():
            raise UsageError(
                f"{self.folder / name} is there already, and would be overwritten: remove it, or "
                "name another folder (--to)"
            )

    def _download(self, remote: Remote, display: Display) -> None:
        """Get a file to its end, from where it stands, and check it."""
        whole, part = self._at(remote), self._at(remote, "part")
        if whole.exists():
            return
        if _size(part) > remote.size:
            part.unlink()
        url = self.address(remote)
        self._receive(url, part, remote.size, display)
        if remote.md5 and (came := _md5(part)) != remote.md5:
            part.unlink()
            raise HvdtrainError(
                f"{url}: what came has the MD5 checksum {came}, published is {remote.md5}; it is "
                "removed: run it again, or take another mirror (--mirror)"
            )
        part.replace(whole)

    def _receive(self, url: str, part: Path, size: int, display: Display) -> None:
        """Append to ``part`` what is missing of it; a connection that is lost is made again."""
        began, first, idle = time.monotonic(), _size(part), 0
        display.stage(f"{part.stem}, {shown(size)}")
        while (have := _size(part)) < size:
            why = "the connection was closed"
            try:
                with part.open("ab") as file:
                    for chunk in self._chunks(url, have, size):
                        file.write(chunk)
                        came = file.tell()
                        rate = (came - first) / max(1e-3, time.monotonic() - began)
                        text = f"{part.stem} ({shown(came)} of {shown(size)}, {shown(rate)}/s)"
                        display.show(text, came / size)
            except ConnectionLostError as error:
                why = str(error)
            idle = 0 if _size(part) > have else idle + 1
            if idle == (TRIES if self._connected else 1):
                raise HvdtrainError(
                    f"{url} cannot be had ({why}): run this where there is network, on a login "
                    "node; https_proxy names a proxy, --mirror another address. What has come "
                    "stays, and the next call goes on there"
                )
            if idle:
                display.stage(f"{part.stem}: {why}; trying again")
                time.sleep(min(2.0**idle, LONGEST_PAUSE))

    def _chunks(self, url: str, have: int, size: int) -> Iterator[bytes]:
        """Yield the file from byte ``have`` on, as it comes.

        Raises:
            ConnectionLostError: see there.
            HvdtrainError: the server refuses, or its file has not ``size`` bytes.
        """
        headers = {"User-Agent": "hvdtrain", "Range": f"bytes={have}-"}
        try:
            request = urllib.request.Request(url, headers=headers)
            with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
                self._connected = True
                resumed = answer.status == http.client.PARTIAL_CONTENT
                told = answer.headers.get("Content-Range" if resumed else "Content-Length", "")
                wanted = f"bytes {have}-{size - 1}/{size}" if resumed else f"{size}"
                if told != wanted:
                    raise HvdtrainError(
                        f"{url}: expected are {size:,} bytes, and the server answers with "
                        f"{told or 'something of unknown size'}: it is no longer this file, or a "
                        "page of your network; --mirror names another address"
                    )
                skip = 0 if resumed else have  # this server sends it from its beginning
                while chunk := answer.read1(CHUNK):
                    if rest := chunk[skip:]:
                        yield rest
                    skip = max(0, skip - len(chunk))
        except urllib.error.HTTPError as error:
            self._connected = True
            if error.code < http.client.INTERNAL_SERVER_ERROR and error.code not in BUSY:
                raise HvdtrainError(
                    f"{url}: the server answers {error.code} {error.reason}; --mirror names "
                    "another address"
                ) from error
            raise ConnectionLostError(f"{error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)  # of an URLError, which may be an OSError
            raise ConnectionLostError(getattr(reason, "strerror", None) or str(reason)) from error

    def _unpack(self, remote: Remote, display: Display) -> None:
        """Unpack a file into a folder of its own, which has its name when it is whole."""
        partial = self._at(remote, "unpacking")
        partial.mkdir()
        done, damage = 0, ""
        try:
            for name, stream in self.data_set.files(self._at(remote)):
                target = partial / name
                if ".." in target.parts or not target.is_relative_to(partial):
                    raise ValueError(f"{name} lies outside of it")
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("wb") as file:
                    shutil.copyfileobj(stream, file)
                done += 1
                display.show(f"unpack {remote.name}: {plural(done, 'file')}")
            if lacks := [name for name in remote.holds if not (partial / name).exists()]:
                damage = f"{', '.join(lacks)} is not in it"
        except DAMAGED as error:
            damage = f"{error}" or type(error).__name__
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
                self._check_free(name)
                (unpacked / name).replace(self.folder / name)
        facts = {"url": self.address(remote), "size": remote.size, "md5": remote.md5}
        self._at(remote, "json").write_text(json.dumps(facts) + "\n")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _md5(path: Path) -> str:
    with path.open("rb") as stream:
        kind = functools.partial(hashlib.md5, usedforsecurity=False)
        return hashlib.file_digest(stream, kind).hexdigest()
