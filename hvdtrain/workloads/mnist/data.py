"""MNIST from its IDX files, or the digits included in the package.

IDX, gzipped or not: two zero bytes, the type (8 = uint8), the number of dimensions, each dimension
as a big-endian 32-bit number, then the values. Source: LeCun's MNIST page.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.config.declare import option
from hvdtrain.config.options import TASK_OPTIONS, Options
from hvdtrain.config.values import fraction
from hvdtrain.errors import UsageError
from hvdtrain.tasks.dataset import Augment
from hvdtrain.workloads.data.packed import MNIST, Pack, is_packed, wrong_kind
from hvdtrain.workloads.mnist.random_affine import RandomAffine

SIDE = 28
CLASSES = 10
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, as fractions
DIGITS_TEST = 297
DIGITS_MEAN, DIGITS_DEVIATION = 0.3091, 0.3477  # of the embedded digits, as fractions
# For the embedded digits, of which those of the test are by other writers.
AUGMENTATION = RandomAffine(rotation=0.25, shear=0.3, scale=0.15, shift=3.0)

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class MnistOptions(Options):
    """Options of the training on digits."""

    dropout: float | None = option(
        None,
        "dropout probability of all dropout layers; 0: no dropout",
        fraction,
        group=TASK_OPTIONS,
    )


@dataclass(frozen=True)
class Samples:
    """Images uint8 of shape (n, 28, 28) and labels int64 of shape (n,).

    Attributes:
        augmentation: augmentation of the images in each epoch of a training; None: none.
        mean: mean of the training pixels, as a fraction.
        deviation: standard deviation of the training pixels, as a fraction.
    """

    images: U8
    labels: NDArray[np.int64]
    augmentation: RandomAffine | None = None
    mean: float = MEAN
    deviation: float = DEVIATION

    @property
    def scale(self) -> tuple[float, float]:
        """Factor and offset that normalize pixels to mean 0 and standard deviation 1."""
        return 1 / (255 * self.deviation), -self.mean / self.deviation

    def augment(self, seed: int, channel: int) -> Augment | None:
        """Return a function that augments the images of a part, with a channel axis ``channel``."""
        change = self.augmentation
        if change is None:
            return None
        return lambda part: np.expand_dims(
            change(self.images, part.indices, seed=seed, epoch=part.start.epoch), channel
        )


def load(directory: Path | None) -> tuple[Samples, Samples]:
    """Read training and test samples from ``directory``; None: the embedded digits.

    Raises:
        UsageError: a file is missing or broken, or images and labels do not match.
    """
    if directory is None:
        return embedded_digits()
    if not directory.is_dir():
        raise UsageError(f"--data {directory}: no such directory")
    return _pair(directory, "train"), _pair(directory, "t10k")


def _pair(directory: Path, prefix: str) -> Samples:
    image_file, images = _read(directory, f"{prefix}-images-idx3-ubyte")
    label_file, labels = _read(directory, f"{prefix}-labels-idx1-ubyte")
    if images.shape[1:] != (SIDE, SIDE):
        raise UsageError(f"{image_file} holds {images.shape}, not images of {SIDE}x{SIDE} pixels")
    if labels.ndim != 1 or len(images) != len(labels):
        raise UsageError(
            f"{image_file} holds {len(images)} images, {label_file} {len(labels)} labels: "
            "they are not of the same dataset"
        )
    if len(labels) == 0:
        raise UsageError(f"{image_file} holds no image")
    if labels.max() >= CLASSES:
        raise UsageError(
            f"{label_file}: label {labels.max()}, labels must be from 0 to {CLASSES - 1}"
        )
    return Samples(images, labels.astype(np.int64))


def _read(directory: Path, name: str) -> tuple[str, NDArray[Any]]:
    """Return the location of the IDX file ``name``, for messages, and its array."""
    if not is_packed(directory):
        path = find(directory, name)
        return str(path), read_idx(path)
    pack = Pack(directory)
    held = pack.contents.files
    file = next((spelling for spelling in spellings(name) if spelling in held), None)
    if pack.contents.kind != MNIST or file is None:
        raise wrong_kind(directory, pack.contents.kind, MNIST)
    label = f"{directory / pack.contents.shards[held[file].shard].name}: {file}"
    return label, _idx(io.BytesIO(pack.read(held[file])), label)


def embedded_digits() -> tuple[Samples, Samples]:
    """Return 1,797 digits of 8x8, resized to 28x28; the last 297 are the test.

    Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (1998); its licence is
    in ``digits.LICENSE``. They are those of scikit-learn's ``load_digits``.
    """
    from PIL import Image

    with gzip.open(Path(__file__).with_name("digits.csv.gz"), "rt") as lines:
        digits = np.loadtxt(lines, delimiter=",", dtype=np.int64)
    small = np.round(digits[:, :-1].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    large = np.stack(
        [
            np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
            for image in small
        ]
    )
    labels = digits[:, -1].copy()
    cut = len(labels) - DIGITS_TEST
    whole = Samples(large, labels, mean=DIGITS_MEAN, deviation=DIGITS_DEVIATION)
    train = dataclasses.replace(
        whole, images=large[:cut], labels=labels[:cut], augmentation=AUGMENTATION
    )
    return train, dataclasses.replace(whole, images=large[cut:], labels=labels[cut:])


DEFLATE = 1032  # maximum compression ratio of gzip


def spellings(name: str) -> list[str]:
    """Return possible names of the IDX file ``name``: gzipped or not, dotted in some copies."""
    dotted = name.replace("-idx", ".idx")
    return [name, f"{name}.gz", dotted, f"{dotted}.gz"]


def find(directory: Path, name: str) -> Path:
    """Find the IDX file ``name``, gzipped or not, in ``directory`` or torchvision's subfolders.

    Raises:
        UsageError: the file is in none of them.
    """
    folders = (directory, directory / "MNIST" / "raw", directory / "raw")
    for folder in folders:
        for candidate in spellings(name):
            if (folder / candidate).is_file():
                return folder / candidate
    raise UsageError(
        f"--data {directory}: {name}[.gz] is neither there nor under MNIST/raw; "
        "omit --data to train on the embedded digits"
    )


def read_idx(path: Path) -> NDArray[Any]:
    """Read the array in an IDX file of uint8.

    Raises:
        UsageError: it cannot be read, is not IDX, or its length does not match its header.
    """
    try:
        with path.open("rb") as file:
            return _idx(file, str(path))
    except OSError as error:
        raise UsageError(f"{path} cannot be read ({error}): copy it again") from error


def _idx(file: IO[bytes], name: str) -> NDArray[Any]:
    """Read the array in ``file``; ``name``: for messages."""
    try:
        gzipped = file.read(2) == b"\x1f\x8b"
        most = file.seek(0, io.SEEK_END) * (DEFLATE if gzipped else 1)
        file.seek(0)
        return _array(gzip.GzipFile(fileobj=file) if gzipped else file, name, most)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"{name} cannot be read ({error}): copy it again") from error


def _array(stream: IO[bytes] | gzip.GzipFile, path: str, most: int) -> NDArray[Any]:
    """Read the array in ``stream``, of at most ``most`` bytes, and no further.

    A small gzipped file may inflate to more than the available memory.
    """
    head = stream.read(4)
    dimensions = head[3] if head[:3] == b"\x00\x00\x08" and len(head) == 4 else 0
    sizes = stream.read(4 * dimensions)
    if not 0 < dimensions < 5 or len(sizes) < 4 * dimensions:
        raise UsageError(f"{path} is not an IDX file of bytes: copy it again")
    shape = np.frombuffer(sizes, ">u4").tolist()
    expected = math.prod(shape)
    data = stream.read(expected + 1) if expected <= most else b""
    if len(data) != expected:
        start = len(head + sizes)
        held = "more" if len(data) > expected else "less"
        raise UsageError(
            f"{path} is broken: its header specifies {start + expected} bytes, it has {held}; "
            "copy it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)
