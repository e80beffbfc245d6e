"""A detection data set in COCO's layout: the images of a split with their boxes.

``DIR/train2017``, ``DIR/val2017`` and ``DIR/annotations/instances_train2017.json``; the format:
Lin et al., "Microsoft COCO: Common Objects in Context" (2014), and cocodataset.org.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import plural, printable
from hvdtrain.workloads.data.files import Files, has_file, open_split, read_file

SPLITS = ("train2017", "val2017")


@dataclass(frozen=True)
class Coco:
    """The images of a split, in the order of their ids.

    Attributes:
        files: in that order.
        ids: of the images, int64, shape (n,).
        sizes: width and height, in pixels, int64, shape (n, 2).
        boxes: left, top, right and bottom, in pixels, float64, shape (m, 4); those of an image
            stand together. Crowds are none, a box ends with its image, and has an area.
        labels: places in ``categories``, int64, shape (m,).
        first: where the boxes of each image begin, and the end, int64, shape (n + 1,).
        categories: their ids, rising; ``names`` in the same order.
        annotations: of these images, crowds and all, with what pycocotools asks for; boxes are as
            in the file.
        notes: what was left out, in lines for the user.
    """

    files: Files
    ids: NDArray[np.int64]
    sizes: NDArray[np.int64]
    boxes: NDArray[np.float64]
    labels: NDArray[np.int64]
    first: NDArray[np.int64]
    categories: list[int]
    names: list[str]
    annotations: list[dict[str, Any]]
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """The same where names and sizes of the images, their boxes and the categories are."""
        arrays = (self.ids, self.sizes, self.boxes, self.labels, self.first)
        categories = repr((self.categories, self.names)).encode()
        return self.files.digest_with(b"".join(array.tobytes() for array in arrays) + categories)

    def of(self, index: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
        """Return boxes and labels of an image."""
        span = slice(self.first[index], self.first[index + 1])
        return self.boxes[span], self.labels[span]


def load(directory: Path, *, skip_broken: bool = False) -> tuple[Coco, Coco | None]:
    """Return ``train2017`` and ``val2017`` of ``directory``; no annotations of val2017: None.

    Args:
        directory: in COCO's layout, or packed.
        skip_broken: leave out images that are not there.

    Raises:
        UsageError: a file is missing or broken, or the splits have other categories.
    """
    if not directory.is_dir():
        raise UsageError(f"--data {directory}: no such directory")
    train, *others = (
        read(directory, split, skip_broken=skip_broken)
        for split in SPLITS
        if split == SPLITS[0] or has_file(directory, _annotations(split))
    )
    for test in others:
        if (test.categories, test.names) != (train.categories, train.names):
            raise UsageError(
                f"{directory / _annotations(SPLITS[1])} has other categories than that of "
                f"{SPLITS[0]}: ids and names must be the same in both"
            )
    return train, next(iter(others), None)


def _annotations(split: str) -> str:
    return f"annotations/instances_{split}.json"


def read(directory: Path, split: str, *, skip_broken: bool = False) -> Coco:
    """Return the images of a split; see ``load``."""
    file, images = directory / _annotations(split), open_split(directory, split)
    if images is None or not has_file(directory, _annotations(split)):
        raise UsageError(
            f"--data {directory}: {split}/ or annotations/{file.name} is not in it; it must hold "
            "train2017/*.jpg, val2017/*.jpg and annotations/instances_*.json. Without --data "
            "images are drawn"
        )
    try:
        names, found = _parse(orjson.loads(read_file(directory, _annotations(split))), split)
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        why = printable(f"there is no {error}" if isinstance(error, KeyError) else error)
        raise UsageError(f"{file} is not in COCO's form ({why}): copy it again") from error
    if not names:
        raise UsageError(f"{file} lists no image: give --data with images")
    if not found["categories"]:
        raise UsageError(f"{file} lists no category: there is nothing to detect")
    place = {name: at for at, name in enumerate(images.names)}
    absent = [at for at, name in enumerate(names) if name not in place]
    if absent and not skip_broken:
        raise UsageError(
            f"{file} lists {plural(len(absent), 'image')} not to be found in {split}, "
            f"{printable(names[absent[0]])} for one: copy the images again, or use --skip-broken"
        )
    if len(absent) == len(names):
        raise UsageError(
            f"none of the images that {file} lists is in {split}, {printable(names[0])} for one"
        )
    # What is absent is left out below; until then any other stands in its place.
    files = images.take(np.array([place.get(name, 0) for name in names], np.int64))
    if not absent:
        return Coco(files, **found)
    return without(Coco(files, **found), absent, f"not to be found, {printable(names[absent[0]])}")


def _parse(content: Any, split: str) -> tuple[list[str], dict[str, Any]]:
    """Return the names of the images, and what else a ``Coco`` is made of, of an annotation file.

    Raises:
        ValueError, KeyError, TypeError: it is in another form.
    """
    if not isinstance(content, dict):
        raise TypeError("no JSON object")
    categories = sorted((int(one["id"]), str(one["name"])) for one in content["categories"])
    images = sorted(content["images"], key=lambda one: int(one["id"]))
    ids = [int(one["id"]) for one in images]
    known = [identity for identity, _ in categories]
    for kind, numbers in (("image", ids), ("category", known)):
        if twice := [one for one, other in itertools.pairwise(numbers) if one == other]:
            raise ValueError(f"two of the {kind} id {twice[0]}")
    place, label = ({number: at for at, number in enumerate(some)} for some in (ids, known))
    of_image: list[list[dict[str, Any]]] = [[] for _ in ids]
    strangers = 0
    for one in content["annotations"]:
        if (at := place.get(one["image_id"])) is None:
            strangers += 1
        else:
            of_image[at].append(_annotation(one, ids[at], label))
    sizes = np.array([(one["width"], one["height"]) for one in images], np.int64).reshape(-1, 2)
    boxes, labels, counts, odd = [], [], [], 0
    for size, some in zip(sizes, of_image, strict=True):
        whole = [one for one in some if not one["iscrowd"]]
        clipped, has_area = _clip([one["bbox"] for one in whole], size)
        boxes.append(clipped[has_area])
        labels += [
            label[one["category_id"]] for one, keep in zip(whole, has_area, strict=True) if keep
        ]
        counts.append(int(has_area.sum()))
        odd += len(whole) - counts[-1]
    left_out = {"outside its image or without area": odd, "of an image not listed": strangers}
    return [str(one["file_name"]) for one in images], {
        "ids": np.array(ids, np.int64),
        "sizes": sizes,
        "boxes": np.concatenate([np.zeros((0, 4)), *boxes]),
        "labels": np.array(labels, np.int64),
        "first": np.cumsum([0, *counts]),
        "categories": known,
        "names": [name for _, name in categories],
        "annotations": [one for some in of_image for one in some],
        "notes": tuple(
            f"{split}: left out {plural(number, 'annotation')} {why}"
            for why, number in left_out.items()
            if number
        ),
    }


def _annotation(one: dict[str, Any], image: int, label: dict[int, int]) -> dict[str, Any]:
    """Return of an annotation what is used: polygons would take gigabytes.

    Raises:
        ValueError, KeyError, TypeError: it is in another form.
    """
    box = [float(edge) for edge in one["bbox"]]
    if len(box) != 4 or not all(map(math.isfinite, box)):
        raise ValueError(f"a bbox of image id {image} is not four numbers")
    if one["category_id"] not in label:
        raise ValueError(f"image id {image} has a category id that is not listed")
    area = one.get("area")
    return {
        "image_id": image,
        "category_id": int(one["category_id"]),
        "bbox": box,
        "area": box[2] * box[3] if area is None else float(area),
        "iscrowd": int(one.get("iscrowd") or 0),
    }


def _clip(
    boxes: Sequence[Sequence[float]], size: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return boxes cut off where their image ends, as corners; and which have an area."""
    found = np.array(boxes, np.float64).reshape(-1, 4)
    edges = np.concatenate([found[:, :2], found[:, :2] + found[:, 2:]], 1)
    edges = np.clip(edges, 0, np.tile(size, 2))
    return edges, (edges[:, 2:] > edges[:, :2]).all(1)


def without(found: Coco, indices: Sequence[int], why: str) -> Coco:
    """Return ``found`` without the images at these places; the note says why, of one of them."""
    kept = np.setdiff1d(np.arange(len(found.files)), indices)
    counts = np.diff(found.first)
    stays = np.isin(np.repeat(np.arange(len(counts)), counts), kept)
    ids = set(found.ids[kept].tolist())
    note = f"left out {plural(len(indices), 'image')} {why} for one"
    return dataclasses.replace(
        found,
        files=found.files.take(kept),
        ids=found.ids[kept],
        sizes=found.sizes[kept],
        boxes=found.boxes[stays],
        labels=found.labels[stays],
        first=np.cumsum([0, *counts[kept]]),
        annotations=[one for one in found.annotations if one["image_id"] in ids],
        notes=(*found.notes, note),
    )
