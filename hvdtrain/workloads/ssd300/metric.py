"""COCO's mean average precision, by pycocotools, over the images of all ranks."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ImageDraw
from typing_extensions import override

from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.system.files import resumable
from hvdtrain.system.folder import Folder
from hvdtrain.tasks.columns import Columns
from hvdtrain.tasks.dataset import Batch
from hvdtrain.tasks.metrics import Array, Metric
from hvdtrain.workloads.data.coco import Coco
from hvdtrain.workloads.data.image_folder import rgb
from hvdtrain.workloads.ssd300.boxes import DETECTIONS, default_boxes, detect

# Of a detection: image, left, top, width, height, score, category. The image and the category are
# indices in ``Coco``: an id may have no float64.
FIELDS = 7
PICTURES = 12  # number of images to draw, the first ones
SHOWN = 0.3  # minimum score of drawn detections
DETECTED, TRUE = "#d55e00", "#009e73"


class MeanAveragePrecision(Metric):
    """COCO's average precision over IoU 0.5 to 0.95, at 0.5, and of each category at 0.5.

    If a folder for ``pictures`` is specified, the first images are drawn there with detections;
    ``reader`` opens them.
    """

    names = ("map", "map50")

    def __init__(self, coco: Coco, pictures: Path | None = None, reader: Any = None) -> None:
        self.coco, self.pictures, self.reader = coco, pictures, reader
        self.defaults = default_boxes()
        self.detections: list[Array] = []
        self.numbers: dict[str, float] = {}

    def __deepcopy__(self, memo: Any) -> MeanAveragePrecision:
        """Return an empty metric on the same data; each evaluation begins with one."""
        return MeanAveragePrecision(self.coco, self.pictures, self.reader)

    @override
    def update(self, batch: Batch, output: Array) -> None:
        for y, values in zip(batch.y, output, strict=True):
            index = int(y[0, 5])
            self.detections.append(detections(self.coco, self.defaults, index, values))
            if self.pictures and index < PICTURES:
                self._draw(self.pictures, index, self.detections[-1])

    @override
    def gather(self, collectives: Communicator) -> None:
        mine = np.concatenate([np.zeros((0, FIELDS)), *self.detections])
        gathered = [np.frombuffer(data) for data in collectives.gather(mine.tobytes())]
        combined = np.concatenate(gathered).reshape(-1, FIELDS)
        combined = combined[combined[:, 0].argsort(kind="stable")]  # in the order of one rank
        # On one rank only: for COCO it takes a minute and gigabytes.
        self.numbers = collectives.on_root(lambda: precision(self.coco, combined)) or {}
        self.numbers = json.loads(collectives.broadcast_bytes(json.dumps(self.numbers).encode()))

    @override
    def result(self) -> dict[str, float]:
        return self.numbers

    def _draw(self, folder: Path, index: int, detected: Array) -> None:
        """Write a picture of the image with its true boxes and the best detections."""
        with self.reader.open(index) as image:
            picture = rgb(image).copy()  # to draw on, after the file is closed
        draw = ImageDraw.Draw(picture)
        for box in self.coco.of(index)[0]:
            draw.rectangle(tuple(box), outline=TRUE, width=2)
        for _, left, top, width, height, score, category in detected[detected[:, 5] >= SHOWN]:
            draw.rectangle((left, top, left + width, top + height), outline=DETECTED, width=2)
            text = f"{self.coco.names[int(category)]} {score:.2f}"
            draw.text((left + 3, top + 2), text, fill=DETECTED)
        content = io.BytesIO()
        picture.save(content, "JPEG")
        with resumable(folder):
            name = f"{int(self.coco.ids[index]):012}.jpg"
            Folder.named(folder).replace(name, content.getvalue())


def detections(coco: Coco, defaults: torch.Tensor, index: int, output: Array) -> Array:
    """Return the detections in the image at ``index``, float64, shape (n, 7): see ``FIELDS``.

    They are in pixels of the image as it is stored. ``defaults`` are the ``default_boxes``, and
    ``output`` is that of the network for the image, shape (8732, 4 + classes).
    """
    boxes, labels, scores = (
        tensor.numpy() for tensor in detect(torch.from_numpy(output), defaults)
    )
    edges = boxes * np.tile(coco.sizes[index], 2)
    image = np.full(len(scores), index)
    sides = edges[:, 2:] - edges[:, :2]
    return np.column_stack([image, edges[:, :2], sides, scores, labels - 1]).astype(np.float64)


def precision(coco: Coco, detected: NDArray[np.float64]) -> dict[str, float]:
    """Return the average precisions of all detections, shape (n, 7), computed by pycocotools.

    These are ``map``, ``map50``, and ``ap50/NAME`` of each category with true boxes; crowds are
    ignored. A name that several categories have is followed by the id.

    Raises:
        UsageError: pycocotools is not installed.
    """
    truth, judge = pycocotools()
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress
        true = truth.COCO()
        true.dataset = _dataset(coco)
        true.createIndex()
        results = true.loadRes(detected) if len(detected) else truth.COCO()
        evaluation = judge.COCOeval(true, results, "bbox")
        evaluation.params.maxDets = [1, 10, DETECTIONS]
        evaluation.evaluate()
        evaluation.accumulate()
    # By IoU, recall, category, area (all) and detections (100); -1: no true box.
    precisions = evaluation.eval["precision"][:, :, :, 0, -1]
    present = precisions[0, 0] > -1
    if not present.any():
        return {"map": 0.0, "map50": 0.0}
    return {
        "map": float(precisions[:, :, present].mean()),
        "map50": float(precisions[0][:, present].mean()),
        **{
            f"ap50/{name}": float(precisions[0, :, index].mean())
            for index, name in enumerate(_unique_names(coco))
            if present[index]
        },
    }


def _dataset(coco: Coco) -> dict[str, object]:
    """Return the true boxes in COCO's format, with indices as identities."""
    image, category = (
        {identity: at for at, identity in enumerate(ids)}
        for ids in (coco.ids.tolist(), coco.categories)
    )
    return {
        "info": {},
        "images": [{"id": at} for at in image.values()],
        "categories": [{"id": at} for at in category.values()],
        # An annotation of id 0 would count as none (pycocotools 2.0.11).
        "annotations": [
            {
                **msgspec.structs.asdict(entry),
                "image_id": image[entry.image_id],
                "category_id": category[entry.category_id],
                "bbox": list(entry.bbox),
                "id": number,
            }
            for number, entry in enumerate(coco.annotations, 1)
        ],
    }


def _unique_names(coco: Coco) -> list[str]:
    counts = Counter(coco.names)
    both = zip(coco.names, coco.categories, strict=True)
    return [f"{name} {identity}" if counts[name] > 1 else name for name, identity in both]


def pycocotools() -> tuple[Any, Any]:
    """Import pycocotools' modules for the data and for the evaluation.

    Raises:
        UsageError: it is not installed.
    """
    try:
        modules = ("pycocotools.coco", "pycocotools.cocoeval")
        return tuple(map(importlib.import_module, modules))  # type: ignore[return-value]
    except ModuleNotFoundError as error:
        raise UsageError(
            "pycocotools, which evaluates detections, is not installed; "
            "pip install 'hvdtrain[detection]'"
        ) from error


def columns(coco: Coco) -> Columns:
    """Return the columns of ``--predict``: the id of an image, and its detections as JSON.

    Each is ``[category id, score, left, top, width, height]``, in pixels, as in COCO's results.
    """
    defaults = default_boxes()

    def values(labels: Array, outputs: Array) -> tuple[Array, Array]:
        index = [int(y[0, 5]) for y in labels]
        texts = []
        for sample, output in zip(index, outputs, strict=True):
            detected = detections(coco, defaults, sample, output)
            rows = [
                [coco.categories[int(label)], *(float(f"{value:.6g}") for value in (score, *box))]
                for _, *box, score, label in detected
            ]
            texts.append(json.dumps(rows, separators=(",", ":")))
        return coco.ids[index], np.array(texts, object)

    return Columns(("image_id", "detections"), values)
