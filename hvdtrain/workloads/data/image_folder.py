"""Images with a class each, one folder per class or packed: which there are, which are broken."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.config.options import Options, option, positive
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.exit import end_with_parent
from hvdtrain.workloads.data.files import (
    ENDINGS,
    Files,
    FolderFiles,
    Names,
    PackedFiles,
    images_below,
)
from hvdtrain.workloads.data.packed import IMAGES, Pack, is_packed, wrong_kind

log = logging.getLogger(__name__)

# Random images, for measuring speed: as many as ImageNet has, from a pool that fits into memory.
SYNTHETIC_SAMPLES, SYNTHETIC_CLASSES, SYNTHETIC_POOL = 1_281_167, 1000, 32


@dataclass(frozen=True)
class ImageOptions(Options):
    """What a user can say about images in folders."""

    EITHER: ClassVar = (*Options.EITHER, ("synthetic", "data"))

    synthetic: bool = option(False, "random images made once, for measuring speed", bool)
    image_size: int = option(224, "side of the square images, pixels", positive)
    skip_broken: bool = option(False, "leave out and count images that cannot be decoded", bool)


@dataclass(frozen=True)
class ImageFolder:
    """The images of a split.

    Attributes:
        files: sorted by class and name.
        labels: int64, shape (len(files),).
        classes: names of the classes, sorted; a label is a place in it.
    """

    files: Files
    labels: NDArray[np.int64]
    classes: list[str]

    @property
    def digest(self) -> str:
        """The same where names below the split's folder, their order and their labels are."""
        return self.files.digest_with(self.labels.tobytes())


def load(directory: Path, *, skip_broken: bool = False) -> tuple[ImageFolder, ImageFolder | None]:
    """Return the ``train`` and ``val`` of ``directory``, or of packed data; no ``val``: None.

    Raises:
        UsageError: no such directory, no ``train``, an empty class, or classes that differ;
            packed data are damaged, or of another kind.
    """
    if not directory.is_dir():
        raise UsageError(f"--data {directory}: no such directory")
    if is_packed(directory):
        return _load_packed(Pack(directory))
    if not (directory / "train").is_dir():
        raise UsageError(
            f"--data {directory}: there is no train/ in it; it must hold train/CLASS/*.jpg and "
            "val/CLASS/*.jpg. For random images use --synthetic"
        )
    train = scan(directory / "train", skip_broken=skip_broken)
    if not (directory / "val").is_dir():
        return train, None
    test = scan(directory / "val", skip_broken=skip_broken)
    unknown = sorted(set(test.classes) - set(train.classes))
    if unknown:
        raise UsageError(f"{directory / 'val' / unknown[0]}: train/ has no class of this name")
    # A class without validation images is no error, but labels must mean the same in both.
    place = {name: label for label, name in enumerate(train.classes)}
    relabelled = np.array([place[test.classes[label]] for label in test.labels], np.int64)
    return train, ImageFolder(test.files, relabelled, train.classes)


def _load_packed(pack: Pack) -> tuple[ImageFolder, ImageFolder | None]:
    contents = pack.contents
    if contents.kind != IMAGES:
        raise wrong_kind(pack.folder, contents.kind, IMAGES)
    train, test = (
        ImageFolder(
            PackedFiles(pack, name), contents.splits[name].labels.astype(np.int64), contents.classes
        )
        if name in contents.splits
        else None
        for name in ("train", "val")
    )
    if train is None:
        raise UsageError(f"--data {pack.folder}: these packed data hold no train")
    return train, test


def scan(split: Path, *, skip_broken: bool = False) -> ImageFolder:
    """Return the images below ``split``, one folder per class.

    Raises:
        UsageError: no class, a class without an image, or a pipe or device among them; those stay
            where ``without_broken`` is to leave them out.
    """
    classes = sorted(entry.name for entry in split.iterdir() if entry.is_dir())
    if not classes:
        raise UsageError(f"{split} holds no class: put the images of each class in a folder there")
    names: list[str] = []
    labels: list[int] = []
    start = len(os.fspath(split)) + 1
    for label, name in enumerate(classes):
        found = sorted(images_below(split / name))
        for path, is_file in found:
            if not (is_file or skip_broken):
                raise broken_image(path, "it is no regular file")
        if not found:
            raise UsageError(
                f"{split / name} holds no image ({', '.join(ENDINGS)}): fill or remove it"
            )
        names += [os.fspath(path)[start:] for path, _ in found]
        labels += [label] * len(found)
    files = FolderFiles(split, Names.of(names))
    return ImageFolder(files, np.array(labels, np.int64), classes)


def why_broken(files: Files, index: int) -> str | None:
    """Return why the image cannot be decoded; None where it can."""
    from PIL import Image

    try:
        if not files.is_regular(index):  # opening a pipe would wait for ever
            return "it is no regular file"
        with files.open(index) as file, Image.open(file) as image:
            image.load()
    except UsageError:  # packed data are damaged: no matter of one image
        raise
    except Exception as error:  # Pillow raises many kinds for broken bytes
        return f"{type(error).__name__}: {error}"
    return None


def broken_image(name: object, reason: object) -> UsageError:
    """Return the error for an image that cannot be decoded."""
    return UsageError(
        f"{name} cannot be decoded ({reason}): repair or remove it, or use --skip-broken"
    )


@contextlib.contextmanager
def shared_memory() -> Iterator[None]:
    """Tell the user, while it is open, of worker processes that find no room in /dev/shm.

    Raises:
        UsageError: with the remedy.
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        # As PyTorch tells it of its workers; writing to a full /dev/shm may also kill them.
        if not (full or any(word in str(error) for word in ("No space left", "Bus error"))):
            raise
        raise UsageError(
            f"the workers that read images need shared memory, and /dev/shm on "
            f"{socket.gethostname()} is full: make room there (a container's --shm-size), or read "
            "in the training process itself (--workers 0)"
        ) from error


_files: list[Files] = []  # those that a process of ``without_broken`` looks at


def _begin(files: Files) -> None:
    end_with_parent()
    _files[:] = [files]


def _why_broken(index: int) -> str | None:
    return why_broken(_files[0], index)


def broken_files(files: Files, workers: int) -> list[int]:
    """Decode every image once, in worker processes, and return the places of those that fail.

    Raises:
        UsageError: all do.
    """
    context = get_context("forkserver")
    with (
        shared_memory(),
        ProcessPoolExecutor(max(1, workers), context, _begin, (files,)) as pool,
    ):
        reasons = list(pool.map(_why_broken, range(len(files)), chunksize=64))
    broken = [index for index, why in enumerate(reasons) if why]
    for index in broken:
        log.info("left out %s: %s", files.name(index), reasons[index])
    if len(broken) == len(files):
        raise UsageError(f"none of {len(files)} images can be decoded, {files.name(0)} for one")
    return broken


def without_broken(images: ImageFolder, workers: int) -> tuple[ImageFolder, list[str]]:
    """Leave out the images that cannot be decoded.

    Doing so before the training keeps the rule that an epoch is every sample exactly once.

    Returns:
        The images that are left, and what the others are called.

    Raises:
        UsageError: none is left.
    """
    broken = broken_files(images.files, workers)
    good = np.setdiff1d(np.arange(len(images.files)), broken)
    left = replace(images, files=images.files.take(good), labels=images.labels[good])
    return left, [images.files.name(index) for index in broken]
