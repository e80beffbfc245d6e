"""The files of a dataset, in order, in a folder or packed."""

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
from hvdtrain.system.files import check_input, read_regular
from hvdtrain.workloads.data.packed import Pack, is_packed, key, suffix

ENDINGS = (".jpg", ".jpeg", ".png")
# Not all of our decoders read these.
OTHER_ENDINGS = (".avif", ".bmp", ".gif", ".heic", ".jfif", ".ppm", ".tif", ".tiff", ".webp")
MAX_ANNOTATIONS = 2**32  # bytes; those of COCO have 448 MB


class Names(Sequence[str]):
    """Names of files in one array, so that a million of them can be sent to a process quickly.

    In ``joined``, uint8, a zero byte follows each name.
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
            return [self[position] for position in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start = self._ends[index - 1] + 1 if index else 0
        return os.fsdecode(self.joined[start : self._ends[index]].tobytes())

    def take(self, indices: Indices) -> Names:
        """Return those at ``indices``, in this order."""
        return Names.of(self[int(index)] for index in indices)


class Files(ABC):
    """The files of one split of a dataset, in order; sent to worker processes by pickle."""

    names: Names  # paths, relative to the folder of the split
    variant = b""  # conversion of their content, e.g. a resize; part of the digest

    def __len__(self) -> int:
        return len(self.names)

    @property
    def digest(self) -> str:
        """Digest of names, order and variant; the same in a folder and packed."""
        return self.digest_with(b"")

    def digest_with(self, labels: bytes) -> str:
        """Return the digest of names, ``labels`` and variant."""
        digest = hashlib.sha256(self.names.joined[:-1].data)
        digest.update(labels + self.variant)
        return digest.hexdigest()

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the location of the file, for messages."""

    @abstractmethod
    def open(self, index: int) -> IO[bytes]:
        """Open the file for reading; it is seekable.

        Raises:
            OSError: the file cannot be read.
            UsageError: packed data is damaged.
        """

    def will_need(self, indices: Sequence[int]) -> None:  # noqa: B027 (no effect in a folder)
        """Advise the system that these files are read next."""

    @abstractmethod
    def take(self, indices: Indices) -> Files:
        """Return those at ``indices``, in this order."""


class FolderFiles(Files):
    """The files ``names`` in the folder ``root``."""

    def __init__(self, root: Path, names: Names) -> None:
        self.root, self.names = root, names

    @override
    def name(self, index: int) -> str:
        return os.path.join(self.root, self.names[index])  # noqa: PTH118 (a Path takes longer)

    @override
    def open(self, index: int) -> IO[bytes]:
        return open(self.name(index), "rb")  # noqa: PTH123

    @override
    def take(self, indices: Indices) -> FolderFiles:
        return FolderFiles(self.root, self.names.take(indices))


class PackedFiles(Files):
    """The files of a ``split`` of packed data; ``selection``: indices of its samples, or all."""

    def __init__(self, pack: Pack, split: str, selection: Indices | None = None) -> None:
        self.pack, self.split, self.selection = pack, split, selection
        self._samples = pack.contents.splits[split]
        names = Names(self._samples.names)
        self.names = names if selection is None else names.take(selection)
        if pack.contents.resize:
            self.variant = b"\0resize %d" % pack.contents.resize

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedFiles, (self.pack, self.split, self.selection)

    def __len__(self) -> int:
        return len(self._samples) if self.selection is None else len(self.selection)

    def _sample(self, index: int) -> int:
        return index if self.selection is None else int(self.selection[index])

    @override
    def name(self, index: int) -> str:
        sample = self._sample(index)
        shard = self.pack.contents.shards[self._samples.shard[sample]].name
        path = self.names[index]
        return f"{self.pack.folder / shard}: {key(sample)}{suffix(path)} ({self.split}/{path})"

    @override
    def open(self, index: int) -> IO[bytes]:
        return io.BytesIO(self.pack.read(self._samples.member(self._sample(index))))

    @override
    def will_need(self, indices: Sequence[int]) -> None:
        self.pack.will_need(self._samples.member(self._sample(index)) for index in indices)

    @override
    def take(self, indices: Indices) -> PackedFiles:
        chosen = indices if self.selection is None else self.selection[indices]
        return PackedFiles(self.pack, self.split, chosen)


def open_split(directory: Path, split: str) -> Files | None:
    """Return the images below ``directory/split``, sorted by path; None if there is no such split.

    The ``directory`` may be packed.

    Raises:
        UsageError: packed data is damaged.
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
    """Return whether ``read_file`` would find the file."""
    if is_packed(directory):
        return name in Pack(directory).contents.files
    return (directory / name).exists()


def read_file(directory: Path, name: str) -> bytes:
    """Return the content of a file other than samples, e.g. ``annotations/instances_x.json``.

    Raises:
        UsageError: the file does not exist, or cannot be read.
    """
    if is_packed(directory):
        pack = Pack(directory)
        if name not in pack.contents.files:
            raise UsageError(f"--data {directory}: there is no {name} in this packed data")
        return pack.read(pack.contents.files[name])
    try:
        return read_regular(directory / name, MAX_ANNOTATIONS)
    except OSError as error:
        raise UsageError(f"{directory / name} cannot be read: {error.strerror}") from error


def images_below(
    folder: str | Path,
    endings: Sequence[str] = ENDINGS,
    above: frozenset[tuple[int, int]] = frozenset(),
) -> Iterator[tuple[Path, bool]]:
    """Yield paths with one of the ``endings`` below ``folder``, and whether each is a file.

    Links to directories are followed, except to one of ``above``, the devices and inodes of the
    directories that contain ``folder``. Hidden ones (Jupyter's, macOS's ``._a.jpg``) are not read.

    Raises:
        UsageError: a directory cannot be read, or what a link leads to not be looked up.
    """
    check_input(Path(folder), str(folder))
    status = Path(folder).stat()
    if (status.st_dev, status.st_ino) in above:
        return
    above |= {(status.st_dev, status.st_ino)}
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            path = Path(entry.path)
            try:
                is_file, is_folder = entry.is_file(), entry.is_dir()
            except OSError as error:  # a link to itself, or below a directory of others
                raise UsageError(f"{path}: {error.strerror}") from error
            if path.suffix.lower() in endings:
                yield path, is_file
            if is_folder:
                yield from images_below(path, endings, above)
