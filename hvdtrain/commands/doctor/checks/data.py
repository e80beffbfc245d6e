"""Speed of reading the images of a folder: per core and stage, measured on a sample.

The sample passes through the loader of a ResNet training with PyTorch, in this process.
"""

from __future__ import annotations

import copy
import io
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, Finding, warning_if
from hvdtrain.errors import UsageError
from hvdtrain.system.files import check_input
from hvdtrain.system.machine.frameworks import find_module
from hvdtrain.system.output.tables import message, table
from hvdtrain.system.output.text import percent, plural, printable, size
from hvdtrain.system.runtime import terminal
from hvdtrain.training.plan import choose_workers
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.image_folder import ImageFolder
from hvdtrain.workloads.data.packed import IMAGES, Pack, is_packed
from hvdtrain.workloads.mnist import data as mnist

if TYPE_CHECKING:
    from PIL import Image

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
    """Measurements on a sample of the images."""

    directory: Path
    images: int  # number of training images
    classes: int  # number of classes
    sampled: int  # number of images in the sample
    broken: tuple[str, ...]  # error messages of images that cannot be decoded
    width: float  # mean over the other images, pixels
    height: float
    size: float  # mean, bytes
    seconds: dict[str, float]  # per image on one core, by stage

    @property
    def rate(self) -> float:
        """Return the images/s that a worker reads on one core if they are in the page cache."""
        return 1 / sum(self.seconds[stage] for stage in WORKER)

    def as_dict(self) -> dict[str, object]:
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
    check_input(directory, f"--data {directory}")
    form = ""
    if is_packed(directory):
        kind = Pack(directory).contents.kind
        form = "" if kind == IMAGES else f"packed {kind}"
    elif not (directory / "train").is_dir() and any(directory.glob("annotations/instances_*.json")):
        form = "COCO's layout"
    if form:
        evidence = f"{directory} has {form}; its reading speed is not measured"
        return Finding("data", ABSENT, evidence, "specify an image folder: train/CLASS/*.jpg")
    if (directory / "train").is_dir() or is_packed(directory):
        return image_folder.load(directory)[0]
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
        _Probe(images).measure(int(order[0]))  # warm-up
        probe, start = _Probe(images), time.monotonic()
        for done, index in enumerate(order):
            if time.monotonic() - start > SECONDS:
                break
            terminal.status(f"reading and decoding images: {done} of at most {len(order)}")
            probe.measure(int(index))
    good = len(probe.sizes)
    width, height, stored = np.mean(probe.sizes, axis=0).tolist() if good else (0.0, 0.0, 0.0)
    return Measured(
        directory=directory,
        images=count,
        classes=len(images.classes),
        sampled=good + len(probe.broken),
        broken=tuple(probe.broken),
        width=width,
        height=height,
        size=stored,
        seconds=probe.seconds() if good else {},
    )


class _Probe:
    """The training's loader, with a clock in its files and its crop."""

    def __init__(self, images: ImageFolder) -> None:
        import torch

        from hvdtrain.workloads.data.torch_images import Images

        torch.set_num_threads(1)
        self.files = images.files
        timed = copy.copy(images.files)
        timed.open = self._open  # type: ignore[method-assign]
        self._reader = Images(replace(images, files=timed), self._crop, SIDE, seed=0)
        self._image: dict[str, float] = {}  # seconds of the current image, by stage
        self._size = (0, 0, 0)
        self.spent: Counter[str] = Counter()
        self.sizes: list[tuple[int, int, int]] = []  # width, height, bytes
        self.broken: list[str] = []

    def measure(self, index: int) -> None:
        """Read one image from storage, then pass it through the loader."""
        from hvdtrain.workloads.data.torch_images import decoding_errors

        try:
            with decoding_errors(self.files.name(index)):
                self.files.forget(index)
                start = time.perf_counter()
                with self.files.open(index) as file:
                    file.read()
                from_storage = time.perf_counter() - start
            start = time.perf_counter()
            self._reader.batch([index], epoch=0)
            seconds = time.perf_counter() - start
        except UsageError as error:
            self.broken.append(str(error).rpartition(": ")[0])  # without the remedy
            return
        rest = seconds - sum(self._image.values())
        self.spent.update({**self._image, COPY: rest, STORAGE: from_storage})
        self.sizes.append(self._size)

    def _open(self, index: int) -> IO[bytes]:
        """Read the file as a whole: the decoder must not wait for it."""
        start = time.perf_counter()
        with self.files.open(index) as file:
            content = file.read()
        self._image = {READING: time.perf_counter() - start}
        self._size = (0, 0, len(content))
        return io.BytesIO(content)

    def _crop(self, image: Image.Image, size: int) -> Image.Image:
        from hvdtrain.workloads.resnet.pytorch import random_crop

        load, decoding = image.load, 0.0

        def timed_load() -> Any:  # called by the crop after it has chosen a scale
            nonlocal decoding
            begin = time.perf_counter()
            pixels = load()
            decoding += time.perf_counter() - begin
            return pixels

        self._size = (*image.size, self._size[2])
        image.load = timed_load  # type: ignore[method-assign]
        start = time.perf_counter()
        crop = random_crop(image, size)
        cropping = time.perf_counter() - start - decoding
        self._image |= {DECODING: decoding, CROP: cropping}
        return crop

    def seconds(self) -> dict[str, float]:
        """Return the seconds per image by stage, with its share of the work on a whole batch."""
        import torch

        from hvdtrain.tasks.training_step_pytorch import network_input

        batch = np.zeros((BATCH, SIDE, SIDE, 3), np.uint8)
        pixels = torch.from_numpy(batch).permute(0, 3, 1, 2)
        scale = (torch.full((3, 1, 1), 0.02), torch.full((3, 1, 1), -2.0))
        sharing = _median(lambda: torch.from_numpy(batch).share_memory_())
        layout = torch.channels_last
        normalising = _median(lambda: network_input(pixels, torch.float32, scale, layout))
        seconds = {stage: spent / len(self.sizes) for stage, spent in self.spent.items()}
        seconds[COPY] += sharing / BATCH
        return {**seconds, NORMALISING: normalising / BATCH}


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(5):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def data_findings(measured: Measured, *, cores: int, gpu: bool) -> Iterator[Finding]:
    """Judge the measurements for a rank with ``cores`` cores, and maybe a GPU."""
    count = f"{plural(measured.images, 'training image')}, classes: {measured.classes}"
    if not measured.seconds:
        broken = printable(measured.broken[0])
        evidence = f"{count}; none of {measured.sampled} can be read: {broken}"
        yield Finding("data", ERROR, evidence, "repair the files, or copy the data again")
        return
    mean = f"{measured.width:.0f} x {measured.height:.0f} pixels, {size(measured.size)}"
    yield Finding("data", OK, f"{count}; mean of {measured.sampled}: {mean}")
    evidence, remedy = f"none of {plural(measured.sampled, 'image')}", ""
    if measured.broken:
        bad, first = len(measured.broken), printable(measured.broken[0])
        evidence = f"{bad} of {measured.sampled} ({percent(bad / measured.sampled)}): {first}"
        remedy = (
            "repair or remove them, or train with --skip-broken: otherwise the run fails on them"
        )
    yield warning_if(remedy, "broken images", evidence)
    yield _speed(measured, cores, gpu)


def _speed(measured: Measured, cores: int, gpu: bool) -> Finding:
    workers = choose_workers(None, gpu=gpu, cores=cores)
    device = f"a GPU and {plural(cores, 'core')}" if gpu else plural(cores, "core")
    evidence = (
        f"{measured.rate:,.0f} images/s per core; a rank with {device} has --workers {workers} by "
        f"default, for {workers * measured.rate:,.0f} images/s at most"
    )
    cold, warm = measured.seconds[STORAGE], sum(measured.seconds[stage] for stage in WORKER[1:])
    remedy = ""
    if cold > SLOW_STORAGE * (cold + warm):
        remedy = (
            "reading uncached files takes most of the time: pack them into a few large files "
            "(`hvdtrain pack DIR OUT`), or copy the data to a local disk"
        )
    elif min(measured.width, measured.height) >= LARGE:
        remedy = (
            f"`hvdtrain pack DIR OUT --resize {SMALLER}` creates smaller copies, which are faster "
            f"to read and sufficient for crops of {SIDE} pixels"
        )
    return warning_if(remedy, "reading images", evidence)


def data_text(measured: Measured) -> str:
    """Return a row per stage: time of an image, share of a worker's time, images/s."""
    seconds = measured.seconds
    stages = {stage: seconds[stage] for stage in WORKER}
    stages["a worker, total"] = 1 / measured.rate
    stages[f"{STORAGE} (instead of cached)"] = seconds[STORAGE]
    stages[f"{NORMALISING} (in the rank)"] = seconds[NORMALISING]
    rows = [
        [
            name,
            f"{1e3 * spent:.2f}",
            percent(spent * measured.rate) if name in WORKER else "",
            f"{1 / spent:,.0f}",
        ]
        for name, spent in stages.items()
    ]
    title = f"an image of {measured.directory} on one core, read by PyTorch's loader:"
    return f"{message(title)}\n{table(['stage', 'ms', 'share', 'images/s per core'], rows)}"
