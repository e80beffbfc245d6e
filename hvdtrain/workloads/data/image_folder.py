"""A folder of images, one folder per class: what is in it, and what is broken."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.config.options import Options, option, positive
from hvdtrain.errors import UsageError
from hvdtrain.system.files import is_regular
from hvdtrain.system.runtime.exit import end_with_parent

log = logging.getLogger(__name__)

ENDINGS = (".jpg", ".jpeg", ".png")
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
        paths: the files, sorted by class and name.
        labels: int64, shape (len(paths),).
        classes: names of the classes, sorted; a label is a place in it.
        root: the folder of the split.
    """

    paths: list[Path]
    labels: NDArray[np.int64]
    classes: list[str]
    root: Path = Path()

    @property
    def digest(self) -> str:
        """The same where names below ``root``, their order and their labels are the same."""
        start = len(os.fspath(self.root)) + 1
        names = "\0".join(os.fspath(path)[start:] for path in self.paths)
        return hashlib.sha256(os.fsencode(names) + self.labels.tobytes()).hexdigest()


def load(directory: Path, *, skip_broken: bool = False) -> tuple[ImageFolder, ImageFolder | None]:
    """Return the ``train`` and ``val`` folders of ``directory``; no ``val``: None.

    Raises:
        UsageError: no such directory, no ``train``, an empty class, or classes that differ.
    """
    if not directory.is_dir():
        raise UsageError(f"--data {directory}: no such directory")
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
    return train, ImageFolder(test.paths, relabelled, train.classes, test.root)


def scan(split: Path, *, skip_broken: bool = False) -> ImageFolder:
    """Return the images below ``split``, one folder per class.

    Raises:
        UsageError: no class, a class without an image, or a pipe or device among them; those stay
            where ``without_broken`` is to leave them out.
    """
    classes = sorted(entry.name for entry in split.iterdir() if entry.is_dir())
    if not classes:
        raise UsageError(f"{split} holds no class: put the images of each class in a folder there")
    paths: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        found = sorted(_images(split / name))
        for path, is_file in found:
            if not (is_file or skip_broken):
                raise broken_image(path, "it is no regular file")
        if not found:
            raise UsageError(
                f"{split / name} holds no image ({', '.join(ENDINGS)}): fill or remove it"
            )
        paths += [path for path, _ in found]
        labels += [label] * len(found)
    return ImageFolder(paths, np.array(labels, np.int64), classes, split)


def _images(folder: str | Path) -> Iterator[tuple[Path, bool]]:
    """Yield what is named as an image below ``folder``, and whether it is a file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if (path := Path(entry.path)).suffix.lower() in ENDINGS:
                yield path, entry.is_file()
            if entry.is_dir(follow_symlinks=False):
                yield from _images(path)


def why_broken(path: Path) -> str | None:
    """Return why the image cannot be decoded; None where it can."""
    from PIL import Image

    try:
        if not is_regular(path):  # opening a pipe would wait for ever
            return "it is no regular file"
        with Image.open(path) as image:
            image.load()
    except Exception as error:  # Pillow raises many kinds for broken bytes
        return f"{type(error).__name__}: {error}"
    return None


def broken_image(path: Path, reason: object) -> UsageError:
    """Return the error for an image that cannot be decoded."""
    return UsageError(
        f"{path} cannot be decoded ({reason}): repair or remove it, or use --skip-broken"
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


def without_broken(images: ImageFolder, workers: int) -> tuple[ImageFolder, list[Path]]:
    """Decode every image once and leave out those that fail.

    Doing so before the training keeps the rule that an epoch is every sample exactly once.

    Returns:
        The images that are left, and the files left out.

    Raises:
        UsageError: none is left.
    """
    context = get_context("forkserver")
    with shared_memory(), ProcessPoolExecutor(max(1, workers), context, end_with_parent) as pool:
        reasons = list(pool.map(why_broken, images.paths, chunksize=64))
    broken = {path: why for path, why in zip(images.paths, reasons, strict=True) if why}
    for path, why in broken.items():
        log.info("left out %s: %s", path, why)
    good = [index for index, why in enumerate(reasons) if not why]
    if not good:
        raise UsageError(f"none of {len(reasons)} images can be decoded, {images.paths[0]} for one")
    paths = [images.paths[i] for i in good]
    return ImageFolder(paths, images.labels[good], images.classes, images.root), list(broken)
