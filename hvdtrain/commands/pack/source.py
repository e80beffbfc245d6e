"""What a folder holds that can be packed: which layout it has, and which files, in which order."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UsageError
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.files import FolderFiles, Names, open_split
from hvdtrain.workloads.data.packed import COCO, IMAGES, MNIST, is_packed
from hvdtrain.workloads.mnist import data as mnist

LOOSE = "files"  # the group of what is no sample
IDX = [
    f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1")
]
AT_ONCE = 256  # files that a thread looks up before it takes others


@dataclass(frozen=True)
class Group:
    """Files that are packed one after the other, in shards of their own.

    Attributes:
        name: of the split; ``LOOSE``: the files are no samples.
        files: in order.
        sizes: int64, bytes of each.
        changed: int64, when each was changed, in nanoseconds.
        labels: int32; none where there are no classes.
    """

    name: str
    files: FolderFiles
    sizes: NDArray[np.int64]
    changed: NDArray[np.int64]
    labels: NDArray[np.int32]

    def path(self, index: int) -> str:
        """Return the path of a file below the folder that is packed."""
        name = self.files.names[index]
        return name if self.name == LOOSE else f"{self.name}/{name}"


@dataclass(frozen=True)
class Source:
    """A folder that can be packed.

    Attributes:
        folder: which.
        kind: ``IMAGES``, ``COCO`` or ``MNIST``.
        groups: its files.
        classes: names of the classes, if there are any.
    """

    folder: Path
    kind: str
    groups: list[Group]
    classes: list[str]

    @property
    def size(self) -> int:
        """The bytes of all files."""
        return sum(int(group.sizes.sum()) for group in self.groups)

    def digest(self, *options: object) -> str:
        """Return a digest of names, sizes and labels, and of the options that matter."""
        digest = hashlib.sha256(json.dumps([self.kind, self.classes, *options]).encode())
        for group in self.groups:
            digest.update(group.name.encode())
            for array in (group.files.names.joined, group.sizes, group.labels):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def find(folder: Path, pool: Executor) -> Source:
    """Return what ``folder`` holds; its files are looked up by the threads of ``pool``.

    Raises:
        UsageError: it has no layout that is known, or something in it is no file.
    """
    if not folder.is_dir():
        raise UsageError(f"{folder}: no such directory")
    if is_packed(folder):
        raise UsageError(f"{folder} is packed already")
    if (folder / "train").is_dir():
        train, val = image_folder.load(folder, skip_broken=True)
        splits = {"train": train, "val": val}
        groups = [
            _group(name, split.files, pool, split.labels.astype(np.int32))
            for name, split in splits.items()
            if split is not None and isinstance(split.files, FolderFiles)
        ]
        return Source(folder, IMAGES, groups, train.classes)
    if annotations := list(_annotations(folder)):
        groups = []
        for annotation in annotations:
            split = _split_of(annotation)
            files = open_split(folder, split)
            if not isinstance(files, FolderFiles) or not len(files):
                raise UsageError(
                    f"{folder / split} holds no image: put those of {annotation} there"
                )
            groups.append(_group(split, files, pool))
        names = Names.of(os.fspath(one.relative_to(folder)) for one in annotations)
        return Source(folder, COCO, [*groups, _group(LOOSE, FolderFiles(folder, names), pool)], [])
    try:
        found = [mnist.find(folder, name) for name in IDX]
    except UsageError as error:
        raise UsageError(
            f"{folder} has no layout that can be packed: it must hold train/CLASS/*.jpg (and "
            "val/), or annotations/instances_SPLIT.json and the images in SPLIT/, as COCO does, or "
            "the four IDX files of MNIST"
        ) from error
    if len({path.parent for path in found}) > 1:
        raise UsageError(f"{folder}: the four IDX files of MNIST are in several folders of it")
    files = FolderFiles(found[0].parent, Names.of(path.name for path in found))
    return Source(folder, MNIST, [_group(LOOSE, files, pool)], [])


def _annotations(folder: Path) -> Iterator[Path]:
    """Yield the files of COCO's annotations whose images are there."""
    for path in sorted((folder / "annotations").glob("instances_*.json")):
        if (folder / _split_of(path)).is_dir():
            yield path


def _split_of(annotation: Path) -> str:
    return annotation.stem.removeprefix("instances_")


def _group(
    name: str, files: FolderFiles, pool: Executor, labels: NDArray[np.int32] | None = None
) -> Group:
    spans = [range(at, min(at + AT_ONCE, len(files))) for at in range(0, len(files), AT_ONCE)]
    facts = [one for found in pool.map(lambda span: _look_up(files, span), spans) for one in found]
    sizes, changed = np.array(facts, np.int64).T
    return Group(name, files, sizes, changed, np.zeros(0, np.int32) if labels is None else labels)


def _look_up(files: FolderFiles, span: range) -> list[tuple[int, int]]:
    """Return bytes and time of change of the files in ``span``."""
    facts = []
    for index in span:
        name = files.name(index)
        try:
            found = os.stat(name)  # noqa: PTH116 (a Path takes longer)
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{name} is no regular file: remove it")
        facts.append((found.st_size, found.st_mtime_ns))
    return facts
