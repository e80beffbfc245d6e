"""The dataset to be packed: its layout, its files in order, and their division into shards."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tarfile
from concurrent.futures import Executor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hvdtrain.config.declare import json_switch, option, optional, switch
from hvdtrain.config.values import positive
from hvdtrain.errors import UsageError
from hvdtrain.system.files import check_input
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.files import FolderFiles, Names, open_split
from hvdtrain.workloads.data.packed import COCO, IMAGES, MNIST, VERSION, is_packed
from hvdtrain.workloads.mnist import data as mnist

BLOCK, RECORD = tarfile.BLOCKSIZE, tarfile.RECORDSIZE
OVERHEAD = 4 * BLOCK  # bytes per sample in addition to the image: two headers, JSON, padding
LOOSE = "files"  # the group of files that are not samples
IDX = [
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
]
UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
MAX_WORKERS = 16
AT_ONCE = 256  # number of files inspected by a thread in one task


def byte_count(text: str) -> int:
    """Read a number of bytes, in KiB, MiB or GiB, e.g. ``256M``."""
    match = re.fullmatch(r"(\d{1,9})([KMG]?)(i?B)?", text, re.IGNORECASE)
    if not match or not int(match[1]):
        raise ValueError(f"{text[:40]!r} is not a size, e.g. 256M or 1G")
    return int(match[1]) * UNITS[match[2].upper()]


@dataclass(frozen=True)
class PackOptions:
    """The options of the command."""

    shard_size: int = option(
        "256M",
        "approximate size of a shard in bytes, with K, M or G (default: 256M)",
        byte_count,
        metavar="SIZE",
    )
    workers: int | None = optional(
        f"number of parallel workers (default: one per core, at most {MAX_WORKERS})", positive
    )
    resize: int = option(
        0,
        "maximum pixels of the shorter side of an image (default: no resizing)",
        positive,
        metavar="SHORT",
    )
    check: bool = switch("only verify every byte of OUT; exit code 1 if any was changed")
    json: bool = json_switch()

    @property
    def threads(self) -> int:
        """Return the number of shards that are read or written at the same time."""
        return self.workers or min(MAX_WORKERS, len(os.sched_getaffinity(0)))


@dataclass(frozen=True)
class Group:
    """Files that are packed consecutively, in separate shards."""

    name: str  # of the split; ``LOOSE``: the files are not samples
    files: FolderFiles  # in order
    sizes: NDArray[np.int64]  # bytes of each
    changed: NDArray[np.int64]  # time of last change of each, in nanoseconds
    touched: NDArray[np.int64]  # the time of the inode: also if an older file replaced it
    labels: NDArray[np.int32]  # empty if there are no classes

    def path(self, index: int) -> str:
        """Return the path of a file relative to the dataset."""
        name = self.files.names[index]
        return name if self.name == LOOSE else f"{self.name}/{name}"


@dataclass(frozen=True)
class Source:
    """A dataset that can be packed."""

    kind: str  # ``IMAGES``, ``COCO`` or ``MNIST``
    groups: list[Group]  # its files
    classes: list[str]  # names of the classes; empty if there are none
    notes: tuple[str, ...] = ()  # lines for the user on images that are left out

    def digest(self, *options: object) -> str:
        """Return a digest of names, sizes, labels and options."""
        digest = hashlib.sha256(json.dumps([self.kind, self.classes, *options]).encode())
        for group in self.groups:
            digest.update(group.name.encode())
            for array in (group.files.names.joined, group.sizes, group.labels):
                digest.update(np.ascontiguousarray(array).data)
        return digest.hexdigest()


def find(folder: Path, pool: Executor) -> Source:
    """Return the dataset in ``folder``; its files are inspected by the threads of ``pool``.

    Raises:
        UsageError: the layout is unknown, or an entry is not a regular file.
    """
    check_input(folder, str(folder))
    if is_packed(folder):
        raise UsageError(f"{folder} is already packed")
    if (folder / "train").is_dir():
        train, val = image_folder.load(folder, skip_broken=True)
        splits = {"train": train, "val": val}
        groups = [
            _group(name, split.files, pool, split.labels.astype(np.int32))
            for name, split in splits.items()
            if split is not None and isinstance(split.files, FolderFiles)
        ]
        return Source(IMAGES, groups, train.classes, tuple(image_folder.notes(folder, train, val)))
    candidates = sorted((folder / "annotations").glob("instances_*.json"))
    named = {path.stem.removeprefix("instances_"): path for path in candidates}
    annotations = {split: path for split, path in named.items() if (folder / split).is_dir()}
    if annotations:
        groups = []
        for split, annotation in annotations.items():
            files = open_split(folder, split)
            if not isinstance(files, FolderFiles) or not len(files):
                raise UsageError(f"{folder / split} has no images: put those of {annotation} there")
            groups.append(_group(split, files, pool))
        names = Names.of(os.fspath(path.relative_to(folder)) for path in annotations.values())
        return Source(COCO, [*groups, _group(LOOSE, FolderFiles(folder, names), pool)], [])
    try:
        paths = [mnist.find(folder, name) for name in IDX]
    except UsageError as error:
        raise UsageError(
            f"{folder}: unknown layout: it must have train/CLASS/*.jpg (and val/), or "
            "annotations/instances_SPLIT.json and the images in SPLIT/ (COCO), or the four IDX "
            "files of MNIST"
        ) from error
    if len({path.parent for path in paths}) > 1:
        raise UsageError(f"{folder}: the four IDX files of MNIST must be in one directory")
    files = FolderFiles(paths[0].parent, Names.of(path.name for path in paths))
    return Source(MNIST, [_group(LOOSE, files, pool)], [])


def _group(
    name: str, files: FolderFiles, pool: Executor, labels: NDArray[np.int32] | None = None
) -> Group:
    spans = [range(at, min(at + AT_ONCE, len(files))) for at in range(0, len(files), AT_ONCE)]
    results = pool.map(lambda span: _sizes_and_times(files, span), spans)
    facts = np.array([facts for result in results for facts in result], np.int64)
    sizes, changed, touched = facts.T
    labels = np.zeros(0, np.int32) if labels is None else labels
    return Group(name, files, sizes, changed, touched, labels)


def _sizes_and_times(files: FolderFiles, span: range) -> list[tuple[int, int, int]]:
    """Return bytes, time of last change and that of the inode, of the files in ``span``."""
    facts = []
    for index in span:
        name = files.name(index)
        try:
            status = os.stat(name)  # noqa: PTH116 (a Path takes longer)
        except OSError as error:
            raise UsageError(f"{name} cannot be read: {error.strerror}") from error
        if not stat.S_ISREG(status.st_mode):
            raise UsageError(f"{name} is not a regular file: remove it")
        facts.append((status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return facts


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
