"""Packed data: many files in few, each of them a tar, with an index of where what begins.

A folder that ``hvdtrain pack`` has made holds shards (``train-000000.tar`` and so on) and
``index.safetensors``, which is written last: without it there is no packed data. A sample is two
members of a shard, of which the names are its number in the data set: ``000000123.jpg``, the bytes
of the file, and ``000000123.json``, the path that it had. So tar and WebDataset read the shards
too. The index is mapped into memory, which all processes of a host share then.

The format of the index is that of safetensors (https://github.com/huggingface/safetensors): 8 bytes
of length, a JSON header, arrays.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy as np
import safetensors.numpy
from numpy.typing import NDArray

from hvdtrain.errors import UsageError
from hvdtrain.system.files import replacing

INDEX = "index.safetensors"
WORK = ".pack"  # the folder in which a packing that is not done keeps what it knows
VERSION = 1
IMAGES, COCO, MNIST = "image folder", "COCO", "MNIST"
OPEN = 64  # shards that a process keeps open
CHUNK = 2**23  # bytes that are read at once of a whole shard
TYPES = {"U8": np.uint8, "I32": np.int32, "I64": np.int64}


class Shard(NamedTuple):
    """A tar file: its name in the folder, bytes, and SHA-256."""

    name: str
    size: int
    sha256: str


class Member(NamedTuple):
    """A file within a shard: which one, where it begins, and its bytes."""

    shard: int
    offset: int
    size: int


@dataclass(frozen=True)
class Split:
    """The samples of a part of the data set, such as ``train``, in order.

    Attributes:
        shard: int32, in which each is.
        offset: int64, where it begins there.
        size: int64, its bytes.
        names: uint8, their paths below the folder of the split, a zero byte after each.
        labels: int32; none where the files have no classes.
    """

    shard: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    names: NDArray[np.uint8]
    labels: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.shard)

    def member(self, index: int) -> Member:
        """Return where a sample is."""
        return Member(int(self.shard[index]), int(self.offset[index]), int(self.size[index]))


@dataclass(frozen=True)
class Contents:
    """What is in packed data.

    Attributes:
        kind: ``IMAGES``, ``COCO`` or ``MNIST``.
        shards: all of them.
        splits: by name.
        files: what is no sample, such as annotations, by its path.
        classes: their names, of which a label is the place.
        resize: pixels that the shorter side of an image has at most; 0: as it was.
        source: a digest of what was packed, and how.
    """

    kind: str
    shards: list[Shard]
    splits: Mapping[str, Split]
    files: Mapping[str, Member]
    classes: list[str]
    resize: int
    source: str

    def save(self, folder: Path) -> None:
        """Write the index of ``folder``; from then on it holds packed data.

        Raises:
            HvdtrainError: it cannot be written.
        """
        arrays = {
            f"{name}.{field}": np.ascontiguousarray(array)
            for name, split in self.splits.items()
            for field, array in vars(split).items()
        }
        header = asdict(self) | {"version": VERSION, "splits": list(self.splits)}
        header["arrays"] = _digest(arrays)
        # One entry: its library keeps several in no order.
        data = safetensors.numpy.save(arrays, {"hvdtrain": json.dumps(header)})
        with replacing(folder / INDEX) as file:
            file.write(data)


def _digest(arrays: Mapping[str, NDArray[Any]]) -> str:
    digest = hashlib.sha256()
    for name in sorted(arrays):
        digest.update(arrays[name].data)
    return digest.hexdigest()


def is_packed(folder: Path) -> bool:
    """Return whether ``folder`` is what ``hvdtrain pack`` makes.

    Raises:
        UsageError: it was not made to its end.
    """
    if (folder / INDEX).is_file():
        return True
    if (folder / WORK).is_dir():
        raise UsageError(
            f"{folder}: it was not packed to its end: run `hvdtrain pack DIR {folder}` again"
        )
    return False


class Pack:
    """Packed data, to be read.

    Args:
        folder: which.
        complete: look whether the shards are there, and as long as they were.

    Raises:
        UsageError: the index is damaged, or of another version; a shard is missing or truncated.
    """

    def __init__(self, folder: Path, *, complete: bool = True) -> None:
        self.folder = folder
        self.contents, self._digests = _load(folder)
        for shard in self.contents.shards if complete else ():
            self._check(shard)

    def __reduce__(self) -> tuple[Any, ...]:
        return _again, (self.folder,)  # a worker process maps the index itself

    def _check(self, shard: Shard) -> None:
        try:
            size = (self.folder / shard.name).stat().st_size
        except OSError as error:
            raise _damaged(self.folder / shard.name, error.strerror) from error
        if size != shard.size:
            why = f"it has {size:,} bytes, and had {shard.size:,} when it was packed"
            raise _damaged(self.folder / shard.name, why)

    def check_index(self) -> None:
        """Compare the arrays of the index with their digest.

        Raises:
            UsageError: they differ.
        """
        stored, found = self._digests
        if _digest(found) != stored:
            raise _damaged(self.folder / INDEX, "its checksum is another")

    def read(self, member: Member) -> bytes:
        """Return the bytes of ``member``.

        Raises:
            UsageError: the shard has become shorter.
            OSError: it cannot be read.
        """
        path = self.folder / self.contents.shards[member.shard].name
        opened, pieces, done = _opened(os.fspath(path)), [], 0
        while done < member.size:
            piece = os.pread(opened.handle, member.size - done, member.offset + done)
            if not piece:
                raise _damaged(path, "it has become shorter")
            pieces.append(piece)
            done += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def advise(self, members: Iterable[Member], advice: int) -> None:
        """Tell the system what becomes of ``members``, by an advice of ``posix_fadvise``."""
        for member in members:
            path = os.fspath(self.folder / self.contents.shards[member.shard].name)
            handle = _opened(path).handle
            os.posix_fadvise(handle, member.offset, member.size, advice)


@functools.lru_cache(maxsize=4)  # what is sent to a worker has a copy for each split
def _again(folder: Path) -> Pack:
    return Pack(folder)


class _Opened:
    """A file that is open until nobody uses it any more, whichever thread that is."""

    def __init__(self, path: str) -> None:
        self.handle = -1
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


_opened = functools.lru_cache(maxsize=OPEN)(_Opened)


def _damaged(path: Path, why: object) -> UsageError:
    return UsageError(
        f"{path} is damaged ({why}): copy it again from where it came, or remove {path.parent} and "
        "pack it again (`hvdtrain pack DIR OUT`)"
    )


def _load(folder: Path) -> tuple[Contents, tuple[str, dict[str, NDArray[Any]]]]:
    """Read an index; return what is in it, the digest of its arrays as stored, and the arrays.

    Raises:
        UsageError: it is damaged, or of another version.
    """
    path = folder / INDEX
    try:
        with path.open("rb") as file:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        told = json.loads(header.pop("__metadata__")["hvdtrain"])
        version = told.pop("version")
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if version != VERSION:
        raise UsageError(
            f"{path} is of version {version}, and this hvdtrain knows version {VERSION}: pack the "
            "data with this one, or use the one that packed it"
        )
    try:
        arrays = {
            name: np.frombuffer(data, TYPES[entry["dtype"]], *_place(entry, 8 + length))
            for name, entry in header.items()
        }
        fields = Split.__dataclass_fields__
        names, digest = told.pop("splits"), told.pop("arrays")
        splits = {one: Split(*(arrays[f"{one}.{field}"] for field in fields)) for one in names}
        told["shards"] = [Shard(*one) for one in told["shards"]]
        told["files"] = {name: Member(*one) for name, one in told["files"].items()}
        contents = Contents(**told, splits=splits)
        _check_places(contents)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    return contents, (digest, arrays)


def _place(entry: dict[str, Any], start: int) -> tuple[int, int]:
    """Return how many numbers an array has, and where they begin in the file."""
    return entry["shape"][0], start + entry["data_offsets"][0]


def _check_places(contents: Contents) -> None:
    """Make sure that all is within the shards.

    Raises:
        ValueError: it is not.
    """
    sizes = np.array([shard.size for shard in contents.shards], np.int64)
    places = [(one.shard, one.offset, one.size) for one in contents.splits.values()]
    for name, one in contents.splits.items():
        lengths = {len(one.shard), len(one.offset), len(one.size), np.count_nonzero(one.names == 0)}
        if len(lengths) > 1 or len(one.labels) not in (0, len(one)):
            raise ValueError(f"{name} has arrays of other lengths")
        if len(one.labels) and not 0 <= one.labels.min() <= one.labels.max() < len(
            contents.classes
        ):
            raise ValueError(f"{name} has labels of no class")
    if contents.files:
        columns = np.array(list(contents.files.values()), np.int64).T
        places.append((columns[0].astype(np.int32), columns[1], columns[2]))
    for shard, offset, size in places:
        if shard.min() < 0 or offset.min() < 0 or size.min() < 0:
            raise ValueError("a sample begins before its shard")
        if (offset + size > sizes[shard]).any():
            raise ValueError("a sample ends after its shard")


def key(number: int) -> str:
    """Return the name of a sample's members, without their suffixes."""
    return f"{number:09}"


def suffix(path: str) -> str:
    """Return the suffix of a sample's image: that of its file."""
    return PurePath(path).suffix


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def wrong_kind(folder: Path, kind: str, wanted: str) -> UsageError:
    """Return the error for packed data of another kind than a task reads."""
    return UsageError(
        f"--data {folder}: these are packed data of another kind ({kind}, not {wanted})"
    )
