"""A detection dataset in COCO's layout: the images of a split with their boxes.

``DIR/train2017``, ``DIR/val2017`` and ``DIR/annotations/instances_train2017.json``; the format:
Lin et al., "Microsoft COCO: Common Objects in Context" (2014), and cocodataset.org.
"""

from __future__ import annotations

import dataclasses
import itertools
import posixpath
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UsageError
from hvdtrain.system.files import check_input
from hvdtrain.system.output.text import plural, printable
from hvdtrain.workloads.data.files import ENDINGS, Files, has_file, open_split, read_file

SPLITS = ("train2017", "val2017")


class Annotation(msgspec.Struct):
    """A box of an image as in the file: of its keys, those that pycocotools needs.

    Polygons would take gigabytes.
    """

    image_id: int
    category_id: int
    bbox: tuple[float, float, float, float]
    area: float | None = None  # None only in a file
    iscrowd: int | bool | None = None

    def __post_init__(self) -> None:
        """Complete an annotation of a file."""
        if self.area is None:
            self.area = self.bbox[2] * self.bbox[3]
        self.iscrowd = int(self.iscrowd or 0)


@dataclass(frozen=True)
class Coco:
    """The n images of a split, in the order of their ids, and their m boxes.

    Boxes are grouped by image, without crowds, clipped to the image, with positive area.
    """

    files: Files
    ids: NDArray[np.int64]  # of the images, shape (n,)
    sizes: NDArray[np.int64]  # width and height, in pixels, shape (n, 2)
    boxes: NDArray[np.float64]  # left, top, right and bottom, in pixels, shape (m, 4)
    labels: NDArray[np.int64]  # indices in ``categories``, shape (m,)
    first: NDArray[np.int64]  # index of the first box of each image, and m, shape (n + 1,)
    categories: list[int]  # ids, increasing
    names: list[str]  # of the categories
    annotations: list[Annotation]  # of these images, including crowds
    notes: tuple[str, ...] = ()  # lines for the user on skipped images and annotations

    @property
    def digest(self) -> str:
        """Digest of names and sizes of the images, their boxes and the categories."""
        arrays = (self.ids, self.sizes, self.boxes, self.labels, self.first)
        categories = repr((self.categories, self.names)).encode()
        return self.files.digest_with(b"".join(array.tobytes() for array in arrays) + categories)

    def of(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return boxes and labels of an image."""
        span = slice(self.first[index], self.first[index + 1])
        return self.boxes[span], self.labels[span]


def load(directory: Path, *, skip_broken: bool = False) -> tuple[Coco, Coco | None]:
    """Return ``train2017`` and ``val2017`` of ``directory``; None: no annotations of val2017.

    The ``directory`` has COCO's layout, or is packed; ``skip_broken``: missing images are skipped.

    Raises:
        UsageError: a file is missing or broken, or the categories of the splits differ.
    """
    check_input(directory, f"--data {directory}")
    train, *others = (
        read(directory, split, skip_broken=skip_broken)
        for split in SPLITS
        if split == SPLITS[0] or has_file(directory, _annotations(split))
    )
    for test in others:
        if (test.categories, test.names) != (train.categories, train.names):
            raise UsageError(
                f"{directory / _annotations(SPLITS[1])} has other categories than that of "
                f"{SPLITS[0]}: ids and names must be equal in both"
            )
    return train, next(iter(others), None)


def _annotations(split: str) -> str:
    return f"annotations/instances_{split}.json"


def read(directory: Path, split: str, *, skip_broken: bool = False) -> Coco:
    """Return the images of a split; see ``load``."""
    file, images = directory / _annotations(split), open_split(directory, split)
    if images is None or not has_file(directory, _annotations(split)):
        raise UsageError(
            f"--data {directory}: {split}/ or annotations/{file.name} is missing; it must contain "
            "train2017/*.jpg, val2017/*.jpg and annotations/instances_*.json. Without --data "
            "images are drawn"
        )
    try:
        names, columns = _parse(read_file(directory, _annotations(split)), split)
    except ValueError as error:
        raise UsageError(f"{file} is not in COCO's form ({error}): copy it again") from error
    if not names:
        raise UsageError(f"{file} lists no image: use --data with images")
    if not columns["categories"]:
        raise UsageError(f"{file} lists no category: there is nothing to detect")
    index_of = {_normalized(name, split): at for at, name in enumerate(images.names)}
    index_of |= {name: at for at, name in enumerate(images.names)}
    chosen = [index_of.get(name, index_of.get(_normalized(name, split))) for name in names]
    absent = [at for at, index in enumerate(chosen) if index is None]
    kinds, remedy = "not to be found", "copy the images again"
    if others := [at for at in absent if not names[at].lower().endswith(ENDINGS)]:
        kinds, remedy = f"missing or of other kinds than {', '.join(ENDINGS)}", "convert them"
    first = names[(others or absent or [0])[0]]
    if absent and not skip_broken:
        raise UsageError(
            f"{file} lists {plural(len(absent), 'image')} {kinds} in {split}, {first} for one: "
            f"{remedy}, or use --skip-broken"
        )
    if len(absent) == len(names):
        raise UsageError(f"all images that {file} lists are {kinds} in {split}, {first} for one")
    # Absent images are removed below; until then the first one is their placeholder.
    coco = Coco(images.take(np.array([index or 0 for index in chosen], np.int64)), **columns)
    return without(coco, absent, f"{kinds}, {printable(first)}") if absent else coco


def _normalized(name: str, split: str) -> str:
    r"""Return the one form of ``./a.jpg``, ``train2017/a.jpg``, ``b\a.jpg``, NFD."""
    path = posixpath.normpath(name.replace("\\", "/")).removeprefix(f"{split}/")
    return unicodedata.normalize("NFC", path)


class _Category(msgspec.Struct):
    id: int
    name: str | int | float


class _Image(msgspec.Struct):
    id: int
    file_name: str
    width: int
    height: int


class _File(msgspec.Struct):
    images: list[_Image]
    categories: list[_Category]
    annotations: list[Annotation]


def _parse(content: bytes, split: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the images, and the other fields of ``Coco``, of an annotation file.

    Raises:
        ValueError: the file has another format.
    """
    file = msgspec.json.decode(content, type=_File, strict=False)
    categories = sorted(file.categories, key=lambda category: category.id)
    images = sorted(file.images, key=lambda image: image.id)
    ids, known = [image.id for image in images], [category.id for category in categories]
    for kind, numbers in (("image", ids), ("category", known)):
        if twice := [number for number, after in itertools.pairwise(numbers) if number == after]:
            raise ValueError(f"duplicate {kind} id {twice[0]}")
    label = {number: at for at, number in enumerate(known)}
    of_image: dict[int, list[Annotation]] = {number: [] for number in ids}
    listed = [entry for entry in file.annotations if entry.image_id in of_image]
    for entry in listed:
        if entry.category_id not in label:
            raise ValueError(f"image id {entry.image_id} has a category id that is not listed")
        of_image[entry.image_id].append(entry)
    boxes, labels, counts = [], [], []
    for image in images:
        whole = [entry for entry in of_image[image.id] if not entry.iscrowd]
        clipped, has_area = _clip([e.bbox for e in whole], (image.width, image.height))
        boxes.append(clipped[has_area])
        labels += [label[whole[at].category_id] for at in np.flatnonzero(has_area)]
        counts.append(int(has_area.sum()))
    odd = sum(not entry.iscrowd for entry in listed) - len(labels)
    foreign = len(file.annotations) - len(listed)
    left_out = {"outside their image or without area": odd, "of an image not listed": foreign}
    return [image.file_name for image in images], {
        "ids": np.array(ids, np.int64),
        "sizes": np.array([(i.width, i.height) for i in images], np.int64).reshape(-1, 2),
        "boxes": np.concatenate([np.zeros((0, 4)), *boxes]),
        "labels": np.array(labels, np.int64),
        "first": np.cumsum([0, *counts]),
        "categories": known,
        "names": [str(category.name) for category in categories],
        "annotations": [entry for entries in of_image.values() for entry in entries],
        "notes": tuple(
            f"{split}: skipped {plural(number, 'annotation')} {reason}"
            for reason, number in left_out.items()
            if number
        ),
    }


def _clip(
    boxes: Sequence[Sequence[float]], size: tuple[int, int]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return boxes clipped to their image, as corners, and which of them have an area."""
    values = np.array(boxes, np.float64).reshape(-1, 4)
    edges = np.concatenate([values[:, :2], values[:, :2] + values[:, 2:]], 1)
    edges = np.clip(edges, 0, np.tile(size, 2))
    return edges, (edges[:, 2:] > edges[:, :2]).all(1)


def without(coco: Coco, indices: Sequence[int], reason: str) -> Coco:
    """Return ``coco`` without the images at ``indices``; ``reason`` names one, for the note."""
    kept = np.setdiff1d(np.arange(len(coco.files)), indices)
    counts = np.diff(coco.first)
    stays = np.isin(np.repeat(np.arange(len(counts)), counts), kept)
    ids = set(coco.ids[kept].tolist())
    note = f"skipped {plural(len(indices), 'image')} {reason} for one"
    return dataclasses.replace(
        coco,
        files=coco.files.take(kept),
        ids=coco.ids[kept],
        sizes=coco.sizes[kept],
        boxes=coco.boxes[stays],
        labels=coco.labels[stays],
        first=np.cumsum([0, *counts[kept]]),
        annotations=[entry for entry in coco.annotations if entry.image_id in ids],
        notes=(*coco.notes, note),
    )
