"""Write shards and their index, atomically and reproducibly.

The files of a shard depend on the file sizes only, so each shard can be written independently, by
any thread and in any run. Meanwhile ``OUT/.pack`` has SHARD.tar (in progress) and, after its rename
into OUT, SHARD.json: its members, their offsets, and its SHA-256. A later run verifies these shards
and writes the others.
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
from hvdtrain.system.output.stderr import Display
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
OVERHEAD = 4 * BLOCK  # bytes per sample in addition to the image: two headers, JSON, padding
BUFFER = 2**20
PROGRESS_INTERVAL = 0.2  # seconds between two updates of the progress
QUALITY = 95  # of a resized JPEG


@dataclass(frozen=True)
class ShardPlan:
    """The files of one shard: ``start`` to ``stop`` of a group."""

    name: str
    group: Group
    start: int
    stop: int
    classes: list[str]
    resize: int

    @property
    def size(self) -> int:
        """Return the bytes of its files."""
        return int(self.group.sizes[self.start : self.stop].sum())

    @property
    def max_size(self) -> int:
        """Return the maximum bytes of the shard, without resizing."""
        return self.size + OVERHEAD * (self.stop - self.start) + RECORD

    @property
    def fingerprint(self) -> str:
        """Return a digest of the files' names, sizes and times of change, and of the options."""
        group, span = self.group, slice(self.start, self.stop)
        facts = [VERSION, group.name, self.start, self.resize, group.files.names[span]]
        facts += [group.sizes[span].tolist(), group.changed[span].tolist()]
        facts += [self.classes, group.labels[span].tolist()]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()


def shard_plans(source: Source, shard_size: int, resize: int) -> list[ShardPlan]:
    """Split the files of ``source`` into parts of about ``shard_size`` bytes, at least one file."""
    parts = []
    for group in source.groups:
        ends = np.cumsum(group.sizes + OVERHEAD)
        start = number = 0
        while start < len(ends):
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + shard_size, "right"))
            stop = max(start + 1, stop)
            name = f"{group.name}-{number:06}.tar"
            parts.append(ShardPlan(name, group, start, stop, source.classes, resize))
            start, number = stop, number + 1
    return parts


class Packing:
    """The packing of a folder into shards.

    Args:
        folder: the dataset.
        out: output directory.
        shard_size: approximate bytes of a shard.
        workers: number of shards written at the same time.
        resize: maximum pixels of the shorter side of an image; 0: unchanged.
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
        """Write the missing shards; one process at a time, others wait.

        Returns:
            The packed data, and whether they were complete before.

        Raises:
            UsageError: a folder is unsuitable, or an image to resize is broken.
            HvdtrainError: a file was changed meanwhile, or a disk is full. Complete shards are
                kept, and the next run continues.
        """
        self._check_folders()
        with ThreadPoolExecutor(self.workers) as pool, Display() as display:
            display.stage(f"listing the files of {self.folder}")
            source = find(self.folder, pool)
            if self.resize and not source.classes:
                raise UsageError(
                    f"--resize needs an image folder: {self.folder} is {source.kind}, whose boxes "
                    "or arrays would not match"
                )
            try:
                self._work.mkdir(parents=True, exist_ok=True)
                with lock(self._work / "lock", "packs into this directory"):
                    return self._pack(source, pool, display)
            except OSError as error:
                raise HvdtrainError(
                    f"{error.filename or self.out}: {error.strerror or error}: resolve this and "
                    "run it again to continue"
                ) from error

    def _check_folders(self) -> None:
        folder, out = self.folder.resolve(), self.out.resolve()
        if folder == out or folder in out.parents or out in folder.parents:
            raise UsageError(
                f"{self.out}: DIR and OUT must not contain each other: specify another OUT"
            )
        parents = (self.out, *self.out.absolute().parents)
        parent = next(path for path in parents if path.exists())
        if not (parent.is_dir() and os.access(parent, os.W_OK)):
            raise UsageError(f"{self.out}: {parent} is not a writable directory")
        is_pack = any((self.out / name).exists() for name in (INDEX, WORK))
        if self.out.exists() and not is_pack and any(self.out.iterdir()):
            raise UsageError(f"{self.out} has other files: specify an empty or a new directory")

    def _pack(
        self, source: Source, pool: ThreadPoolExecutor, display: Display
    ) -> tuple[Pack, bool]:
        digest = source.digest(self.shard_size, self.resize)
        if (self.out / INDEX).exists():
            pack = Pack(self.out)
            if pack.contents.source != digest:
                raise UsageError(
                    f"{self.out} was packed from other data or with other options, or "
                    f"{self.folder} was changed since: specify another OUT, or remove it"
                )
            return pack, True
        parts = shard_plans(source, self.shard_size, self.resize)
        self._clear(parts)
        records = self._write(parts, pool, display)
        _contents(source, parts, records, digest).save(self.out)
        for part in parts:
            self._record_file(part).unlink()
        return Pack(self.out), False

    def _record_file(self, part: ShardPlan) -> Path:
        return self._work / f"{part.name}.json"

    def _clear(self, parts: list[ShardPlan]) -> None:
        """Remove unusable files of earlier runs; check the free space."""
        names = {part.name for part in parts}
        for path in (*self.out.glob("*-??????.tar"), *self._work.glob("*.tar*")):
            name = path.name.removesuffix(".json")
            if name not in names or (path.parent == self._work and path.suffix == ".tar"):
                path.unlink()
        present = sum(path.stat().st_size for path in self.out.glob("*.tar"))
        needed = 0 if self.resize else sum(part.max_size for part in parts) - present
        free = shutil.disk_usage(self.out).free
        if free < needed:
            raise UsageError(
                f"{self.out}: the shards need up to {shown(needed)}, and {shown(free)} are free: "
                "free space, or specify another directory"
            )

    def _write(
        self, parts: list[ShardPlan], pool: ThreadPoolExecutor, display: Display
    ) -> list[dict[str, Any]]:
        """Write all parts; return the record of each, in order."""
        display.stage(f"packing into {plural(len(parts), 'shard')}")
        total, began = max(1, sum(part.size for part in parts)), time.monotonic()
        futures = [pool.submit(self._shard, part) for part in parts]
        waiting, failed = set(futures), False
        try:
            while waiting and not failed:
                done, waiting = wait(waiting, PROGRESS_INTERVAL, FIRST_EXCEPTION)
                failed = any(future.exception() for future in done)
                rate = self._done / max(1e-3, time.monotonic() - began)
                text = f"packed {shown(self._done)} of {shown(total)}, {shown(rate)}/s"
                display.show(text, self._done / total)
        finally:
            if waiting:  # an error, or Ctrl-C
                self._stop.set()
                pool.shutdown(cancel_futures=True)
        # If several failed, the first is the cause; the others were only stopped.
        for future in futures:
            error = None if future.cancelled() else future.exception()
            if error and not isinstance(error, _StoppedError):
                raise error
        return [future.result() for future in futures]

    def _shard(self, part: ShardPlan) -> dict[str, Any]:
        """Write a shard, unless it exists and is intact; return its record."""
        path, file = self.out / part.name, self._record_file(part)
        fingerprint = part.fingerprint
        if file.exists() and path.exists():
            known: dict[str, Any] = json.loads(file.read_text())
            intact = known["fingerprint"] == fingerprint and path.stat().st_size == known["size"]
            if intact and file_digest(path) == known["sha256"]:
                self._done += part.size
                return known
        file.unlink(missing_ok=True)
        record = {"fingerprint": fingerprint} | self._write_tar(part, self._work / part.name)
        (self._work / part.name).replace(path)
        partial = file.with_suffix(".new")
        partial.write_text(json.dumps(record))
        partial.replace(file)
        return record

    def _write_tar(self, part: ShardPlan, path: Path) -> dict[str, Any]:
        """Write the tar of ``part``; return its size, hash and members."""
        offsets, sizes, digest, at = [], [], hashlib.sha256(), 0
        with path.open("wb", BUFFER) as file:
            for name, content, is_file in self._members(part):
                head = _header(name, len(content))
                if is_file:
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

    def _members(self, part: ShardPlan) -> Iterator[tuple[str, bytes, bool]]:
        """Yield of each member name, content, and whether it is a file of the dataset."""
        group = part.group
        for index in range(part.start, part.stop):
            if self._stop.is_set():
                raise _StoppedError
            content, path = _content(group, index), group.path(index)
            if group.name == LOOSE:
                yield path, content, True
            else:
                if part.resize:
                    content = _resized(content, part.resize, group.files.name(index))
                metadata: dict[str, object] = {"path": path}
                if len(group.labels):
                    label = int(group.labels[index])
                    metadata |= {"label": label, "class": part.classes[label]}
                yield f"{key(index)}{suffix(path)}", content, True
                yield f"{key(index)}.json", json.dumps(metadata).encode(), False
            self._done += int(group.sizes[index])


class _StoppedError(Exception):
    """Another thread has failed."""


def _header(name: str, size: int) -> bytes:
    """Return the tar header of a member, without time, owner and host."""
    member = tarfile.TarInfo(name)
    member.size, member.mode = size, 0o644
    return member.tobuf(tarfile.PAX_FORMAT, "utf-8", "surrogateescape")


def _content(group: Group, index: int) -> bytes:
    """Return the content of a file, which must be unchanged since it was listed."""
    name = group.files.name(index)
    try:
        with group.files.open(index) as file:
            status = os.fstat(file.fileno())
            content = file.read()
    except PermissionError as error:
        raise UsageError(f"{name} cannot be read: {error.strerror}") from error
    except FileNotFoundError as error:
        raise _changed(name, "was removed") from error
    expected = int(group.sizes[index]), int(group.changed[index])
    if (len(content), status.st_mtime_ns) != expected:
        raise _changed(name, "was changed")
    return content


def _changed(name: str, event: str) -> HvdtrainError:
    return HvdtrainError(f"{name} {event} while it was packed: run it again without changes")


def _resized(content: bytes, limit: int, name: str) -> bytes:
    """Return an image with a shorter side of at most ``limit`` pixels; smaller ones are unchanged.

    Raises:
        UsageError: the image cannot be decoded.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content)) as image:
            if min(image.size) <= limit:
                image.load()
                return content
            form = "PNG" if image.format == "PNG" else "JPEG"
            plain = image if image.mode == "L" else image.convert("RGB")
            scale, (width, height) = limit / min(image.size), image.size
            sides = round(width * scale), round(height * scale)
            file: IO[bytes] = io.BytesIO()
            options = {"quality": QUALITY} if form == "JPEG" else {}
            small = plain.resize(sides, Image.Resampling.BICUBIC, reducing_gap=3.0)
            small.save(file, form, **options)
    except Exception as error:  # Pillow raises many kinds for broken bytes
        raise UsageError(
            f"--resize: {name} cannot be decoded ({error}): repair or remove it"
        ) from error
    file.seek(0)
    return file.read()


def _contents(
    source: Source, parts: list[ShardPlan], records: list[dict[str, Any]], digest: str
) -> Contents:
    """Return the index of the shards."""
    splits, loose = {}, {}
    for group in source.groups:
        numbers = [number for number, part in enumerate(parts) if part.group is group]
        counts = [len(records[number]["offsets"]) for number in numbers]
        shard = np.repeat(np.array(numbers, np.int32), counts)
        offset, size = (
            _joined([records[number][key] for number in numbers]) for key in ("offsets", "sizes")
        )
        names = group.files.names
        if group.name == LOOSE:
            columns = zip(shard.tolist(), offset.tolist(), size.tolist(), strict=True)
            loose = {name: Member(*fields) for name, fields in zip(names, columns, strict=True)}
        else:
            splits[group.name] = Split(shard, offset, size, names.joined, group.labels)
    return Contents(
        kind=source.kind,
        shards=[
            Shard(part.name, record["size"], record["sha256"])
            for part, record in zip(parts, records, strict=True)
        ],
        splits=splits,
        files=loose,
        classes=source.classes,
        resize=parts[0].resize,
        source=digest,
    )


def _joined(lists: list[list[int]]) -> NDArray[np.int64]:
    return np.concatenate([np.array(numbers, np.int64) for numbers in lists])
