"""Speed of reading the images of a folder: per core and stage, measured on a sample.

The sample passes through the reader and the crop of a ResNet training with PyTorch, in this
process.
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

SAMPLE = 256  # images, drawn evenly from the training set
SECONDS = 10.0  # time limit for them
SIDE = 224  # of the crops, pixels
BATCH = 32
LARGE = 700  # mean pixels of the shorter side above which smaller copies are worthwhile
SMALLER = 512  # pixels of the shorter side of such copies
SLOW_STORAGE = 0.5  # share of the time of an uncached image above which storage is slow
# Stages of a worker, in order; in addition, reading from storage, and the work of the rank.
READING, DECODING, CROP, COPY = "reading, cached", "decoding", "crop and resize", "into the batch"
STORAGE, NORMALISING = "reading, from storage", "normalising"
WORKER = (READING, DECODING, CROP, COPY)


@dataclass(frozen=True)
class Measured:
    """Measurements on a sample of the images.

    Attributes:
        directory: the dataset.
        images: number of training images.
        classes: number of classes.
        sampled: number of images in the sample.
        broken: error messages of images that cannot be decoded.
        width, height: mean over the other images, pixels.
        size: mean, bytes.
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
        """Return the images/s that a worker reads on one core if they are in the page cache."""
        return 1 / sum(self.seconds[stage] for stage in WORKER)

    def as_dict(self) -> dict[str, Any]:
        """Return the measurements for ``--json``."""
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
    """Return the training images, or a finding on data of another kind.

    Raises:
        UsageError: there is no data in ``directory``.
    """
    if not directory.is_dir():
        raise UsageError(f"--data {directory}: no such directory")
    if is_packed(directory) and (kind := Pack(directory).contents.kind) != IMAGES:
        evidence = f"{directory} contains packed {kind}; their reading speed is not measured"
        return Finding("data", ABSENT, evidence, "specify an image folder, plain or packed")
    if (directory / "train").is_dir() or is_packed(directory):
        return image_folder.load(directory)[0]
    if any(directory.glob("annotations/instances_*.json")):
        evidence = f"{directory} has COCO's layout; its reading speed is not measured"
        return Finding("data", ABSENT, evidence, "specify an image folder: train/CLASS/*.jpg")
    try:
        mnist.find(directory, "train-images-idx3-ubyte")
    except UsageError:
        return image_folder.load(directory)[0]  # raises an error on what is missing
    start = time.perf_counter()
    train, test = mnist.load(directory)
    return Finding(
        "data",
        OK,
        f"MNIST: {plural(len(train.labels), 'training image')}, {len(test.labels):,} for "
        f"evaluation; read once, in {time.perf_counter() - start:.1f} s, and kept in memory: "
        "--workers has no effect",
    )


def measure(directory: Path, images: ImageFolder) -> Measured | Finding:
    """Read, decode and crop a sample of ``images``; a few seconds, with progress."""
    missing = [name for name in ("torch", "torchvision") if not find_module(name)]
    if missing:
        evidence = f"{plural(len(images.files), 'image')}; {' and '.join(missing)} not installed"
        remedy = "pip install 'hvdtrain[pytorch]': its loader is used for the measurement"
        return Finding("data", ABSENT, evidence, remedy)
    count = len(images.files)
    sample = np.unique(np.linspace(0, count - 1, min(count, SAMPLE)).astype(int))
    order = np.random.default_rng(0).permutation(sample)  # even at any time limit
    with terminal.working("importing PyTorch, then reading images for a few seconds"):
        stages = _Stages(images)
        stages.process(int(order[0]))  # warm-up
        stages.reset()
        start = time.monotonic()
        for done, index in enumerate(order):
            if time.monotonic() - start > SECONDS:
                break
            terminal.status(f"reading and decoding images: {done} of at most {len(order)}")
            stages.process(int(index))
    good = len(stages.sizes)
    seconds = {name: spent / good for name, spent in stages.spent.items()} if good else {}
    for name, spent in stages.batch_seconds().items() if good else ():
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
    """Passes images through the input stages of a training, and times each."""

    def __init__(self, images: ImageFolder) -> None:
        import torch
        from PIL import Image

        from hvdtrain.workloads.data.torch_loader import decoding_errors
        from hvdtrain.workloads.resnet.pytorch import random_crop

        torch.set_num_threads(1)
        self.images, self.torch = images, torch
        self._open, self._crop, self._named_errors = Image.open, random_crop, decoding_errors
        self._batch = np.zeros((BATCH, SIDE, SIDE, 3), np.uint8)
        self.reset()

    def reset(self) -> None:
        """Discard all measurements."""
        self.spent = dict.fromkeys((*WORKER, STORAGE), 0.0)  # seconds
        self.sizes: list[tuple[int, int, int]] = []  # width, height, bytes
        self.broken: list[str] = []

    def process(self, index: int) -> None:
        """Read and crop one image."""
        files = self.images.files
        try:
            with self._named_errors(files.name(index)):
                files.forget(index)
                from_storage, _ = _timed_read(files, index)
                reading, bytes_read = _timed_read(files, index)
                file = files.open(index)
                start = time.perf_counter()
                image = self._open(file)
            with file:
                dimensions, load, decoding = image.size, image.load, 0.0

                def timed_load() -> Any:  # called by the crop after it has chosen a scale
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
            self.broken.append(str(error).rpartition(": ")[0])  # without the remedy
            return
        self.spent[STORAGE] += from_storage
        self.spent[READING] += reading
        self.spent[DECODING] += decoding
        self.spent[CROP] += cropped - start - decoding
        self.spent[COPY] += copied - cropped
        self.sizes.append((*dimensions, bytes_read))

    def batch_seconds(self) -> dict[str, float]:
        """Return the seconds per image of operations on a whole batch, by stage."""
        from hvdtrain.tasks.pytorch import network_input

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
    """Return the seconds to read a file, and its size in bytes."""
    start = time.perf_counter()
    with files.open(index) as file:
        count = len(file.read())
    return time.perf_counter() - start, count


def data_findings(measured: Measured, *, cores: int, gpu: bool) -> Iterator[Finding]:
    """Judge the measurements.

    Args:
        measured: the result of ``measure``.
        cores: number of cores of a rank of this host.
        gpu: whether the rank computes on a GPU.
    """
    count = f"{plural(measured.images, 'training image')}, classes: {measured.classes}"
    if not measured.seconds:
        broken = printable(measured.broken[0])
        evidence = f"{count}; none of {measured.sampled} can be read: {broken}"
        yield Finding("data", ERROR, evidence, "repair the files, or copy the data again")
        return
    mean = f"{measured.width:.0f} x {measured.height:.0f} pixels, {size(measured.size)}"
    yield Finding("data", OK, f"{count}; mean of {measured.sampled}: {mean}")
    yield _broken(measured)
    yield _speed(measured, cores, gpu)


def _broken(measured: Measured) -> Finding:
    if not measured.broken:
        return Finding("broken images", OK, f"none of {plural(measured.sampled, 'image')}")
    share = percent(len(measured.broken) / measured.sampled)
    count = f"{len(measured.broken)} of {measured.sampled} ({share})"
    evidence = f"{count}: {printable(measured.broken[0])}"
    remedy = "repair or remove them, or train with --skip-broken: otherwise the run fails on them"
    return Finding("broken images", WARNING, evidence, remedy)


def _speed(measured: Measured, cores: int, gpu: bool) -> Finding:
    workers = choose_workers(None, gpu=gpu, cores=cores)
    device = f"a GPU and {plural(cores, 'core')}" if gpu else plural(cores, "core")
    evidence = (
        f"{measured.rate:,.0f} images/s per core; a rank with {device} has --workers {workers} by "
        f"default, for {workers * measured.rate:,.0f} images/s at most"
    )
    cold = measured.seconds[STORAGE]
    if cold > SLOW_STORAGE * (cold + sum(measured.seconds[stage] for stage in WORKER[1:])):
        remedy = (
            "reading uncached files takes most of the time: pack them into a few large files "
            "(`hvdtrain pack DIR OUT`), or copy the data to a local disk"
        )
        return Finding("reading images", WARNING, evidence, remedy)
    if min(measured.width, measured.height) >= LARGE:
        remedy = (
            f"`hvdtrain pack DIR OUT --resize {SMALLER}` creates smaller copies, which are faster "
            f"to read and sufficient for crops of {SIDE} pixels"
        )
        return Finding("reading images", WARNING, evidence, remedy)
    return Finding("reading images", OK, evidence)


def data_text(measured: Measured) -> str:
    """Return a row per stage: time of an image, share of a worker's time, images/s."""
    rows = [
        [
            name,
            f"{1e3 * seconds:.2f}",
            percent(seconds * measured.rate) if name in WORKER else "",
            f"{1 / seconds:,.0f}",
        ]
        for name, seconds in _rows(measured)
    ]
    title = f"an image of {measured.directory} on one core, read by PyTorch's loader:"
    return f"{message(title)}\n{table(['stage', 'ms', 'share', 'images/s per core'], rows)}"


def _rows(measured: Measured) -> Sequence[tuple[str, float]]:
    return [
        *((stage, measured.seconds[stage]) for stage in WORKER),
        ("a worker, total", 1 / measured.rate),
        (f"{STORAGE} (instead of cached)", measured.seconds[STORAGE]),
        (f"{NORMALISING} (in the rank)", measured.seconds[NORMALISING]),
    ]
