"""Packed data: many files in a few tar shards, with an index of their offsets.

A folder written by ``hvdtrain pack`` contains shards (``train-000000.tar`` and so on) and
``index.safetensors``, which is written last: without it the folder is incomplete. A sample is two
members of a shard, named by its number in the dataset: ``000000123.jpg``, the bytes of the file,
and ``000000123.json``, its original path. So tar and WebDataset can read the shards too. The index
is mapped into memory, which all processes of a host share.

The index has the safetensors format (https://github.com/huggingface/safetensors): 8 bytes of
length, a JSON header, arrays.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import re
import tarfile
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import msgspec
import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from hvdtrain.errors import UsageError
from hvdtrain.system.files import MAX_READ, file_digest
from hvdtrain.system.folder import Folder

INDEX = "index.safetensors"
WORK = ".pack"  # folder of the state of an unfinished packing
VERSION = 1
IMAGES, COCO, MNIST = "image folder", "COCO", "MNIST"
OPEN = 64  # number of shards that a process keeps open
TYPES = {"U8": np.uint8, "I32": np.int32, "I64": np.int64}
_NAME = re.compile(r"[\w-]+\.tar", re.ASCII)  # of a shard
_WRONG = (ValueError, LookupError, TypeError, AttributeError)  # errors of reading a damaged index


class Shard(NamedTuple):
    """A tar file: name in the folder, size in bytes, and SHA-256."""

    name: str
    size: int
    sha256: str


class Member(NamedTuple):
    """A file within a shard: index of the shard, offset and size in bytes."""

    shard: int
    offset: int
    size: int


@dataclass(frozen=True)
class Split:
    """The samples of a part of the dataset, e.g. ``train``, in order."""

    shard: NDArray[np.int32]  # index of the shard of each sample
    offset: NDArray[np.int64]  # in the shard
    size: NDArray[np.int64]  # in bytes
    names: NDArray[np.uint8]  # paths below the folder of the split, each followed by a zero byte
    labels: NDArray[np.int32]  # empty if the files have no classes

    def __len__(self) -> int:
        return len(self.shard)

    def member(self, index: int) -> Member:
        """Return the location of a sample."""
        return Member(int(self.shard[index]), int(self.offset[index]), int(self.size[index]))


@dataclass(frozen=True)
class PackIndex:
    """The contents of packed data."""

    kind: str  # ``IMAGES``, ``COCO`` or ``MNIST``
    shards: list[Shard]
    splits: Mapping[str, Split]
    files: Mapping[str, Member]  # files other than samples, e.g. annotations, by path
    classes: list[str]  # names, by label
    resize: int  # maximum pixels of the shorter side of an image; 0: not resized
    source: str  # digest of the source data and the options of the packing

    def save(self, folder: Folder) -> None:
        """Write the index of ``folder``, which completes the packed data.

        Raises:
            OSError: the index cannot be written.
        """
        header = asdict(self) | {"version": VERSION, "splits": list(self.splits)}
        header["arrays"] = self.digest()
        # One entry: the library does not preserve the order of several.
        data = safetensors.numpy.save(self._arrays(), {"hvdtrain": json.dumps(header)})
        folder.replace(INDEX, data)

    def digest(self) -> str:
        """Return the digest of the arrays."""
        digest = hashlib.sha256()
        for _, array in sorted(self._arrays().items()):
            digest.update(array.data)
        return digest.hexdigest()

    def _arrays(self) -> dict[str, NDArray[Any]]:
        return {
            f"{name}.{field}": np.ascontiguousarray(array)
            for name, split in self.splits.items()
            for field, array in vars(split).items()
        }


class _Metadata(msgspec.Struct):
    """The JSON of an index."""

    version: int
    kind: str
    shards: list[Shard]
    splits: list[str]
    files: dict[str, Member]
    classes: list[str]
    resize: int
    source: str
    arrays: str  # their digest


def is_packed(folder: Path) -> bool:
    """Return whether ``folder`` contains packed data.

    Raises:
        UsageError: the packing is unfinished.
    """
    if (folder / INDEX).is_file():
        return True
    if (folder / WORK).is_dir():
        raise UsageError(f"{folder}: not packed to its end: run `hvdtrain pack DIR {folder}` again")
    return False


class Pack:
    """Reads packed data.

    Args:
        folder: folder of the packed data.
        complete: whether to check that the shards exist and have their original sizes.

    Raises:
        UsageError: the index is damaged, or of another version; a shard is missing or truncated.
    """

    def __init__(self, folder: Path, *, complete: bool = True) -> None:
        self.folder = folder
        self.contents, self._digest = _load(folder)
        for shard in self.contents.shards if complete else ():
            self._check(shard)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopened, (self.folder,)  # a worker process maps the index itself

    def _check(self, shard: Shard) -> None:
        try:
            size = (self.folder / shard.name).stat().st_size
        except OSError as error:
            raise _damaged(self.folder / shard.name, error.strerror) from error
        if size != shard.size:
            reason = f"it has {size:,} bytes, and had {shard.size:,} when it was packed"
            raise _damaged(self.folder / shard.name, reason)

    def check_index(self) -> None:
        """Verify the digest of the arrays of the index.

        Raises:
            UsageError: the digest differs.
        """
        if self.contents.digest() != self._digest:
            raise _damaged(self.folder / INDEX, "its checksum differs")

    @functools.cached_property
    def _paths(self) -> list[list[bytes]]:
        return [split.names.tobytes().split(b"\0") for split in self.contents.splits.values()]

    def problem(self, number: int) -> str | None:
        """Return the problem of shard ``number``; None: every byte is unchanged."""
        contents, shard = self.contents, self.contents.shards[number]
        path = self.folder / shard.name
        try:
            if (size := path.stat().st_size) != shard.size:
                return f"{size:,} bytes instead of {shard.size:,}"
            if file_digest(path, "sha256") != shard.sha256:
                return "its SHA-256 differs from that in the index"
            with tarfile.open(path, "r:") as tar:
                members = {member.name: (member.offset_data, member.size) for member in tar}
        except OSError as error:
            return error.strerror or str(error)
        except tarfile.TarError as error:
            return str(error)
        expected = {name: file for name, file in contents.files.items() if file.shard == number}
        for split, paths in zip(contents.splits.values(), self._paths, strict=True):
            for index in np.flatnonzero(split.shard == number).tolist():
                name = f"{key(index)}{suffix(os.fsdecode(paths[index]))}"
                expected[name] = split.member(index)
        for name, file in expected.items():
            if members.get(name) != (file.offset, file.size):
                return f"{name} is not at its position in the index"
        return None

    def read(self, member: Member) -> bytes:
        """Return the bytes of ``member``.

        Raises:
            UsageError: the shard was truncated.
            OSError: the shard cannot be read.
        """
        path = self.folder / self.contents.shards[member.shard].name
        opened, pieces, done = _opened(os.fspath(path)), [], 0
        while done < member.size:
            piece = os.pread(opened.handle, member.size - done, member.offset + done)
            if not piece:
                raise _damaged(path, "it was truncated")
            pieces.append(piece)
            done += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def will_need(self, members: Iterable[Member]) -> None:
        """Advise the system that ``members`` are read next."""
        for member in members:
            path = os.fspath(self.folder / self.contents.shards[member.shard].name)
            handle = _opened(path).handle
            os.posix_fadvise(handle, member.offset, member.size, os.POSIX_FADV_WILLNEED)


@functools.lru_cache(maxsize=4)  # a worker receives one per split
def _reopened(folder: Path) -> Pack:
    return Pack(folder)


class _Opened:
    """A file that is open until no thread uses it any more."""

    def __init__(self, path: str) -> None:
        self.handle = -1
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


_opened = functools.lru_cache(maxsize=OPEN)(_Opened)


def _damaged(path: Path, reason: object) -> UsageError:
    return UsageError(
        f"{path} is damaged ({reason}): copy it again from its source, or remove {path.parent} and "
        "pack it again (`hvdtrain pack DIR OUT`)"
    )


def _load(folder: Path) -> tuple[PackIndex, str]:
    """Read an index; return it, and the stored digest of its arrays.

    Raises:
        UsageError: the index is damaged, or of another version.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            return _parse(path, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except _WRONG as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error


def _parse(path: Path, data: mmap.mmap) -> tuple[PackIndex, str]:
    length = int.from_bytes(data[:8], "little")
    if length > MAX_READ:
        raise ValueError(f"a header of {length:,} bytes")
    header = json.loads(data[8 : 8 + length])
    values = json.loads(header.pop("__metadata__")["hvdtrain"])
    if (version := values["version"]) != VERSION:
        raise UsageError(
            f"{path} is of version {version}, and this hvdtrain knows version {VERSION}: pack the "
            "data with this one, or use the one that packed it"
        )
    metadata, arrays = msgspec.convert(values, _Metadata), {}
    for name, entry in header.items():
        start = 8 + length + entry["data_offsets"][0]
        arrays[name] = np.frombuffer(data, TYPES[entry["dtype"]], entry["shape"][0], start)
    if wrong := [shard.name for shard in metadata.shards if not _NAME.fullmatch(shard.name)]:
        raise ValueError(f"{wrong[0]!r} is not the name of a shard")
    splits = {
        name: Split(*(arrays[f"{name}.{field}"] for field in Split.__dataclass_fields__))
        for name in metadata.splits
    }
    known = {name: getattr(metadata, name) for name in PackIndex.__dataclass_fields__}
    return PackIndex(**{**known, "splits": splits}), metadata.arrays


def key(number: int) -> str:
    """Return the name of a sample's members, without their suffixes."""
    return f"{number:09}"


def suffix(path: str) -> str:
    """Return the suffix of a sample's image: that of its file."""
    return PurePath(path).suffix


def wrong_kind(folder: Path, kind: str, wanted: str) -> UsageError:
    """Return the error for packed data of another kind than a task reads."""
    return UsageError(
        f"--data {folder}: this is packed data of another kind ({kind}, not {wanted})"
    )
