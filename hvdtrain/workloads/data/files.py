"""The files of a data set, in order, whether they are in a folder or packed."""

from __future__ import annotations

import hashlib
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO, Any, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices
from hvdtrain.system.files import is_regular, read_regular
from hvdtrain.workloads.data.packed import Pack, is_packed, key, suffix

ENDINGS = (".jpg", ".jpeg", ".png")


class Names(Sequence[str]):
    """Names of files, in one piece of memory: a million of them are sent to a process at once.

    Args:
        joined: uint8, a zero byte after each.
    """

    def __init__(self, joined: NDArray[np.uint8]) -> None:
        self.joined = joined

    @staticmethod
    def of(names: Iterable[str]) -> Names:
        """Join ``names``."""
        joined = b"".join(os.fsencode(name) + b"\0" for name in names)
        return Names(np.frombuffer(joined, np.uint8))

    def __reduce__(self) -> tuple[Any, ...]:
        return Names, (self.joined,)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.joined == 0)

    @override
    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    @override
    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = self._ends[index - 1] + 1 if index else 0
        return os.fsdecode(self.joined[start : self._ends[index]].tobytes())

    def take(self, places: Indices) -> Names:
        """Return those at ``places``, in their order."""
        return Names.of(self[int(place)] for place in places)


class Files(ABC):
    """The files of one part of a data set, in order; sent to worker processes by pickle.

    Attributes:
        names: their paths below the folder of the part.
        variant: what makes their content another than that of the files that are so named.
    """

    names: Names
    variant = b""

    def __len__(self) -> int:
        return len(self.names)

    @property
    def digest(self) -> str:
        """The same where names, order and variant are the same, in a folder or packed."""
        return self.digest_with(b"")

    def digest_with(self, labels: bytes) -> str:
        """Return the digest of names, ``labels`` and variant."""
        digest = hashlib.sha256(self.names.joined[:-1].data)
        digest.update(labels + self.variant)
        return digest.hexdigest()

    @abstractmethod
    def name(self, index: int) -> str:
        """Return what a user finds the file by, for messages."""

    @abstractmethod
    def open(self, index: int) -> IO[bytes]:
        """Open the file to be read; it can be sought in.

        Raises:
            OSError: it cannot be read.
            UsageError: packed data are damaged.
        """

    def is_regular(self, index: int) -> bool:
        """Return whether it is a file, not a pipe or a device, which to open might never end.

        Raises:
            OSError: it is not there.
        """
        return True

    def will_need(self, indices: Sequence[int]) -> None:  # noqa: B027 (a folder has no means)
        """Tell the system that these are read next."""

    @abstractmethod
    def forget(self, index: int) -> None:
        """Let the system drop what it has cached of the file; one in memory stays.

        Raises:
            OSError: it cannot be read.
        """

    @abstractmethod
    def take(self, places: Indices) -> Files:
        """Return those at ``places``, in their order."""


class FolderFiles(Files):
    """Files in a folder.

    Args:
        root: the folder.
        names: of the files, by their paths below it.
    """

    def __init__(self, root: Path, names: Names) -> None:
        self.root, self.names = root, names

    @override
    def name(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])  # noqa: PTH118 (a Path takes longer)

    @override
    def open(self, index: int) -> IO[bytes]:
        return open(self.name(index), "rb")  # noqa: PTH123

    @override
    def is_regular(self, index: int) -> bool:
        return is_regular(Path(self.name(index)))

    @override
    def forget(self, index: int) -> None:
        with self.open(index) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @override
    def take(self, places: Indices) -> FolderFiles:
        return FolderFiles(self.root, self.names.take(places))


class PackedFiles(Files):
    """Files of packed data.

    Args:
        pack: the data.
        split: which of its parts.
        places: the samples of it, in order; None: all.
    """

    def __init__(self, pack: Pack, split: str, places: Indices | None = None) -> None:
        self.pack, self.split, self.places = pack, split, places
        self._samples = pack.contents.splits[split]
        names = Names(self._samples.names)
        self.names = names if places is None else names.take(places)
        if pack.contents.resize:
            self.variant = b"\0resize %d" % pack.contents.resize

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedFiles, (self.pack, self.split, self.places)

    def __len__(self) -> int:
        return len(self._samples) if self.places is None else len(self.places)

    def _place(self, index: int) -> int:
        return index if self.places is None else int(self.places[index])

    @override
    def name(self, index: int) -> str:
        place = self._place(index)
        shard = self.pack.contents.shards[self._samples.shard[place]].name
        path = self.names[index]
        return f"{self.pack.folder / shard}: {key(place)}{suffix(path)} ({self.split}/{path})"

    @override
    def open(self, index: int) -> IO[bytes]:
        return io.BytesIO(self.pack.read(self._samples.member(self._place(index))))

    @override
    def will_need(self, indices: Sequence[int]) -> None:
        members = (self._samples.member(self._place(index)) for index in indices)
        self.pack.advise(members, os.POSIX_FADV_WILLNEED)

    @override
    def forget(self, index: int) -> None:
        member = self._samples.member(self._place(index))
        self.pack.advise([member], os.POSIX_FADV_DONTNEED)

    @override
    def take(self, places: Indices) -> PackedFiles:
        chosen = places if self.places is None else self.places[places]
        return PackedFiles(self.pack, self.split, chosen)


def open_split(directory: Path, split: str) -> Files | None:
    """Return the images below ``directory/split``, sorted by path; None where it is not there.

    Args:
        directory: a folder that holds folders of images, or packed data.
        split: such as ``train2017``.

    Raises:
        UsageError: packed data are damaged.
    """
    if is_packed(directory):
        pack = Pack(directory)
        return PackedFiles(pack, split) if split in pack.contents.splits else None
    root = directory / split
    if not root.is_dir():
        return None
    names = sorted(path.relative_to(root) for path, _ in images_below(root))
    return FolderFiles(root, Names.of(os.fspath(name) for name in names))


def has_file(directory: Path, name: str) -> bool:
    """Return whether ``read_file`` finds something."""
    if is_packed(directory):
        return name in Pack(directory).contents.files
    return (directory / name).exists()


def read_file(directory: Path, name: str) -> bytes:
    """Return the content of a file that is no sample, such as ``annotations/instances_x.json``.

    Raises:
        UsageError: there is none of this name, or it cannot be read.
    """
    if is_packed(directory):
        pack = Pack(directory)
        if name not in pack.contents.files:
            raise UsageError(f"--data {directory}: there is no {name} in these packed data")
        return pack.read(pack.contents.files[name])
    try:
        return read_regular(directory / name)
    except OSError as error:
        raise UsageError(f"{directory / name} cannot be read: {error.strerror}") from error


def images_below(folder: str | Path) -> Iterator[tuple[Path, bool]]:
    """Yield what is named as an image below ``folder``, and whether it is a file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if (path := Path(entry.path)).suffix.lower() in ENDINGS:
                yield path, entry.is_file()
            if entry.is_dir(follow_symlinks=False):
                yield from images_below(path)
