"""The datasets that can be fetched: their public addresses, and how their files are unpacked.

Addresses, sizes and checksums are the publishers'. COCO's publishers have no checksums:
these are the ones on which its users agree, e.g. PaddlePaddle and MLPerf.
"""

from __future__ import annotations

import io
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

Files = Iterator[tuple[str, IO[bytes]]]
"""Names, relative to the dataset's folder, and contents."""


@dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str  # its public address
    size: int  # bytes
    holds: tuple[str, ...]  # files or folders of the dataset's folder that it contains
    md5: str  # MD5 checksum of the published file

    @property
    def name(self) -> str:
        """Return the file name in its address."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class DataSet:
    """A dataset in the layout of its trainer."""

    name: str  # as on the command line
    description: str  # for the help
    trainer: str  # as in ``python -m hvdtrain.TRAINER``, with its options
    remotes: tuple[Remote, ...]  # its files, in the order of downloading
    files: Callable[[IO[bytes]], Files]  # yields the contents of a downloaded file
    growth: float = 1.1  # its size on a disk, relative to that of its archives

    @property
    def size(self) -> int:
        """Return the number of bytes to download."""
        return sum(remote.size for remote in self.remotes)


def unchanged(file: IO[bytes]) -> Files:
    """Yield the downloaded file."""
    yield Path(file.name).name, file


def members(file: IO[bytes]) -> Files:
    """Yield the regular files of an archive, tar or zip; a zip's CRCs are checked."""
    if file.name.endswith(".zip"):
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    with archive.open(info) as stream:
                        yield info.filename, stream
        return
    with tarfile.open(fileobj=file, mode="r|*") as tar:
        for member in tar:
            if member.isfile() and (content := tar.extractfile(member)):
                yield member.name, content


def image_folder(file: IO[bytes]) -> Files:
    """Yield ``train/CLASS/*`` and ``val/CLASS/*`` of an archive with one top-level folder."""
    for name, stream in members(file):
        inner = name.partition("/")[2]
        if re.match(r"(train|val)/[^/]+/[^/]+$", inner):
            yield inner, stream


def coco(file: IO[bytes]) -> Files:
    """Yield the images, and the annotations of object instances."""
    for name, stream in members(file):
        if re.fullmatch(r"(train|val)2017/\d+\.jpg|annotations/instances_\w+\.json", name):
            yield name, stream


CIFAR10_CLASSES = (
    "airplane",
    "automobile",
    "bird",
    "cat",
    "deer",
    "dog",
    "frog",
    "horse",
    "ship",
    "truck",
)
CIFAR10_RECORD = 1 + 3 * 32 * 32  # bytes: the class, then red, green and blue, row by row


def cifar10(file: IO[bytes]) -> Files:
    """Yield each image as PNG, in an image folder; the test images become ``val``."""
    import numpy as np
    from PIL import Image

    for name, stream in members(file):
        match = re.search(r"(data|test)_batch(_\d)?\.bin$", name)
        if match is None:
            continue
        split, part = ("train", match[2]) if match[1] == "data" else ("val", "_0")
        records = np.frombuffer(stream.read(), np.uint8).reshape(-1, CIFAR10_RECORD)
        for number, record in enumerate(records):
            pixels = record[1:].reshape(3, 32, 32).transpose(1, 2, 0)
            png = io.BytesIO()
            Image.fromarray(np.ascontiguousarray(pixels)).save(png, "PNG")
            png.seek(0)
            yield f"{split}/{CIFAR10_CLASSES[record[0]]}/{part[1:]}-{number:05d}.png", png


def idx(base: str, *files: tuple[str, int, str]) -> tuple[Remote, ...]:
    """Return the files of a dataset in MNIST's format, from names, sizes and checksums."""
    return tuple(Remote(base + name, size, (name,), md5) for name, size, md5 in files)


DATA_SETS = (
    DataSet(
        "mnist",
        "70,000 handwritten digits, 28 x 28 pixels",
        "mnist",
        idx(
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            ("train-images-idx3-ubyte.gz", 9_912_422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
            ("train-labels-idx1-ubyte.gz", 28_881, "d53e105ee54ea40749a09fcbcd1e9432"),
            ("t10k-images-idx3-ubyte.gz", 1_648_877, "9fb629c4189551a2d022fa330f9573f3"),
            ("t10k-labels-idx1-ubyte.gz", 4_542, "ec29112dd5afa0611ce80d1b7f02629c"),
        ),
        unchanged,
    ),
    DataSet(
        "fashion-mnist",
        "70,000 images of clothing, in MNIST's format",
        "mnist",
        idx(
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            ("train-images-idx3-ubyte.gz", 26_421_880, "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
            ("train-labels-idx1-ubyte.gz", 29_515, "25c81989df183df01b3e8a0aad5dffbe"),
            ("t10k-images-idx3-ubyte.gz", 4_422_102, "bef4ecab320f06d8554ea6380940ec79"),
            ("t10k-labels-idx1-ubyte.gz", 5_148, "bb300cfdad3c16e7a12a480ee83cd310"),
        ),
        unchanged,
    ),
    DataSet(
        "cifar10",
        "60,000 PNG images of 32 x 32 pixels, 10 classes",
        "resnet --image-size 32",
        (
            Remote(
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                170_052_171,
                ("train", "val"),
                "c32a1d4ab5d03f1284b67883e8d87530",
            ),
        ),
        cifar10,
        growth=1.5,  # small files, each in whole blocks
    ),
    DataSet(
        "imagenette",
        "13,394 images of 320 pixels, 10 classes of ImageNet",
        "resnet",
        (
            Remote(
                "https://s3.amazonaws.com/fast-ai-imageclas/imagenette2-320.tgz",
                341_663_724,
                ("train", "val"),
                "3df6f0d01a2c9592104656642f5e78a3",
            ),
        ),
        image_folder,
    ),
    DataSet(
        "coco",
        "123,287 images (2017) with boxes of 80 classes",
        "ssd300",
        (
            Remote(
                "http://images.cocodataset.org/annotations/annotations_trainval2017.zip",
                252_907_541,
                ("annotations",),
                "f4bbac642086de4f52a3fdda2de5fa2c",
            ),
            Remote(
                "http://images.cocodataset.org/zips/val2017.zip",
                815_585_330,
                ("val2017",),
                "442b8da7639aecaf257c1dceb8ba8c80",
            ),
            Remote(
                "http://images.cocodataset.org/zips/train2017.zip",
                19_336_861_798,
                ("train2017",),
                "cced6f7f71b7629ddf16f17bbcfab6b2",
            ),
        ),
        coco,
    ),
)  # fmt: skip
