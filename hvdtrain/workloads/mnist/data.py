"""MNIST from its IDX files, or the digits that scikit-learn brings along.

The IDX format is told at the end of LeCun's MNIST page: two zero bytes, the type (8 = uint8), the
number of dimensions, each dimension as a big-endian 32-bit number, then the values.
"""

from __future__ import annotations

import gzip
import math
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UsageError

SIDE = 28
CLASSES = 10
MEAN, DEVIATION = 0.1307, 0.3081  # of MNIST's training pixels, as fractions
DIGITS_TEST = 297

U8 = NDArray[np.uint8]


@dataclass(frozen=True)
class Samples:
    """Images uint8 of shape (n, 28, 28) and labels int64 of shape (n,)."""

    images: U8
    labels: NDArray[np.int64]


def load(directory: Path | None) -> tuple[Samples, Samples]:
    """Training and test samples from ``directory``; the embedded digits where it is None.

    Raises:
        UsageError: a file is missing, broken, or does not fit its partner.
    """
    if directory is None:
        return embedded_digits()
    if not directory.is_dir():
        raise UsageError(f"--data {directory}: no such directory")
    return _pair(directory, "train"), _pair(directory, "t10k")


def _pair(directory: Path, prefix: str) -> Samples:
    image_file = find(directory, f"{prefix}-images-idx3-ubyte")
    label_file = find(directory, f"{prefix}-labels-idx1-ubyte")
    images, labels = read_idx(image_file), read_idx(label_file)
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
            f"{label_file}: label {labels.max()}, the labels go from 0 to {CLASSES - 1}"
        )
    return Samples(images, labels.astype(np.int64))


def find(directory: Path, name: str) -> Path:
    """The IDX file ``name``, gzipped or not, in ``directory`` or where torchvision puts it.

    Raises:
        UsageError: it is in none of these places.
    """
    folders = (directory, directory / "MNIST" / "raw", directory / "raw")
    dotted = name.replace("-idx", ".idx")  # how some copies are named
    for folder in folders:
        for candidate in (name, f"{name}.gz", dotted, f"{dotted}.gz"):
            if (folder / candidate).is_file():
                return folder / candidate
    raise UsageError(
        f"--data {directory}: {name}[.gz] is neither there nor under MNIST/raw; "
        "leave --data out to train on the embedded digits"
    )


def read_idx(path: Path) -> NDArray[Any]:
    """The array in an IDX file of uint8.

    Raises:
        UsageError: it cannot be read, is not IDX, or is shorter or longer than it says.
    """
    try:
        raw = path.read_bytes()
        data = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
    except (OSError, EOFError, zlib.error) as error:
        raise UsageError(f"{path} cannot be read ({error}): copy it again") from error
    if (
        len(data) < 4
        or data[:3] != b"\x00\x00\x08"
        or not 0 < data[3] < 5
        or len(data) < 4 + 4 * data[3]
    ):
        raise UsageError(f"{path} is not an IDX file of bytes: copy it again")
    start = 4 + 4 * data[3]
    shape = np.frombuffer(data, ">u4", data[3], offset=4).tolist()
    expected = start + math.prod(shape)
    if len(data) != expected:
        raise UsageError(
            f"{path} is broken: its header tells {expected} bytes, it has {len(data)}; "
            "copy it again"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def embedded_digits() -> tuple[Samples, Samples]:
    """scikit-learn's 1,797 handwritten digits of 8x8, resized to 28x28; the last 297 are the test.

    Source: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits" (1998).
    """
    try:
        from PIL import Image
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise UsageError(
            "without --data the digits of scikit-learn are used, and it is not installed; "
            "pip install scikit-learn pillow, or give --data DIR with the MNIST files"
        ) from error
    digits = load_digits()
    small = np.round(digits.images * (255 / 16)).astype(np.uint8)
    large = np.stack(
        [
            np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BICUBIC))
            for image in small
        ]
    )
    labels = digits.target.astype(np.int64)
    cut = len(labels) - DIGITS_TEST
    return Samples(large[:cut], labels[:cut]), Samples(large[cut:], labels[cut:])
