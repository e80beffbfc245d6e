"""Processor time per image, and images/s, of the decoders and of others' loaders, on one core.

python -m benchmarks.decoders --data ../shared/data/imagenette-mini [--images 1000] [--repeats 5]

Pillow and DALI in hvdtrain, torchvision's ImageFolder with a DataLoader, and timm's loader, in
turn, in the reverse order each second round; those that cannot be imported are left out. Images
smaller than ImageNet's are first tiled with their mirror images to its usual sizes, as JPEGs of
about its bytes per pixel. Processor time is that of all threads of the process, without the start;
it hardly changes with what else runs on the machine. Pixels are those of random crops of 224.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from benchmarks.ratios import SCRIPTS, command, start
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.image_folder import ImageOptions

LOADERS = {"pillow": "hvdtrain", "dali": "dali", "torchvision": "torchvision", "timm": "timm"}
NEEDS = {"dali": "nvidia.dali", "timm": "timm"}
# Frequent widths and heights of ImageNet, in rough proportion, and what gives its file size.
SIZES = ((500, 375),) * 6 + ((375, 500),) * 2 + ((500, 333), (400, 300))
QUALITY, SUBSAMPLING = 96, "4:2:0"
SIZE, COMPARED = 224, 256  # side of a crop, and number of images whose pixels are compared
KEYS = ("images_per_second", "processor_milliseconds")


def native(source: Path, target: Path, number: int) -> None:
    """Write ``number`` images of ImageNet's sizes, as train/CLASS/*, from those of ``source``."""
    paths = sorted(path for path in (source / "train").rglob("*") if path.is_file())
    generator = np.random.default_rng(0)
    for index in range(number):
        path = paths[index % len(paths)]
        width, height = SIZES[generator.integers(len(SIZES))]
        pixels = np.asarray(Image.open(path).convert("RGB"))
        while pixels.shape[0] < height or pixels.shape[1] < width:
            pixels = np.concatenate([pixels, pixels[:, ::-1]], 1)
            pixels = np.concatenate([pixels, pixels[::-1]], 0)
        top = generator.integers(pixels.shape[0] - height + 1)
        left = generator.integers(pixels.shape[1] - width + 1)
        folder = target / "train" / path.parent.name
        folder.mkdir(parents=True, exist_ok=True)
        crop = Image.fromarray(pixels[top : top + height, left : left + width])
        crop.save(folder / f"{index:06}.jpg", quality=QUALITY, subsampling=SUBSAMPLING)


def measure(loader: str, data: Path, core: int) -> dict[str, float]:
    """Run a loader on one core; return its figures by ``KEYS``."""
    line = command(1, str(SCRIPTS / "read_images.py"), LOADERS[loader], str(data))
    out, _ = start(["taskset", "-c", str(core), *line]).communicate(timeout=300)
    return printed_figures(out)


def printed_figures(out: str) -> dict[str, float]:
    """Return the figures that a script of ``scripts`` has printed, by ``KEYS``."""
    lines = [line.split() for line in out.splitlines()]
    return {line[0]: float(line[1]) for line in lines if line and line[0] in KEYS}


def torchvisions(image: Image.Image, size: int) -> Image.Image:
    """Return the same crop by torchvision's own functions."""
    from hvdtrain.workloads.resnet.pytorch import random_view, torchvision

    view = random_view(image, size)
    functional = torchvision().transforms.functional
    box = (view.top, view.left, view.height, view.width)
    crop = functional.resized_crop(image.convert("RGB"), *box, [size, size])
    return functional.hflip(crop) if view.flip else crop


def compare_pixels(data: Path) -> None:
    """Print the differences of DALI's pixels from hvdtrain's with Pillow, and torchvision's."""
    from hvdtrain.workloads.data.dali_images import dali_folder
    from hvdtrain.workloads.data.torch_images import Folder
    from hvdtrain.workloads.resnet.pytorch import random_crop, random_view

    train, _ = image_folder.load(data)
    options = ImageOptions(image_size=SIZE, workers=0)
    part = torch.arange(min(COMPARED, len(train.files))).tolist()
    by_dali = dali_folder(train, random_view, options)._reader.reader.batch(part, 0).x
    for name, crop in (("Pillow", random_crop), ("torchvision", torchvisions)):
        others = Folder(train, crop, options)._reader.reader.batch(part, 0).x
        difference = (by_dali.int() - others.int()).abs().double()
        print(
            f"dali - {name}: mean {difference.mean():.4f}, in the worst image "
            f"{difference.mean((1, 2, 3)).max():.4f}, largest {difference.max():.0f}, above 1 "
            f"{(difference > 1).double().mean():.2%}, of {len(part)} crops",
            flush=True,
        )


def main() -> None:
    """Measure each loader, and print figures and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--images", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--core", type=int, default=min(os.sched_getaffinity(0)))
    options = parser.parse_args()
    missing = [name for name, module in NEEDS.items() if not importlib.util.find_spec(module)]
    names = [name for name in LOADERS if name not in missing]
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder)
        native(options.data, data, options.images)
        sizes = [path.stat().st_size for path in data.rglob("*.jpg")]
        print(f"{len(sizes)} images, {statistics.fmean(sizes) / 1000:.0f} kB in the mean")
        if "dali" in names:
            compare_pixels(data)
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for repeat in range(options.repeats):
            for name in names if repeat % 2 == 0 else reversed(names):
                runs[name].append(measure(name, data, options.core))
                print(f"{repeat + 1}/{options.repeats} {name}: {runs[name][-1]}", flush=True)
    report(runs)


def report(runs: dict[str, list[dict[str, float]]]) -> None:
    """Print medians, and paired ratios to torchvision."""
    for name, figures in runs.items():
        pairs = list(zip(figures, runs["torchvision"], strict=True))
        rate, milliseconds = (statistics.median(one[key] for one in figures) for key in KEYS)
        faster = [a[KEYS[0]] / b[KEYS[0]] for a, b in pairs]
        less = [b[KEYS[1]] / a[KEYS[1]] for a, b in pairs]
        print(
            f"{name:12} {milliseconds:6.3f} ms of processor time per image: torchvision / this "
            f"{statistics.median(less):.2f} ({min(less):.2f} to {max(less):.2f}); {rate:6.0f} "
            f"images/s: this / torchvision {statistics.median(faster):.2f} ({min(faster):.2f} to "
            f"{max(faster):.2f})",
            flush=True,
        )


if __name__ == "__main__":
    main()
