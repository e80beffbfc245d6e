"""How fast the images of a folder are read here: per core, stage by stage, on a sample of them.

It goes through the reader and the crop that a ResNet's training with PyTorch has, in this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.errors import UsageError
from hvdtrain.system.machine.frameworks import find_module
from hvdtrain.system.output.tables import message, table
from hvdtrain.system.output.text import percent, plural, printable, size
from hvdtrain.system.runtime import terminal
from hvdtrain.training.plan import choose_workers
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.files import Files
from hvdtrain.workloads.data.image_folder import ImageFolder
from hvdtrain.workloads.data.packed import IMAGES, Pack, is_packed
from hvdtrain.workloads.mnist import data as mnist

SAMPLE = 256  # images, drawn evenly over the training set
SECONDS = 10.0  # at most for them
SIDE = 224  # of the crops, pixels
BATCH = 32
LARGE = 700  # pixels of the shorter side, in the mean, from which on smaller copies pay
SMALLER = 512  # pixels: that of such copies; a crop of all of it is still decoded at a half
SLOW_STORAGE = 0.5  # of the time of an image that is in no cache
# Stages of a worker, in order; besides, what is read from storage, and what the rank itself does.
READING, DECODING, CROP, COPY = "reading, cached", "decoding", "crop and resize", "into the batch"
STORAGE, NORMALISING = "reading, from storage", "normalising"
WORKER = (READING, DECODING, CROP, COPY)


@dataclass(frozen=True)
class Measured:
    """What a sample of the images has shown.

    Attributes:
        directory: the data set.
        images: how many there are to train on.
        classes: how many classes they have.
        sampled: how many were looked at.
        broken: those that cannot be decoded, and why.
        width, height: in the mean over the others, pixels.
        size: in the mean, bytes.
        seconds: per image on one core, by stage.
    """

    directory: Path
    images: int
    classes: int
    sampled: int
    broken: tuple[str, ...]
    width: float
    height: float
    size: float
    seconds: dict[str, float]

    @property
    def rate(self) -> float:
        """Images/s that one worker reads on a core of its own, when they are in the page cache."""
        return 1 / sum(self.seconds[stage] for stage in WORKER)

    def as_dict(self) -> dict[str, Any]:
        """Return it for ``--json``."""
        return {
            "directory": str(self.directory),
            "images": self.images,
            "classes": self.classes,
            "sampled": self.sampled,
            "broken": len(self.broken),
            "mean_width": self.width,
            "mean_height": self.height,
            "mean_bytes": self.size,
            "seconds_per_image": self.seconds,
            "images_per_second_per_core": self.rate if self.seconds else None,
        }


def find(directory: Path) -> ImageFolder | Finding:
    """Return the images to train on, or what can be said of another kind of data.

    Raises:
        UsageError: there is no data in ``directory``.
    """
    if not directory.is_dir():
        raise UsageError(f"--data {directory}: no such directory")
    if is_packed(directory) and (kind := Pack(directory).contents.kind) != IMAGES:
        told = f"{directory} holds packed {kind}; how fast it is read is not measured"
        return Finding("data", ABSENT, told, "give an image folder, or what is packed of one")
    if (directory / "train").is_dir() or is_packed(directory):
        return image_folder.load(directory)[0]
    if any(directory.glob("annotations/instances_*.json")):
        told = f"{directory} is in COCO's layout; how fast it is read is not measured"
        return Finding("data", ABSENT, told, "give an image folder: train/CLASS/*.jpg")
    try:
        mnist.find(directory, "train-images-idx3-ubyte")
    except UsageError:
        return image_folder.load(directory)[0]  # which tells what there should be
    start = time.perf_counter()
    train, test = mnist.load(directory)
    return Finding(
        "data",
        OK,
        f"MNIST: {plural(len(train.labels), 'image')} to train on, {len(test.labels):,} to "
        f"evaluate; read once, in {time.perf_counter() - start:.1f} s, and kept in memory: "
        "--workers has nothing to do",
    )


def measure(directory: Path, images: ImageFolder) -> Measured | Finding:
    """Read, decode and crop a sample of ``images``; a few seconds, with progress."""
    missing = [name for name in ("torch", "torchvision") if not find_module(name)]
    if missing:
        told = f"{plural(len(images.files), 'image')}; {' and '.join(missing)} not installed"
        remedy = "pip install 'hvdtrain[pytorch]': images are read as its loader does"
        return Finding("data", ABSENT, told, remedy)
    count = len(images.files)
    sample = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int))
    order = np.random.default_rng(0).permutation(sample)  # even, wherever the time is up
    with terminal.working("importing PyTorch, then reading images for a few seconds"):
        stages = _Stages(images)
        stages.look(int(order[0]))  # what is done for the first time
        stages.forget()
        start = time.monotonic()
        for done, index in enumerate(order):
            if time.monotonic() - start > SECONDS:
                break
            terminal.status(f"reading and decoding images: {done} of at most {len(order)}")
            stages.look(int(index))
    good = len(stages.sizes)
    seconds = {name: spent / good for name, spent in stages.spent.items()} if good else {}
    for name, spent in stages.of_a_batch().items() if good else ():
        seconds[name] = seconds.get(name, 0.0) + spent
    width, height, stored = np.mean(stages.sizes, axis=0).tolist() if good else (0.0, 0.0, 0.0)
    return Measured(
        directory,
        count,
        len(images.classes),
        good + len(stages.broken),
        tuple(stages.broken),
        width,
        height,
        stored,
        seconds,
    )


class _Stages:
    """Takes images through the stages of a training's input, and times each."""

    def __init__(self, images: ImageFolder) -> None:
        import torch
        from PIL import Image

        from hvdtrain.workloads.data.torch_loader import told
        from hvdtrain.workloads.resnet.pytorch import random_crop

        torch.set_num_threads(1)
        self.images, self.torch = images, torch
        self._open, self._crop, self._told = Image.open, random_crop, told
        self._batch = np.zeros((BATCH, SIDE, SIDE, 3), np.uint8)
        self.forget()

    def forget(self) -> None:
        """Begin anew."""
        self.spent = dict.fromkeys((*WORKER, STORAGE), 0.0)  # seconds
        self.sizes: list[tuple[int, int, int]] = []  # width, height, bytes
        self.broken: list[str] = []

    def look(self, index: int) -> None:
        """Read one image and make a crop of it."""
        files = self.images.files
        try:
            with self._told(files.name(index)):
                files.forget(index)
                from_storage, _ = _timed_read(files, index)
                reading, bytes_read = _timed_read(files, index)
                file = files.open(index)
                start = time.perf_counter()
                image = self._open(file)
            with file:
                whole, load, decoding = image.size, image.load, 0.0

                def timed_load() -> Any:  # the crop calls it when it knows what it needs
                    nonlocal decoding
                    begin = time.perf_counter()
                    pixels = load()
                    decoding += time.perf_counter() - begin
                    return pixels

                image.load = timed_load  # type: ignore[method-assign]
                crop = self._crop(image, SIDE)
                cropped = time.perf_counter()
                self._batch[len(self.sizes) % BATCH] = np.asarray(crop)
                copied = time.perf_counter()
        except UsageError as error:
            self.broken.append(str(error).rpartition(": ")[0])  # the remedy is that of all
            return
        self.spent[STORAGE] += from_storage
        self.spent[READING] += reading
        self.spent[DECODING] += decoding
        self.spent[CROP] += cropped - start - decoding
        self.spent[COPY] += copied - cropped
        self.sizes.append((*whole, bytes_read))

    def of_a_batch(self) -> dict[str, float]:
        """Return the seconds per image of what is done to a whole batch, by stage."""
        from hvdtrain.workloads.torch_task import network_input

        pixels = self.torch.from_numpy(self._batch).permute(0, 3, 1, 2)
        scale = (self.torch.full((3, 1, 1), 0.02), self.torch.full((3, 1, 1), -2.0))
        return {
            COPY: _median(lambda: self.torch.from_numpy(self._batch).share_memory_()) / BATCH,
            NORMALISING: _median(lambda: network_input(pixels, self.torch.float32, scale)) / BATCH,
        }


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def _timed_read(files: Files, index: int) -> tuple[float, int]:
    """Return the seconds that reading a file takes, and how many bytes it has."""
    start = time.perf_counter()
    with files.open(index) as file:
        found = len(file.read())
    return time.perf_counter() - start, found


def data_findings(found: Measured, *, cores: int, gpu: bool) -> Iterator[Finding]:
    """Judge what was measured.

    Args:
        found: by ``measure``.
        cores: that a rank of this host has.
        gpu: whether it computes on one.
    """
    told = f"{plural(found.images, 'image')} to train on, classes: {found.classes}"
    if not found.seconds:
        why = f"{told}; none of {found.sampled} can be read: {printable(found.broken[0])}"
        yield Finding("data", ERROR, why, "repair the files, or copy the data again")
        return
    pixels = f"{found.width:.0f} x {found.height:.0f} pixels"
    yield Finding(
        "data", OK, f"{told}; in the mean of {found.sampled}: {pixels}, {size(found.size)}"
    )
    yield _broken(found)
    yield _speed(found, cores, gpu)


def _broken(found: Measured) -> Finding:
    if not found.broken:
        return Finding("broken images", OK, f"none of {plural(found.sampled, 'image')} looked at")
    share = percent(len(found.broken) / found.sampled)
    told = f"{len(found.broken)} of {found.sampled} ({share}): {printable(found.broken[0])}"
    remedy = "repair or remove them, or train with --skip-broken: otherwise the run ends there"
    return Finding("broken images", WARNING, told, remedy)


def _speed(found: Measured, cores: int, gpu: bool) -> Finding:
    workers = choose_workers(None, gpu=gpu, cores=cores)
    device = f"a GPU and {plural(cores, 'core')}" if gpu else plural(cores, "core")
    told = (
        f"{found.rate:,.0f} images/s per core; a rank with {device} has --workers {workers} by "
        f"default, for {workers * found.rate:,.0f} images/s at most"
    )
    cold = found.seconds[STORAGE]
    if cold > SLOW_STORAGE * (cold + sum(found.seconds[stage] for stage in WORKER[1:])):
        remedy = (
            "most of the time goes into reading what is not cached: `hvdtrain pack DIR OUT` makes "
            "few large files of the many, or copy the data to a local disk"
        )
        return Finding("reading images", WARNING, told, remedy)
    if min(found.width, found.height) >= LARGE:
        remedy = (
            f"`hvdtrain pack DIR OUT --resize {SMALLER}` makes smaller copies, which are read "
            f"faster; crops of {SIDE} pixels need no more"
        )
        return Finding("reading images", WARNING, told, remedy)
    return Finding("reading images", OK, told)


def data_text(found: Measured) -> str:
    """Return a row per stage: time of an image, share of a worker's time, images/s."""
    rows = [
        [
            name,
            f"{1e3 * seconds:.2f}",
            percent(seconds * found.rate) if name in WORKER else "",
            f"{1 / seconds:,.0f}",
        ]
        for name, seconds in _rows(found)
    ]
    title = f"an image of {found.directory} on one core, as PyTorch's loader reads it:"
    return f"{message(title)}\n{table(['stage', 'ms', 'share', 'images/s per core'], rows)}"


def _rows(found: Measured) -> Sequence[tuple[str, float]]:
    return [
        *((stage, found.seconds[stage]) for stage in WORKER),
        ("a worker, in all", 1 / found.rate),
        (f"{STORAGE} (instead of cached)", found.seconds[STORAGE]),
        (f"{NORMALISING} (in the rank)", found.seconds[NORMALISING]),
    ]
