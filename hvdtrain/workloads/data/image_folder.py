"""Images with class labels, one folder per class or packed: listing, and search for broken ones."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hvdtrain.config.declare import option, switch
from hvdtrain.config.options import TASK_OPTIONS, Options
from hvdtrain.config.values import positive
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.system.files import check_input
from hvdtrain.system.output.text import plural, printable
from hvdtrain.system.runtime.outlive import end_with_parent, worker_context
from hvdtrain.workloads.data.files import (
    ENDINGS,
    OTHER_ENDINGS,
    Files,
    FolderFiles,
    Names,
    PackedFiles,
    images_below,
)
from hvdtrain.workloads.data.packed import IMAGES, Pack, is_packed, wrong_kind

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

# Random images, for measuring speed: the number of ImageNet's, from a pool that fits into memory.
SYNTHETIC_SAMPLES, SYNTHETIC_CLASSES, SYNTHETIC_POOL = 1_281_167, 1000, 32
AT_ONCE = 64  # number of images that a worker decodes in one task of ``broken_files``
AUTO, PILLOW, DALI = DECODERS = ("auto", "pillow", "dali")


@dataclass(frozen=True)
class SyntheticOptions(Options):
    """Options of a task whose speed is measured on random images, too."""

    synthetic: bool = switch(
        "measure throughput on random images (default without --data)",
        group=TASK_OPTIONS,
        either="data",
    )


@dataclass(frozen=True)
class ImageOptions(SyntheticOptions):
    """Options of image folders."""

    decoder: str = option(
        AUTO,
        "library that decodes the images; dali: NVIDIA DALI, only the cropped region, on a GPU by "
        "its JPEG engine (PyTorch); auto: dali on an NVIDIA GPU if it is installed, else pillow",
        choices=DECODERS,
        group="data",
    )
    image_size: int = option(224, "height and width of the images in pixels", positive)
    skip_broken: bool = switch("skip and count images that cannot be decoded")


@dataclass(frozen=True)
class ImageFolder:
    """The images of a split."""

    files: Files  # sorted by class and name
    labels: NDArray[np.int64]  # indices in ``classes``, shape (len(files),)
    classes: list[str]  # names, sorted
    left_out: Sequence[Path] = ()  # images of other kinds

    @property
    def digest(self) -> str:
        """Digest of names below the split's folder, their order and their labels."""
        return self.files.digest_with(self.labels.tobytes())


def load(directory: Path, *, skip_broken: bool = False) -> tuple[ImageFolder, ImageFolder | None]:
    """Return ``train`` and ``val`` of ``directory``, or of packed data; None: no ``val``.

    Raises:
        UsageError: no such directory, no ``train``, an empty class, or classes that differ; packed
            data is damaged, or of another kind.
    """
    check_input(directory, f"--data {directory}")
    if is_packed(directory):
        return _load_packed(Pack(directory))
    if not (directory / "train").is_dir():
        raise UsageError(
            f"--data {directory}: there is no train/ in it; it must contain train/CLASS/*.jpg and "
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
    label_of = {name: label for label, name in enumerate(train.classes)}
    relabelled = np.array([label_of[test.classes[label]] for label in test.labels], np.int64)
    return train, replace(test, labels=relabelled, classes=train.classes)


def notes(directory: Path, train: ImageFolder, test: ImageFolder | None) -> list[str]:
    """Return lines on images of other kinds, and on classes that are not evaluated."""
    lines = []
    if left_out := [*train.left_out, *(test.left_out if test else ())]:
        kinds = f"not {', '.join(ENDINGS)}, e.g. {printable(left_out[0])}"
        lines.append(f"skipped {plural(len(left_out), 'image')} of other kinds ({kinds})")
    if test is None:
        others = {f"{name}/" for name in _folders(directory)} - {"train/"}
        there = f" (there is {printable(', '.join(sorted(others)[:3]))})" if others else ""
        lines.append(f"no val/ in {directory}{there}: nothing is evaluated")
    elif absent := sorted(set(range(len(train.classes))) - set(test.labels.tolist())):
        lines.append(
            f"val/ has no images of {len(absent)} of the {len(train.classes)} classes of train/, "
            f"e.g. {printable(train.classes[absent[0]])}"
        )
    return lines


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
        raise UsageError(f"--data {pack.folder}: this packed data has no train")
    return train, test


def _folders(folder: Path) -> list[str]:
    """Return the names of the folders in it, sorted, without hidden ones, e.g. of Jupyter."""
    names = (entry.name for entry in folder.iterdir() if entry.is_dir())
    return sorted(name for name in names if not name.startswith("."))


def scan(split: Path, *, skip_broken: bool = False) -> ImageFolder:
    """Return the images below ``split``, one folder per class.

    Raises:
        UsageError: no class, a class without images, a directory that cannot be read, or a link to
            nothing among them, unless ``without_broken`` will remove these.
    """
    check_input(split, str(split))
    classes = _folders(split)
    if not classes:
        raise UsageError(f"{split} holds no class: put the images of each class in a folder of it")
    names: list[str] = []
    labels: list[int] = []
    others: list[Path] = []
    start = len(os.fspath(split)) + 1
    for label, name in enumerate(classes):
        entries = sorted(images_below(split / name, ENDINGS + OTHER_ENDINGS))
        images = [entry for entry in entries if entry[0].suffix.lower() in ENDINGS]
        others += [
            path for path, is_file in entries if is_file and path.suffix.lower() not in ENDINGS
        ]
        for path, is_file in images:
            if not (is_file or skip_broken):
                raise broken_image(path, "it is not a file")
        if not images:
            raise UsageError(
                f"{split / name} holds no image ({', '.join(ENDINGS)}): fill or remove it"
            )
        names += [os.fspath(path)[start:] for path, _ in images]
        labels += [label] * len(images)
    files = FolderFiles(split, Names.of(names))
    return ImageFolder(files, np.array(labels, np.int64), classes, others)


Decode = Callable[[IO[bytes]], None]
"""Decodes an image as the training will; raises an exception if that fails."""


def by_pillow(file: IO[bytes]) -> None:
    """Decode an image by Pillow."""
    from PIL import Image

    with Image.open(file) as image:
        image.load()


def decoding_error(files: Files, index: int, decode: Decode = by_pillow) -> str | None:
    """Return the reason for which the image cannot be decoded; None if it can."""
    try:
        with files.open(index) as file:
            decode(file)
    except UsageError:  # packed data is damaged, not a single image
        raise
    except Exception as error:  # Pillow raises many kinds for broken bytes
        return f"{type(error).__name__}: {error}"
    return None


def rgb(image: Image) -> Image:
    """Return a decoded image in RGB; grey of 16 bits is scaled to 8, as TensorFlow does."""
    from PIL import Image

    if image.mode.startswith("I"):  # I;16, or I in older versions; ``convert`` clips them to 255
        image = Image.fromarray((np.asarray(image).clip(0, 2**16 - 1) >> 8).astype(np.uint8))
    return image if image.mode == "RGB" else image.convert("RGB")


def broken_image(name: object, reason: object) -> UsageError:
    """Return the error for an image that cannot be decoded."""
    # With --skip-broken it has become so since the start, so the next start skips it.
    return UsageError(
        f"{name} cannot be decoded ({reason}): repair or remove it, or start again with "
        "--skip-broken"
    )


@contextlib.contextmanager
def worker_errors() -> Iterator[None]:
    """Convert errors of worker processes within the block to one line with the remedy.

    Raises:
        UsageError: /dev/shm is full.
        TrainingError: a worker process was killed.
    """
    try:
        yield
    except (OSError, EOFError, RuntimeError) as error:
        full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        # As PyTorch reports it; writing to a full /dev/shm may also kill the workers.
        if not (full or any(word in str(error) for word in ("No space left", "Bus error"))):
            # A worker that is killed while it hands over a batch breaks the connection.
            ended = isinstance(error, (ConnectionError, EOFError)) or any(
                words in str(error) for words in ("exited unexpectedly", "killed by signal")
            )
            if not ended:
                raise
            raise TrainingError(
                f"a process that reads images has ended ({error}): if memory ran out, use fewer "
                "--workers"
            ) from error
        raise UsageError(
            f"the workers that read images need shared memory, and /dev/shm on "
            f"{socket.gethostname()} is full: free some space (in a container: --shm-size), or "
            "read in the training process itself (--workers 0)"
        ) from error


_checked: list[tuple[Files, Decode]] = []  # by this process of ``without_broken``


def _begin(files: Files, decode: Decode) -> None:
    end_with_parent()
    _checked[:] = [(files, decode)]


def _decoding_errors(span: range) -> list[str | None]:
    files, decode = _checked[0]
    return [decoding_error(files, index, decode) for index in span]


def broken_files(files: Files, workers: int, decode: Decode = by_pillow) -> list[int]:
    """Decode every image and return the indices of those that fail.

    Each rank does so at each start: by Pillow in worker processes, by another library in threads,
    as each process would take seconds to import it, and write its banners.

    Raises:
        UsageError: all images fail.
    """
    number, begin = max(1, workers), (files, decode)
    pool: Executor
    if decode is by_pillow:
        pool = ProcessPoolExecutor(number, worker_context(), _begin, begin)
    else:
        pool = ThreadPoolExecutor(number, "decode", _begin, begin)
    spans = [range(at, min(at + AT_ONCE, len(files))) for at in range(0, len(files), AT_ONCE)]
    with worker_errors(), pool:
        reasons = [reason for part in pool.map(_decoding_errors, spans) for reason in part]
    broken = [index for index, reason in enumerate(reasons) if reason]
    for index in broken:
        log.info("skipped %s: %s", files.name(index), reasons[index])
    if len(broken) == len(files):
        raise UsageError(f"none of {len(files)} images can be decoded, {files.name(0)} for one")
    return broken


def without_broken(
    images: ImageFolder, workers: int, decode: Decode = by_pillow
) -> tuple[ImageFolder, list[str]]:
    """Return the images that can be decoded, and the names of the others.

    Since this is done before the training, each epoch still has every sample exactly once.

    Raises:
        UsageError: no image remains.
    """
    broken = broken_files(images.files, workers, decode)
    good = np.setdiff1d(np.arange(len(images.files)), broken)
    left = replace(images, files=images.files.take(good), labels=images.labels[good])
    return left, [images.files.name(index) for index in broken]
