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

from hvdtrain.config.declare import optional
from hvdtrain.config.options import TASK_OPTIONS, Options
from hvdtrain.config.values import fraction
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices, seed_of
from hvdtrain.system.files import check_input
from hvdtrain.tasks.dataset import Augment
from hvdtrain.workloads.data.packed import MNIST, Pack, is_packed, wrong_kind

SIDE = 28
CLASSES = 10
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, as fractions
DIGITS_TEST = 297
DIGITS_MEAN, DIGITS_DEVIATION = 0.3091, 0.3477  # of the embedded digits, as fractions

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class MnistOptions(Options):
    """Options of the training on digits."""

    dropout: float | None = optional(
        "dropout probability of all dropout layers; 0: no dropout", fraction, group=TASK_OPTIONS
    )


@dataclass(frozen=True)
class RandomAffine:
    """Random affine augmentation of digits, a function of (seed, epoch, sample).

    The embedded digits are by few writers, those of the test by others: slant, width, position and
    weight of a stroke vary more between them than within the training images. Source: Simard et
    al., "Best Practices for Convolutional Neural Networks Applied to Visual Document Analysis"
    (2003). Each change is drawn uniformly from [-maximum, maximum].
    """

    rotation: float  # radians
    shear: float  # horizontal, as a fraction of the height
    scale: float  # of width and height, independently, as a fraction
    shift: float  # horizontal and vertical, in pixels

    def __call__(self, images: U8, samples: Indices, *, seed: int, epoch: int) -> U8:
        """Return ``images[samples]``, augmented: uint8 of shape (len(samples), height, width).

        The shape of ``images`` is (n, height, width); pixels outside are 0. Each result is
        independent of the others.
        """
        key = seed_of(seed, epoch, 1)  # differs from that of the epoch's order
        drawn = np.random.Generator(np.random.Philox(key=key)).random((len(images), 6))
        return warped(images[samples], self._inverse(2 * drawn - 1)[samples])

    def _inverse(self, drawn: NDArray[np.float64]) -> F32:
        """Return, for each sample, the map from a pixel's position to its source's (centred)."""
        turn, shear = drawn[:, 0] * self.rotation, drawn[:, 1] * self.shear
        wide, high = 1 + drawn[:, 2] * self.scale, 1 + drawn[:, 3] * self.scale
        cos, sin = np.cos(turn), np.sin(turn)
        rows = [
            [wide * cos, wide * (shear * cos - sin), drawn[:, 4] * self.shift],
            [high * sin, high * (shear * sin + cos), drawn[:, 5] * self.shift],
        ]
        return np.moveaxis(np.array(rows, np.float32), 2, 0)


def warped(images: U8, inverse: F32) -> U8:
    """Return images whose pixels are interpolated between the four around their source.

    Args:
        images: uint8 of shape (n, height, width).
        inverse: shape (n, 2, 3): x and y of the source by x, y and 1 of the pixel, from the centre.
    """
    number, height, width = images.shape
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2))).reshape(-1)  # pixels outside are 0
    x = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
    y = np.arange(height, dtype=np.float32) - np.float32((height - 1) / 2)

    def source(row: F32, size: int) -> F32:
        across, down = row[:, :1] * x, row[:, 1:2] * y + row[:, 2:]
        coordinates = down[:, :, None] + across[:, None, :] + np.float32((size - 1) / 2 + 2)
        return np.clip(coordinates, 0.5, size + 2.5, out=coordinates)

    from_x, from_y = source(inverse[:, 0], width), source(inverse[:, 1], height)
    left, top = from_x.astype(np.int32), from_y.astype(np.int32)
    from_x -= left
    from_y -= top
    stride = width + 4
    first = top * stride + left
    first += (np.arange(number, dtype=np.int32) * (stride * (height + 4)))[:, None, None]

    def row_of(offset: int) -> F32:
        left_value = padded.take(first + offset).astype(np.float32)
        return left_value + from_x * (padded.take(first + (offset + 1)) - left_value)

    upper = row_of(0)
    upper += from_y * (row_of(stride) - upper)
    return np.rint(upper).astype(np.uint8)


AUGMENTATION = RandomAffine(rotation=0.25, shear=0.3, scale=0.15, shift=3.0)  # embedded digits


@dataclass(frozen=True)
class Samples:
    """Images with labels."""

    images: U8  # shape (n, 28, 28)
    labels: NDArray[np.int64]  # shape (n,)
    augmentation: RandomAffine | None = None  # of the images in each epoch of a training
    mean: float = MEAN  # of the training pixels, as a fraction
    deviation: float = DEVIATION  # standard deviation, likewise

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
    check_input(directory, f"--data {directory}")
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
MAX_BYTES = 2**31  # bytes of an array


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
    except (EOFError, ValueError, zlib.error, gzip.BadGzipFile) as error:
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
    if expected > MAX_BYTES:
        raise UsageError(
            f"{path}: its header specifies {expected:,} bytes, more than any data set of digits: "
            "copy it again"
        )
    data = stream.read(expected + 1) if expected <= most else b""
    if len(data) != expected:
        start = len(head + sizes)
        held = "more" if len(data) > expected else "less"
        raise UsageError(
            f"{path} is broken: its header specifies {start + expected} bytes, it has {held}; "
            "copy it again"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)
