"""Write shards and their index, atomically and reproducibly.

The files of a shard depend on the file sizes only, so each shard can be written independently, by
any thread and in any run. Meanwhile ``OUT/.pack`` has SHARD.tar (in progress) and, after its rename
into OUT, SHARD.json: its members, their offsets, and its SHA-256. A later run verifies these shards
and writes the others.
"""

from __future__ import annotations

import fnmatch
import hashlib
import io
import json
import os
import shutil
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, Executor, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
import numpy as np

from hvdtrain.commands.pack.source import (
    AT_ONCE,
    BLOCK,
    LOOSE,
    RECORD,
    Group,
    PackOptions,
    ShardPlan,
    Source,
    find,
    shard_plans,
)
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.files import check_folder, file_digest, lock, resumable
from hvdtrain.system.folder import Folder
from hvdtrain.system.output.stderr import Display
from hvdtrain.system.output.text import plural
from hvdtrain.system.output.text import size as shown
from hvdtrain.workloads.data.image_folder import rgb
from hvdtrain.workloads.data.packed import (
    INDEX,
    WORK,
    Member,
    Pack,
    PackIndex,
    Shard,
    Split,
    key,
    suffix,
)

BUFFER = 2**20
PROGRESS_INTERVAL = 0.2  # seconds between two updates of the progress
QUALITY = 95  # of a resized JPEG


@dataclass(frozen=True)
class ShardRecord:
    """A complete shard; the JSON file in ``OUT/.pack``."""

    fingerprint: str  # of its plan
    size: int  # bytes
    sha256: str
    offsets: list[int]  # of the files in the shard
    sizes: list[int]  # of the files, bytes


class _StoppedError(Exception):
    """Another thread has failed."""


class Packing:
    """The packing of the dataset in ``folder`` into shards in ``out``."""

    def __init__(self, folder: Path, out: Path, options: PackOptions) -> None:
        self.folder, self.out, self.options = folder, out, options
        self._work = out / WORK
        self._stop = threading.Event()
        self._done = 0  # bytes of files that are packed
        self.notes: tuple[str, ...] = ()  # lines for the user, of ``run``

    def run(self) -> tuple[Pack, bool]:
        """Write the missing shards; one process at a time, others wait.

        Return the packed data, and whether they were complete before.

        Raises:
            UsageError: a folder is unsuitable, or an image to resize is broken.
            HvdtrainError: a file was changed meanwhile, or a disk is full. Complete shards are
                kept, and the next run continues.
        """
        self._check_folders()
        with ThreadPoolExecutor(self.options.threads) as pool, Display() as display:
            display.stage(f"listing the files of {self.folder}")
            source = find(self.folder, pool)
            self.notes = source.notes
            if self.options.resize and not source.classes:
                raise UsageError(
                    f"--resize needs an image folder: {self.folder} is {source.kind}, whose boxes "
                    "or arrays would not match"
                )
            with resumable(self.out):
                self._into = Folder.named(self.out)
                self._temporary = self._into.own(WORK)
                with lock(self._temporary, "packs into this directory"):
                    return self._pack(source, pool, display)

    def _check_folders(self) -> None:
        folder, out = self.folder.resolve(), self.out.resolve()
        if folder == out or folder in out.parents or out in folder.parents:
            raise UsageError(
                f"{self.out}: DIR and OUT must not contain each other: specify another OUT"
            )
        check_folder(self.out, str(self.out))
        is_pack = any((self.out / name).exists() for name in (INDEX, WORK))
        if self.out.exists() and not is_pack and any(self.out.iterdir()):
            raise UsageError(f"{self.out} has other files: specify an empty or a new directory")

    def _pack(
        self, source: Source, pool: ThreadPoolExecutor, display: Display
    ) -> tuple[Pack, bool]:
        shard_size, resize = self.options.shard_size, self.options.resize
        digest = source.digest(shard_size, resize)
        if (self.out / INDEX).exists():
            pack = Pack(self.out)
            if pack.contents.source != digest:
                raise UsageError(
                    f"{self.out} was packed from other data or with other options, or "
                    f"{self.folder} was changed since: specify another OUT, or remove it"
                )
            if changed := _changed_since(source, pack, pool, display):
                raise UsageError(
                    f"{changed} was changed since {self.out} was packed: specify another OUT, or "
                    "remove it"
                )
            return pack, True
        parts = shard_plans(source, shard_size, resize)
        self._clear(parts)
        records = self._write(parts, pool, display)
        _contents(source, parts, records, digest).save(self._into)
        for part in parts:
            self._temporary.remove(f"{part.name}.json")
        return Pack(self.out), False

    def _clear(self, parts: list[ShardPlan]) -> None:
        """Remove unusable files of earlier runs; check the free space."""
        names = {part.name for part in parts}
        for folder, pattern in ((self._into, "*-??????.tar"), (self._temporary, "*.tar*")):
            for file in fnmatch.filter(folder.names(), pattern):
                is_partial = folder is self._temporary and not file.endswith(".json")
                if is_partial or file.removesuffix(".json") not in names:
                    folder.remove(file)
        present = sum(path.stat().st_size for path in self.out.glob("*.tar"))
        needed = 0 if self.options.resize else sum(part.max_size for part in parts) - present
        free = shutil.disk_usage(self.out).free
        if free < needed:
            raise UsageError(
                f"{self.out}: the shards need up to {shown(needed)}, and {shown(free)} are free: "
                "free space, or specify another directory"
            )

    def _write(
        self, parts: list[ShardPlan], pool: ThreadPoolExecutor, display: Display
    ) -> list[ShardRecord]:
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

    def _shard(self, part: ShardPlan) -> ShardRecord:
        """Write a shard, unless it exists and is intact; return its record."""
        path, file = self.out / part.name, self._work / f"{part.name}.json"
        if file.exists() and path.exists():
            known = msgspec.json.decode(file.read_bytes(), type=ShardRecord)
            same = known.fingerprint == part.fingerprint and path.stat().st_size == known.size
            if same and file_digest(path, "sha256") == known.sha256:
                self._done += part.size
                return known
        self._temporary.remove(file.name)
        record = self._write_tar(part)
        self._temporary.rename(part.name, part.name, self._into)
        self._temporary.replace(file.name, json.dumps(asdict(record)).encode())
        return record

    def _write_tar(self, part: ShardPlan) -> ShardRecord:
        """Write the tar of ``part``."""
        offsets: list[int] = []
        sizes: list[int] = []
        digest, at = hashlib.sha256(), 0
        with self._temporary.open(part.name, "xb", BUFFER) as file:
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
        size, sha256 = at + len(end), digest.hexdigest()
        return ShardRecord(part.fingerprint, size, sha256, offsets, sizes)

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


def _changed_since(source: Source, pack: Pack, pool: Executor, display: Display) -> str | None:
    """Return a file that differs from its packed copy; None if there is none.

    Names and sizes are those of the packed files. Files that nobody touched since are not read.
    """
    packed_at = (pack.folder / INDEX).stat().st_mtime_ns
    for group in source.groups:
        touched = np.flatnonzero(group.touched >= packed_at).tolist()
        if touched:
            display.stage(f"comparing {plural(len(touched), 'file')} with their packed copies")
        spans = [touched[at : at + AT_ONCE] for at in range(0, len(touched), AT_ONCE)]
        if changed := next(filter(None, pool.map(partial(_first_changed, group, pack), spans)), ""):
            return changed
    return None


def _first_changed(group: Group, pack: Pack, indices: list[int]) -> str | None:
    contents = pack.contents
    for index in indices:
        name, content = group.files.name(index), _content(group, index)
        if group.name == LOOSE:
            member = contents.files[group.path(index)]
        else:
            member = contents.splits[group.name].member(index)
        if contents.resize:
            content = _resized(content, contents.resize, name)
        if pack.read(member) != content:
            return name
    return None


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
            plain = image if image.mode == "L" else rgb(image)
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
    source: Source, parts: list[ShardPlan], records: list[ShardRecord], digest: str
) -> PackIndex:
    """Return the index of the shards."""
    splits, loose = {}, {}
    for group in source.groups:
        numbers = [number for number, part in enumerate(parts) if part.group is group]
        shard = np.repeat(np.array(numbers, np.int32), [len(records[n].offsets) for n in numbers])
        offset = np.concatenate([np.array(records[n].offsets, np.int64) for n in numbers])
        size = np.concatenate([np.array(records[n].sizes, np.int64) for n in numbers])
        names = group.files.names
        if group.name == LOOSE:
            columns = zip(shard.tolist(), offset.tolist(), size.tolist(), strict=True)
            loose = {name: Member(*fields) for name, fields in zip(names, columns, strict=True)}
        else:
            splits[group.name] = Split(shard, offset, size, names.joined, group.labels)
    return PackIndex(
        kind=source.kind,
        shards=[
            Shard(part.name, record.size, record.sha256)
            for part, record in zip(parts, records, strict=True)
        ],
        splits=splits,
        files=loose,
        classes=source.classes,
        resize=parts[0].resize,
        source=digest,
    )
