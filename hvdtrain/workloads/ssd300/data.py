"""Images and boxes for SSD300: read and augmented as in the paper, or drawn."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import seed_of
from hvdtrain.tasks.dataset import Batch
from hvdtrain.workloads.data.coco import Annotation, Coco
from hvdtrain.workloads.data.files import FolderFiles, Names
from hvdtrain.workloads.data.torch_images import decoded, opened
from hvdtrain.workloads.resnet.pytorch import torchvision
from hvdtrain.workloads.ssd300.boxes import SIDE, iou

Boxes = NDArray[np.float64]
Labels = NDArray[np.int64]

COLUMNS = 6  # of a box in a batch: corners as fractions, class from 1, index of the image
OVERLAPS = (None, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9)  # minimum IoU of a crop and a box; None: no crop
TRIES = 50
ORIENTATION = 0x0112  # tag of EXIF: 2 to 4 mirrored or by 180 degrees, 5 to 8 by 90


class BoxReader:
    """Reads images and boxes for ``ReadAhead``; pixels uint8, shape (n, 3, 300, 300).

    The augmentation is a function of ``seed``, epoch and sample.
    """

    def __init__(self, coco: Coco, seed: int) -> None:
        # Without annotations, which only an evaluation needs: the rest is sent to each worker.
        self.coco, self.seed = dataclasses.replace(coco, annotations=[]), seed
        self.samples, self.digest = len(coco.ids), coco.digest

    def batch(self, indices: list[int], epoch: int | None) -> Batch:
        """Return these samples; ``y`` is float32, of shape (n, most boxes, 6), zero-padded.

        Raises:
            UsageError: naming an image that is broken, or whose size differs from its annotation.
        """
        self.coco.files.will_need(indices)
        pixels = np.empty((len(indices), SIDE, SIDE, 3), np.uint8)
        boxes, labels = [], []
        for row, index in enumerate(indices):
            pixels[row], image_boxes, image_labels = self._sample(index, epoch)
            boxes.append(image_boxes)
            labels.append(image_labels)
        most = max([1, *map(len, boxes)])
        y = np.zeros((len(indices), most, COLUMNS), np.float32)
        for row, index in enumerate(indices):
            y[row, : len(boxes[row]), :4] = boxes[row]
            y[row, : len(boxes[row]), 4] = labels[row] + 1
            y[row, :, 5] = index
        return Batch(torch.from_numpy(pixels).permute(0, 3, 1, 2), torch.from_numpy(y))

    def _sample(self, index: int, epoch: int | None) -> tuple[Any, Boxes, Labels]:
        """Return pixels, boxes as fractions of them, and labels from 0."""
        boxes, labels = self.coco.of(index)
        size = self.coco.sizes[index]
        boxes = boxes / np.tile(size, 2)
        with self.open(index) as image:
            if len(boxes) or image.size != tuple(size):
                self._check_orientation(image, index)
            if image.size != tuple(size):
                raise UsageError(
                    f"{self.coco.files.name(index)} has {image.size[0]} x {image.size[1]} pixels, "
                    f"{size[0]} x {size[1]} by its annotation: correct the annotation"
                )
            if epoch is None:
                return _resized(image, (0, 0, 1, 1)), boxes, labels
            # The augmentation depends only on (seed, epoch, sample), not on the worker.
            torch.default_generator.manual_seed(seed_of(self.seed, epoch, index))
            crop = draw_crop(boxes)
            pixels = _resized(image, crop)
        boxes, labels = cut(boxes, labels, crop)
        if torch.rand(()) < 0.5:
            pixels = pixels.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            boxes[:, [0, 2]] = 1 - boxes[:, [2, 0]]
        jitter = torchvision().transforms.ColorJitter(0.125, 0.5, 0.5, 0.05)
        return jitter(pixels), boxes, labels

    def _check_orientation(self, image: Image.Image, index: int) -> None:
        """Raise if viewers rotate the image, and its boxes may be of what they show."""
        kind = 1
        with contextlib.suppress(Exception):  # damaged metadata, which viewers ignore, too
            kind = image.getexif().get(ORIENTATION, 1)
        shown = image.size[::-1] if kind in range(5, 9) else image.size
        if kind in range(2, 9) and shown == tuple(self.coco.sizes[index]):
            raise UsageError(
                f"{self.coco.files.name(index)} is shown rotated or mirrored (EXIF orientation "
                f"{kind}), but read as stored: if its boxes are of what is shown, store it so "
                "(mogrify -auto-orient), otherwise remove its EXIF orientation"
            )

    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        """Open the image at ``index``, and read only its header."""
        return opened(self.coco.files, index)


def _resized(image: Image.Image, crop: Sequence[float]) -> Image.Image:
    """Return the part ``crop`` (corners as fractions) as a square of 300 pixels in RGB."""
    left, top, right, bottom = np.array(crop) * np.tile(image.size, 2)
    image, smaller = decoded(image, min(right - left, bottom - top) / SIDE)
    box = tuple(edge / smaller for edge in (left, top, right, bottom))
    box = (*box[:2], min(box[2], image.width), min(box[3], image.height))
    return image.resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)


def draw_crop(boxes: Boxes) -> tuple[float, float, float, float]:
    """Draw a part of an image with ``boxes`` by torch's generator (section 2.2 of the paper).

    Boxes, shape (k, 4), and result are corners as fractions: of the whole image, or of a part with
    0.3 to 1 of each side and an aspect ratio from 1/2 to 2, which contains the centre of a box with
    sufficient overlap.
    """
    while True:
        least = OVERLAPS[int(torch.randint(len(OVERLAPS), ()))]
        if least is None or not len(boxes):
            return 0.0, 0.0, 1.0, 1.0
        for width, height, x, y in torch.rand(TRIES, 4, dtype=torch.float64).tolist():
            width, height = 0.3 + 0.7 * width, 0.3 + 0.7 * height
            if not 0.5 <= width / height <= 2:
                continue
            left, top = x * (1 - width), y * (1 - height)
            crop = (left, top, left + width, top + height)
            overlap = iou(torch.tensor([crop], dtype=torch.float64), torch.from_numpy(boxes))
            if ((overlap[0].numpy() >= least) & _inside(boxes, crop)).any():
                return crop


def _inside(boxes: Boxes, crop: Sequence[float]) -> NDArray[np.bool_]:
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    return np.all((centres > crop[:2]) & (centres < crop[2:]), axis=1)


def cut(boxes: Boxes, labels: Labels, crop: Sequence[float]) -> tuple[Boxes, Labels]:
    """Return the boxes whose centres are in ``crop``, clipped to it, as fractions of it."""
    kept = _inside(boxes, crop)
    low, high = np.array(crop[:2]), np.array(crop[2:])
    edges = (boxes[kept].reshape(-1, 2, 2) - low) / (high - low)
    return edges.clip(0, 1).reshape(-1, 4), labels[kept]


# Drawn images: rectangles of the colour of their class, on noise.

COLOURS = {"red": (220, 60, 50), "green": (60, 200, 80), "blue": (70, 90, 230)}
MAX_ERASED = 3  # in an image
DRAWN = 96, 24  # images to train and to evaluate on


class Drawn(BoxReader):
    """Draws its images, each a function of the seed and its id."""

    @override
    def open(self, index: int) -> AbstractContextManager[Image.Image]:
        noise = np.random.default_rng([self.seed, int(self.coco.ids[index])])
        pixels = noise.integers(0, 160, (SIDE, SIDE, 3), np.uint8)
        for box, label in zip(*self.coco.of(index), strict=True):
            left, top, right, bottom = box.astype(int)
            pixels[top:bottom, left:right] //= 4
            pixels[top:bottom, left:right] += np.array(
                [colour * 3 // 4 for colour in list(COLOURS.values())[label]], np.uint8
            )
        return contextlib.nullcontext(Image.fromarray(pixels))


def drawn(seed: int) -> tuple[Coco, Coco]:
    """Return the boxes of the drawn images, to train and to evaluate on."""
    chance = np.random.default_rng(seed)
    splits, first = [], 1
    for count in DRAWN:
        numbers = chance.integers(1, MAX_ERASED + 1, count)
        sides = chance.integers(40, 160, (numbers.sum(), 2))
        corner = (chance.random(sides.shape) * (SIDE - sides)).astype(int)
        labels = chance.integers(len(COLOURS), size=len(sides))
        ids = np.arange(first, first + count)
        owner = np.repeat(ids, numbers)
        splits.append(
            Coco(
                FolderFiles(Path(), Names.of(f"drawn {number}" for number in ids)),
                ids,
                np.full((count, 2), SIDE),
                np.concatenate([corner, corner + sides], 1).astype(np.float64),
                labels,
                np.cumsum([0, *numbers]),
                list(range(1, len(COLOURS) + 1)),
                list(COLOURS),
                [
                    Annotation(int(image), int(label) + 1, (*at, *side), side[0] * side[1], 0)
                    for image, label, at, side in zip(
                        owner, labels, corner.tolist(), sides.tolist(), strict=True
                    )
                ],
            )
        )
        first += count
    return splits[0], splits[1]
