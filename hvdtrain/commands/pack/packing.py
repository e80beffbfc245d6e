"""Write shards and their index: complete or absent, the same bytes from the same files.

Which files a shard holds is told by their sizes alone, so each can be written by itself, by any
thread and in any call. Meanwhile ``OUT/.pack`` holds SHARD.tar (being written) and, once that has
its name in OUT, SHARD.json: what it holds, where, and its SHA-256. A later call reads it again, and
goes on with the others.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.commands.pack.source import LOOSE, Group, Source, find
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.files import lock
from hvdtrain.system.output.display import Display
from hvdtrain.system.output.text import plural
from hvdtrain.system.output.text import size as shown
from hvdtrain.workloads.data.packed import (
    INDEX,
    VERSION,
    WORK,
    Contents,
    Member,
    Pack,
    Shard,
    Split,
    file_digest,
    key,
    suffix,
)

BLOCK, RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE
AROUND = 4 * BLOCK  # bytes of a shard per sample besides the image: two headers, the JSON, padding
BUFFER = 2**20
LOOK = 0.2  # seconds between two looks at how far it is
QUALITY = 95  # of a JPEG that is made smaller


@dataclass(frozen=True)
class Part:
    """What becomes one shard: files ``start`` to ``stop`` of a group."""

    name: str
    group: Group
    start: int
    stop: int
    classes: list[str]
    resize: int

    @property
    def size(self) -> int:
        """The bytes of its files."""
        return int(self.group.sizes[self.start : self.stop].sum())

    @property
    def room(self) -> int:
        """The most bytes that the shard takes, unless its images are made smaller."""
        return self.size + AROUND * (self.stop - self.start) + RECORD

    @property
    def fingerprint(self) -> str:
        """A digest of the files, by name, size and time of change, and of what is done to them."""
        group, span = self.group, slice(self.start, self.stop)
        facts = [VERSION, group.name, self.start, self.resize, group.files.names[span]]
        facts += [group.sizes[span].tolist(), group.changed[span].tolist()]
        facts += [self.classes, group.labels[span].tolist()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def parts_of(source: Source, shard_size: int, resize: int) -> list[Part]:
    """Cut the files of ``source`` into parts of about ``shard_size`` bytes, of a file at least."""
    parts = []
    for group in source.groups:
        ends = np.cumsum(group.sizes + AROUND)
        start = number = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + shard_size, "right"))
            stop = max(start + 1, stop)
            name = f"{group.name}-{number:06}.tar"
            parts.append(Part(name, group, start, stop, source.classes, resize))
            start, number = stop, number + 1
    return parts


class Packing:
    """A folder on its way into shards.

    Args:
        folder: what is packed.
        out: where to.
        shard_size: bytes of a shard, about.
        workers: how many shards are written at once.
        resize: pixels that the shorter side of an image keeps at most; 0: as it is.
    """

    def __init__(
        self, folder: Path, out: Path, *, shard_size: int, workers: int, resize: int = 0
    ) -> None:
        self.folder, self.out, self.shard_size = folder, out, shard_size
        self.workers, self.resize = workers, resize
        self._work = out / WORK
        self._stop = threading.Event()
        self._done = 0  # bytes of files that are packed

    def run(self) -> tuple[Pack, bool]:
        """Pack what is missing; one process at a time, others wait.

        Returns:
            What is packed now, and whether it was so before.

        Raises:
            UsageError: a folder is not fit for it, or an image that is to be made smaller broken.
            HvdtrainError: a file changes meanwhile, or a disk is full. What is packed stays, and
                the next call goes on there.
        """
        self._check_folders()
        with ThreadPoolExecutor(self.workers) as pool, Display() as display:
            display.stage(f"looking at the files of {self.folder}")
            source = find(self.folder, pool)
            if self.resize and not source.classes:
                raise UsageError(
                    f"--resize is for images with a class alone: {self.folder} is {source.kind}, "
                    "whose boxes or arrays would no longer fit"
                )
            try:
                self._work.mkdir(parents=True, exist_ok=True)
                with lock(self._work / "lock", "packs into this folder"):
                    return self._pack(source, pool, display)
            except OSError as error:
                raise HvdtrainError(
                    f"{error.filename or self.out}: {error.strerror or error}: run it again, once "
                    "this is mended, and it goes on"
                ) from error

    def _check_folders(self) -> None:
        folder, out = self.folder.resolve(), self.out.resolve()
        if folder == out or folder in out.parents or out in folder.parents:
            raise UsageError(
                f"{self.out}: neither folder may be within the other: name another OUT"
            )
        place = next(one for one in (self.out, *self.out.absolute().parents) if one.exists())
        if not (place.is_dir() and os.access(place, os.W_OK)):
            raise UsageError(f"{self.out}: {place} is no folder that you may write to")
        ours = any((self.out / own).exists() for own in (INDEX, WORK))
        if self.out.exists() and not ours and any(self.out.iterdir()):
            raise UsageError(
                f"{self.out} holds something else: name a folder that is empty, or none yet"
            )

    def _pack(
        self, source: Source, pool: ThreadPoolExecutor, display: Display
    ) -> tuple[Pack, bool]:
        digest = source.digest(self.shard_size, self.resize)
        if (self.out / INDEX).exists():
            pack = Pack(self.out)
            if pack.contents.source != digest:
                raise UsageError(
                    f"{self.out} holds other packed data, or with other options, or {self.folder} "
                    "has changed since: name another OUT, or remove it"
                )
            return pack, True
        parts = parts_of(source, self.shard_size, self.resize)
        self._clear(parts)
        notes = self._write(parts, pool, display)
        _contents(source, parts, notes, digest).save(self.out)
        for part in parts:
            self._note(part).unlink()
        return Pack(self.out), False

    def _note(self, part: Part) -> Path:
        return self._work / f"{part.name}.json"

    def _clear(self, parts: list[Part]) -> None:
        """Remove what another call has left that is of no use now; look whether there is room."""
        names = {part.name for part in parts}
        for path in (*self.out.glob("*-??????.tar"), *self._work.glob("*.tar*")):
            own = path.name.removesuffix(".json")
            if own not in names or (path.parent == self._work and path.suffix == ".tar"):
                path.unlink()
        there = sum(path.stat().st_size for path in self.out.glob("*.tar"))
        room = 0 if self.resize else sum(part.room for part in parts) - there
        free = shutil.disk_usage(self.out).free
        if free < room:
            raise UsageError(
                f"{self.out}: the shards take up to {shown(room)} there, and {shown(free)} are "
                "free: make room, or name another folder"
            )

    def _write(
        self, parts: list[Part], pool: ThreadPoolExecutor, display: Display
    ) -> list[dict[str, Any]]:
        """Return the note of each part, in order, once all are written."""
        display.stage(f"packing into {plural(len(parts), 'shard')}")
        total, began = max(1, sum(part.size for part in parts)), time.monotonic()
        futures = [pool.submit(self._shard, part) for part in parts]
        waiting, failed = set(futures), False
        try:
            while waiting and not failed:
                done, waiting = wait(waiting, LOOK, FIRST_EXCEPTION)
                failed = any(future.exception() for future in done)
                rate = self._done / max(1e-3, time.monotonic() - began)
                text = f"packed {shown(self._done)} of {shown(total)}, {shown(rate)}/s"
                display.show(text, self._done / total)
        finally:
            if waiting:  # an error, or Ctrl-C
                self._stop.set()
                pool.shutdown(cancel_futures=True)
        # Where several fail, one was first; the others were only told to stop.
        for future in futures:
            error = None if future.cancelled() else future.exception()
            if error and not isinstance(error, _StoppedError):
                raise error
        return [future.result() for future in futures]

    def _shard(self, part: Part) -> dict[str, Any]:
        """Write a shard, unless it is there and intact."""
        path, note = self.out / part.name, self._note(part)
        fingerprint = part.fingerprint
        if note.exists() and path.exists():
            known: dict[str, Any] = json.loads(note.read_text())
            intact = known["fingerprint"] == fingerprint and path.stat().st_size == known["size"]
            if intact and file_digest(path) == known["sha256"]:
                self._done += part.size
                return known
        note.unlink(missing_ok=True)
        written = {"fingerprint": fingerprint} | self._fill(part, self._work / part.name)
        (self._work / part.name).replace(path)
        partial = note.with_suffix(".new")
        partial.write_text(json.dumps(written))
        partial.replace(note)
        return written

    def _fill(self, part: Part, path: Path) -> dict[str, Any]:
        """Write the tar of ``part``; return what its note has to tell."""
        offsets, sizes, digest, at = [], [], hashlib.sha256(), 0
        with path.open("wb", BUFFER) as file:
            for name, content, counts in self._members(part):
                head = _header(name, len(content))
                if counts:
                    offsets.append(at + len(head))
                    sizes.append(len(content))
                for piece in (head, content, b"\0" * (-len(content) % BLOCK)):
                    file.write(piece)
                    digest.update(piece)
                    at += len(piece)
            end = b"\0" * (2 * BLOCK + -(at + 2 * BLOCK) % RECORD)
            file.write(end)
            digest.update(end)
            file.flush()
            os.fsync(file.fileno())
        facts = {"size": at + len(end), "sha256": digest.hexdigest()}
        return facts | {"offsets": offsets, "sizes": sizes}

    def _members(self, part: Part) -> Iterator[tuple[str, bytes, bool]]:
        """Yield name, content, and whether it is a file of the data set, of each member."""
        group = part.group
        for index in range(part.start, part.stop):
            if self._stop.is_set():
                raise _StoppedError
            content, path = _content(group, index), group.path(index)
            if group.name == LOOSE:
                yield path, content, True
            else:
                if part.resize:
                    content = _smaller(content, part.resize, group.files.name(index))
                told: dict[str, object] = {"path": path}
                if len(group.labels):
                    label = int(group.labels[index])
                    told |= {"label": label, "class": part.classes[label]}
                yield f"{key(index)}{suffix(path)}", content, True
                yield f"{key(index)}.json", json.dumps(told).encode(), False
            self._done += int(group.sizes[index])


class _StoppedError(Exception):
    """Another thread has failed."""


def _header(name: str, size: int) -> bytes:
    """Return what stands before a member: nothing of time, owner or machine."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(group: Group, index: int) -> bytes:
    """Return the bytes of a file, which must be what it was when it was looked up."""
    name = group.files.name(index)
    try:
        with group.files.open(index) as file:
            found = os.fstat(file.fileno())
            content = file.read()
    except PermissionError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    except FileNotFoundError as error:
        raise _changed(name, "is gone") from error
    known = int(group.sizes[index]), int(group.changed[index])
    if (len(content), found.st_mtime_ns) != known:
        raise _changed(name, "was changed")
    return content


def _changed(name: str, what: str) -> HvdtrainError:
    return HvdtrainError(f"{name} {what} while it was packed: run it again when all stays as it is")


def _smaller(content: bytes, most: int, name: str) -> bytes:
    """Return an image whose shorter side has ``most`` pixels at most; one that has fewer, as it is.

    Raises:
        UsageError: it cannot be decoded.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            if min(image.size) <= most:
                image.load()
                return content
            form = "PNG" if image.format == "PNG" else "JPEG"
            plain = image if image.mode == "L" else image.convert("RGB")
            scale, (width, height) = most / min(image.size), image.size
            sides = round(width * scale), round(height * scale)
            made: IO[bytes] = io.BytesIO()
            options = {"quality": QUALITY} if form == "JPEG" else {}
            small = plain.resize(sides, Image.Resampling.BICUBIC, reducing_gap=3.0)
            small.save(made, form, **options)
    except Exception as error:  # Pillow raises many kinds for broken bytes
        raise UsageError(
            f"--resize: {name} cannot be decoded ({error}): repair or remove it"
        ) from error
    made.seek(0)
    return made.read()


def _contents(
    source: Source, parts: list[Part], notes: list[dict[str, Any]], digest: str
) -> Contents:
    """Return the index of what was written."""
    splits, loose = {}, {}
    for group in source.groups:
        places = [place for place, part in enumerate(parts) if part.group is group]
        counts = [len(notes[place]["offsets"]) for place in places]
        shard = np.repeat(np.array(places, np.int32), counts)
        offset, size = (
            _joined([notes[place][column] for place in places]) for column in ("offsets", "sizes")
        )
        names = group.files.names
        if group.name == LOOSE:
            columns = zip(shard.tolist(), offset.tolist(), size.tolist(), strict=True)
            loose = {name: Member(*one) for name, one in zip(names, columns, strict=True)}
        else:
            splits[group.name] = Split(shard, offset, size, names.joined, group.labels)
    return Contents(
        kind=source.kind,
        shards=[
            Shard(part.name, note["size"], note["sha256"])
            for part, note in zip(parts, notes, strict=True)
        ],
        splits=splits,
        files=loose,
        classes=source.classes,
        resize=parts[0].resize,
        source=digest,
    )


def _joined(lists: list[list[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.array(one, np.int64) for one in lists])
