"""The detector in one process: boxes, losses, augmentation and precision by plain definitions."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("torchvision")

import safetensors.torch  # noqa: E402
from packaging.version import Version  # noqa: E402
from PIL import Image  # noqa: E402

from hvdtrain.errors import UsageError  # noqa: E402
from hvdtrain.workloads.data import coco  # noqa: E402
from hvdtrain.workloads.resnet.pytorch import torchvision  # noqa: E402
from hvdtrain.workloads.ssd300 import boxes, data, metric  # noqa: E402
from hvdtrain.workloads.ssd300.pytorch import SSD300, load_backbone  # noqa: E402
from hvdtrain.workloads.ssd300.task import WORKLOAD, DetectorOptions, build  # noqa: E402
from tests.conftest import error_of  # noqa: E402
from tests.unit.workloads.data.test_coco import write  # noqa: E402

Box = list[float]
READS_PICKLES = Version(torch.__version__) >= Version("2.10")


# Default boxes


def test_default_boxes_have_closed_forms() -> None:
    result = boxes.default_boxes()
    counts = [38**2 * 4, 19**2 * 6, 10**2 * 6, 5**2 * 6, 3**2 * 4, 1 * 4]
    assert result.shape == (sum(counts), 4) == (8732, 4)
    assert result.dtype == torch.float64
    starts = [0, *itertools.accumulate(counts)]
    for level, (step, size) in enumerate(zip((8, 16, 32, 64, 100), boxes.SIZES, strict=False)):
        of_map = result[starts[level] : starts[level + 1]]
        assert of_map[0].tolist() == pytest.approx([step / 600] * 2 + [size / 300] * 2, rel=1e-15)
        row = len(of_map) // boxes.GRIDS[level]
        assert of_map[row, :2].tolist() == pytest.approx([step / 600, step * 1.5 / 300])
        larger = math.sqrt(size * boxes.SIZES[level + 1]) / 300
        assert of_map[1, 2:].tolist() == pytest.approx([larger] * 2)
        wide, high = of_map[2, 2:], of_map[3, 2:]
        assert wide.tolist() == high.flip(0).tolist()
        assert float(wide[0] / wide[1]) == pytest.approx(2)
        assert float(wide.prod()) == pytest.approx((size / 300) ** 2)
    last = [0.5, 0.5, 261 / 300 / math.sqrt(2), 1.0]
    assert result[-1].tolist() == pytest.approx(last)
    assert ((result >= 0) & (result <= 1)).all()


# Plain definitions, as loops over numbers


def plain_iou(first: Box, second: Box) -> float:
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    shared = max(width, 0.0) * max(height, 0.0)
    areas = sum((box[2] - box[0]) * (box[3] - box[1]) for box in (first, second))
    return shared / max(areas - shared, 1e-12)


def plain_corners(box: Box) -> Box:
    x, y, width, height = box
    return [x - width / 2, y - height / 2, x + width / 2, y + height / 2]


def plain_match(true: list[Box], defaults: list[Box]) -> list[int | None]:
    """The true box of each default box: its own best one from 0.5 on, or one that needs it."""
    table = [[plain_iou(entry, plain_corners(default)) for default in defaults] for entry in true]
    needs: dict[int, list[int]] = {}
    for index, row in enumerate(table):
        needs.setdefault(row.index(max(row)), []).append(index)
    matches: list[int | None] = []
    for number in range(len(defaults)):
        overlaps = [row[number] for row in table]
        able = needs.get(number, range(len(true)))
        best = max(able, key=lambda index: overlaps[index], default=None)
        enough = best is not None and (number in needs or overlaps[best] >= 0.5)
        matches.append(best if enough else None)
    return matches


def plain_loss(output: list[Box], true: list[Box], labels: list[int], defaults: list[Box]) -> float:
    matched = plain_match(true, defaults)
    where, classification, background = 0.0, 0.0, []
    for number, index in enumerate(matched):
        scores = output[number][4:]
        total = max(scores) + math.log(sum(math.exp(entry - max(scores)) for entry in scores))
        if index is None:
            background.append(total - scores[0])
            continue
        classification += total - scores[labels[index]]
        left, top, right, bottom = true[index]
        x, y, width, height = defaults[number]
        wanted = (
            ((left + right) / 2 - x) / width / 0.1,
            ((top + bottom) / 2 - y) / height / 0.1,
            math.log((right - left) / width) / 0.2,
            math.log((bottom - top) / height) / 0.2,
        )
        for got, target in zip(output[number][:4], wanted, strict=True):
            away = abs(got - target)
            where += 0.5 * away**2 if away < 1 else away - 0.5
    count = len(matched) - len(background)
    if count == 0:
        return 0.0
    return (where + classification + sum(sorted(background)[::-1][: 3 * count])) / count


def random_boxes(chance: random.Random, number: int) -> list[Box]:
    result = []
    for _ in range(number):
        width, height = chance.uniform(0.05, 0.7), chance.uniform(0.05, 0.7)
        left, top = chance.uniform(0, 1 - width), chance.uniform(0, 1 - height)
        result.append([left, top, left + width, top + height])
    return result


DEFAULTS = boxes.default_boxes()[-754:]  # of the smaller maps: loops are slow
CLASSES = 3


def batch(chance: random.Random, numbers: list[int], padding: int = 0) -> tuple[Any, Any, Any]:
    """Outputs and ``y`` of images with so many boxes each; and boxes and labels as lists."""
    rows = [random_boxes(chance, number) for number in numbers]
    for entry in rows[:1]:
        entry[1:2] = [list(entry[0])] if len(entry) > 1 else []  # two that are the same: a tie
    rows = [[np.float32(entry).tolist() for entry in group] for group in rows]
    labels = [[chance.randint(1, CLASSES) for _ in group] for group in rows]
    y = torch.zeros(len(numbers), max([1, *numbers]) + padding, 6)
    for index, (group, named) in enumerate(zip(rows, labels, strict=True)):
        for number, (entry, label) in enumerate(zip(group, named, strict=True)):
            y[index, number] = torch.tensor([*entry, label, index])
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    shape = (len(numbers), len(DEFAULTS), 5 + CLASSES)
    output = torch.randn(shape, generator=generator, dtype=torch.float64) * 2
    return output, y, list(zip(rows, labels, strict=True))


def test_iou_is_that_of_the_definition() -> None:
    chance = random.Random(1)
    first, second = random_boxes(chance, 20), [*random_boxes(chance, 30), [0.2, 0.2, 0.2, 0.6]]
    result = boxes.iou(*(torch.tensor(group, dtype=torch.float64) for group in (first, second)))
    expected = [[plain_iou(a, b) for b in second] for a in first]
    assert result.numpy() == pytest.approx(np.array(expected), rel=1e-12)
    assert boxes.iou(torch.zeros(2, 4), torch.zeros(3, 4)).tolist() == [[0.0] * 3] * 2


def test_decoded_offsets_are_the_boxes() -> None:
    defaults = boxes.default_boxes()
    true = torch.tensor(random_boxes(random.Random(2), len(defaults)), dtype=torch.float64)
    result = boxes.decode(boxes.offsets(true, defaults), defaults)
    assert (result - true).abs().max() < 1e-12
    still = boxes.decode(torch.zeros_like(defaults), defaults)
    assert torch.equal(still, boxes.corners(defaults))
    assert boxes.offsets(torch.zeros_like(defaults), defaults).isfinite().all()  # padding


@pytest.mark.parametrize("seed", range(4))
def test_losses_are_those_of_the_definition_however_batches_are_cut(seed: int) -> None:
    chance = random.Random(seed)
    output, y, rows = batch(chance, [3, 0, 1, 7])
    loss = boxes.MultiboxLoss(DEFAULTS)
    result = loss(output, y)
    expected = [
        plain_loss(values, *row, DEFAULTS.tolist())
        for values, row in zip(output.tolist(), rows, strict=True)
    ]
    assert result.tolist() == pytest.approx(expected, rel=1e-9)
    assert result[1] == 0
    longer = torch.cat([y, torch.zeros(4, 5, 6)], 1)
    for cut in range(5):
        parts = torch.cat([loss(output[:cut], longer[:cut]), loss(output[cut:], y[cut:])])
        assert (parts - result).abs().max() < 1e-12


def test_gradients_are_finite_and_of_three_negatives_for_each_matched_box() -> None:
    output, y, rows = batch(random.Random(5), [4, 0, 2])
    y[2, 0, 2:4] = y[2, 0, :2]  # of no area, as after rounding
    output[0, 3, :] = 1e4
    output.requires_grad_()
    boxes.MultiboxLoss(DEFAULTS)(output, y).sum().backward()
    assert output.grad.isfinite().all()
    assert not output.grad[1].any()
    matched = sum(entry is not None for entry in plain_match(rows[0][0], DEFAULTS.tolist()))
    assert int(output.grad[0, :, 4:].any(1).sum()) <= 4 * matched
    moved = output.grad[0, :, :4].any(1)
    assert int(moved.sum()) == matched


def test_equally_wrong_background_is_taken_in_order() -> None:
    _, y, rows = batch(random.Random(6), [2])
    output = torch.zeros(1, len(DEFAULTS), 5 + CLASSES, dtype=torch.float64, requires_grad=True)
    boxes.MultiboxLoss(DEFAULTS)(output, y).sum().backward()
    expected = plain_match(rows[0][0], DEFAULTS.tolist())
    background = [index for index, entry in enumerate(expected) if entry is None]
    matched = [index for index, entry in enumerate(expected) if entry is not None]
    trained = output.grad[0, :, 4:].any(1).nonzero().flatten().tolist()
    assert trained == sorted([*matched, *background[: 3 * len(matched)]])


def test_a_loss_asks_the_device_for_nothing() -> None:
    """Meta tensors have no elements to ask for; and the default boxes are sent there once."""
    output, y, _ = batch(random.Random(7), [3, 0])
    loss = boxes.MultiboxLoss(DEFAULTS)
    result = loss(output.to("meta").requires_grad_(), y.to("meta"))
    result.sum().backward()
    assert result.shape == (2,)
    assert loss.defaults.device.type == "meta"


# Detections


def plain_detect(output: list[Box], defaults: list[Box]) -> list[tuple[Box, int, float]]:
    result = []
    for label in range(1, len(output[0]) - 4):
        scored = []
        for values, (x, y, width, height) in zip(output, defaults, strict=True):
            powers = [math.exp(entry - max(values[4:])) for entry in values[4:]]
            centre = [x + values[0] * 0.1 * width, y + values[1] * 0.1 * height]
            sides = [width * math.exp(values[2] * 0.2), height * math.exp(values[3] * 0.2)]
            box = [min(max(entry, 0.0), 1.0) for entry in plain_corners([*centre, *sides])]
            scored.append((powers[label] / sum(powers), box))
        scored.sort(key=lambda entry: -entry[0])
        kept: list[Box] = []
        for score, box in scored[:200]:
            if score > 0.01 and all(plain_iou(box, second) <= 0.45 for second in kept):
                kept.append(box)
                result.append((box, label, score))
    return sorted(result, key=lambda entry: -entry[2])[:100]


@pytest.mark.parametrize("scale", [0.5, 4.0])
def test_detections_are_those_of_the_definition(scale: float) -> None:
    output, _, _ = batch(random.Random(8), [1])
    output *= scale
    result = boxes.detect(output[0], DEFAULTS)
    expected = plain_detect(output[0].tolist(), DEFAULTS.tolist())
    assert len(expected) == len(result[0]) > 20
    assert result[1].tolist() == [label for _, label, _ in expected]
    assert result[2].tolist() == pytest.approx([score for *_, score in expected])
    assert result[0].numpy() == pytest.approx(np.array([box for box, *_ in expected]), abs=1e-12)
    output[0, :, 4] = 100  # all is background
    assert [len(entry) for entry in boxes.detect(output[0], DEFAULTS)] == [0, 0, 0]


# Augmentation


def test_a_crop_keeps_to_the_paper_and_to_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the centre of a box that it overlaps enough."""
    true = np.array([[0.05, 0.05, 0.95, 0.95], [0.0, 0.0, 0.06, 0.06], [0.9, 0.9, 1.0, 1.0]])
    for least, seed in itertools.product((0.0, 0.1, 0.3, 0.5, 0.7), range(30)):
        monkeypatch.setattr(data, "OVERLAPS", (least,))
        torch.manual_seed(seed)
        crop = list(data.draw_crop(true))
        torch.manual_seed(seed)
        assert list(data.draw_crop(true)) == crop
        left, top, right, bottom = crop
        assert left >= 0 and top >= 0 and max(right, bottom) <= 1 + 1e-12
        width, height = right - left, bottom - top
        assert min(width, height) >= 0.3 - 1e-12
        assert 0.5 - 1e-9 <= width / height <= 2 + 1e-9
        assert any(
            plain_iou(crop, box) >= least
            and all(crop[i] < (box[i] + box[i + 2]) / 2 < crop[i + 2] for i in (0, 1))
            for box in true.tolist()
        )
        assert len(data.cut(true, np.zeros(3, np.int64), crop)[0])
    assert data.draw_crop(np.zeros((0, 4))) == (0, 0, 1, 1)
    monkeypatch.setattr(data, "OVERLAPS", (None,))
    assert data.draw_crop(true) == (0, 0, 1, 1)


def test_boxes_are_cut_as_their_image_is() -> None:
    true = np.array(
        [[0.0, 0.0, 0.6, 0.6], [0.3, 0.4, 0.5, 0.8], [0.0, 0.0, 0.4, 0.4], [0.6, 0.6, 1.0, 1.0]]
    )
    result, labels = data.cut(true, np.array([5, 6, 7, 8]), (0.25, 0.2, 0.75, 0.7))
    expected = [[0, 0, 0.7, 0.8], [0.1, 0.4, 0.5, 1.0]]
    assert result == pytest.approx(np.array(expected))  # the others' centres are outside
    assert labels.tolist() == [5, 6]
    none, _ = data.cut(np.zeros((0, 4)), np.zeros(0, np.int64), (0, 0, 1, 1))
    assert none.shape == (0, 4)


def written(folder: Path, images: list[tuple[Any, list[tuple[int, Box]]]]) -> coco.Coco:
    """Write images and their boxes (category id, left, top, width, height) as COCO has them."""
    (folder / "train2017").mkdir(parents=True)
    content: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": entry, "name": f"n{entry}"} for entry in (2, 5, 11)],
    }
    for number, (pixels, group) in enumerate(images, 1):
        image, name = Image.fromarray(pixels), f"{number}.png"
        image.save(folder / "train2017" / name)
        content["images"].append(
            {"id": number, "file_name": name, "width": image.width, "height": image.height}
        )
        content["annotations"] += [
            {"image_id": number, "category_id": category, "bbox": bbox} for category, bbox in group
        ]
    return coco.load(write(folder, content, names=()))[0]


def test_a_reader_gives_pixels_and_padded_boxes(tmp_path: Path) -> None:
    rows = np.arange(60)[:, None, None] * np.ones((1, 90, 3))
    images: list[tuple[Any, list[tuple[int, Box]]]] = [
        (rows.astype(np.uint8), [(11, [9, 6, 45, 30])]),
        (np.zeros((50, 50), np.uint8), []),  # grey, without boxes
        (rows.astype(np.uint8), [(2, [0, 0, 90, 60]), (5, [30, 20, 60, 40])]),
    ]
    reader = data.BoxReader(written(tmp_path, images), 3)
    result = reader.batch([2, 1, 0], None)
    assert result.x.shape == (3, 3, 300, 300) and result.x.dtype == torch.uint8
    third, f = np.float32(1 / 3).item(), np.float32
    expected = [
        [[0, 0, 1, 1, 1, 2], [third, third, 1, 1, 2, 2]],
        [[0, 0, 0, 0, 0, 1]] * 2,
        [[f(0.1), f(0.1), f(0.6), f(0.6), 3, 0], [0, 0, 0, 0, 0, 0]],
    ]
    assert result.y.numpy() == pytest.approx(np.array(expected, np.float32))
    assert not result.x[1].any()
    assert abs(float(result.x[0, 0, 150].double().mean()) - 29.5) < 1  # the middle row
    empty = reader.batch([], None)
    assert (empty.x.shape, empty.y.shape) == ((0, 3, 300, 300), (0, 1, 6))
    for epoch in (0, 1):
        first, second = reader.batch([0, 2], epoch), reader.batch([2], epoch)
        assert torch.equal(first.x[1], second.x[0])  # a function of (seed, epoch, sample)
    assert not torch.equal(first.x, reader.batch([0, 2], 0).x)
    Image.new("RGB", (50, 61)).save(tmp_path / "train2017" / "2.png")
    with pytest.raises(UsageError, match=r"2\.png has 50 x 61 pixels, 50 x 50 by its annotation"):
        reader.batch([1], None)


@pytest.mark.parametrize(
    ("size", "annotated", "orientation", "words"),
    [
        ((50, 50), (50, 50), 6, "EXIF orientation 6"),
        ((60, 40), (40, 60), 8, "EXIF orientation 8"),
        ((60, 40), (60, 40), 3, "EXIF orientation 3"),
        ((60, 40), (60, 40), 6, ""),  # the boxes can only be of the stored pixels
        ((50, 50), (50, 50), 1, ""),
        ((60, 40), (40, 60), 1, "40 x 60 by its annotation"),
        ((60, 41), (40, 60), 6, "40 x 60 by its annotation"),
    ],
)
@pytest.mark.parametrize("epoch", [None, 0])
def test_a_photo_that_is_shown_rotated_is_refused(
    size: tuple[int, int],
    annotated: tuple[int, int],
    orientation: int,
    words: str,
    epoch: int | None,
    tmp_path: Path,
) -> None:
    blank = np.zeros((*annotated[::-1], 3), np.uint8)
    coco = written(tmp_path, [(blank, [(2, [1, 1, 9, 9])]), (blank, [])])
    exif = Image.Exif()
    exif[0x0112] = orientation
    for number in (1, 2):
        Image.new("RGB", size).save(tmp_path / "train2017" / f"{number}.png", exif=exif)
    reader = data.BoxReader(coco, 0)
    for index in range(2 if size != annotated else 1):
        with pytest.raises(UsageError, match=words) if words else contextlib.nullcontext():
            reader.batch([index], epoch)
    if size == annotated:
        reader.batch([1], epoch)  # without boxes


def test_a_broken_image_is_left_out(tmp_path: Path) -> None:
    pixels = np.zeros((40, 50, 3), np.uint8)
    written(tmp_path, [(pixels, [(2, [0, 0, 9, 9])])] * 4)
    (tmp_path / "train2017" / "2.png").write_bytes(b"no image")
    (tmp_path / "train2017" / "3.png").unlink()
    options = DetectorOptions(data=tmp_path, skip_broken=True, model="resnet18", precision="fp32")
    built = build(options)
    assert (built.train.samples, built.test) == (2, None)
    assert [note.partition(",")[0] for note in built.notes] == [
        "skipped 1 image not to be found",
        "skipped 1 image that cannot be decoded",
        f"no annotations/instances_val2017.json in {tmp_path}: nothing is evaluated",
    ]


def test_options_that_cannot_be_had(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--framework tensorflow: ssd300 supports only PyTorch"):
        build(DetectorOptions(framework="tensorflow"))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=f"--pictures {tmp_path / 'file'}: File exists"):
        build(DetectorOptions(pictures=tmp_path / "file"))


def test_boxes_move_with_the_pixels() -> None:
    """After crop and flip the colour about each box's centre is still the one of its class."""
    train, _ = data.drawn(4)
    reader, seen = data.Drawn(train, 4), 0
    for epoch in range(3):
        result = reader.batch(list(range(24)), epoch)
        for image, group in zip(result.x, result.y, strict=True):
            real = [entry.tolist() for entry in group if entry[4] > 0]
            for left, top, right, bottom, label, _ in real:
                if any(  # another one may be drawn over it
                    plain_iou([left, top, right, bottom], entry[:4]) > 0
                    for entry in real
                    if entry[:4] != [left, top, right, bottom]
                ):
                    continue
                x, y = int((left + right) * 150), int((top + bottom) * 150)
                colour = image[:, max(y - 4, 0) : y + 5, max(x - 4, 0) : x + 5].double()
                red, green, blue = colour.mean((1, 2)).tolist()
                assert max((red, 1), (green, 2), (blue, 3))[1] == label
                seen += 1
    assert seen > 40


# Precision


def as_by_hand(folder: Path, content: Any, results: list[dict[str, Any]]) -> tuple[float, float]:
    """What pycocotools makes of two files."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    (folder / "truth.json").write_text(json.dumps(content))
    (folder / "results.json").write_text(json.dumps(results))
    truth = COCO(str(folder / "truth.json"))
    judge = COCOeval(truth, truth.loadRes(str(folder / "results.json")), "bbox")
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    return float(judge.stats[0]), float(judge.stats[1])


@pytest.mark.parametrize("seed", range(4))
def test_precision_is_that_of_pycocotools(seed: int, tmp_path: Path) -> None:
    """With crowds, gaps in the ids, areas that are missing and images without detections."""
    pytest.importorskip("pycocotools")
    chance = random.Random(seed)
    ids = [3, 40, 41, 2**53, 2**53 + 1]  # the last one has no float64
    categories = [2, 5, 2**53, 2**53 + 1, 90]  # of 90 there is no box
    content: dict[str, Any] = {
        "info": {},
        "images": [
            {"id": entry, "file_name": f"{entry}.jpg", "width": 200, "height": 100} for entry in ids
        ],
        "annotations": [],
        "categories": [{"id": entry, "name": f"n{entry}"} for entry in categories],
    }
    results: list[dict[str, Any]] = []
    for image, number in itertools.product(ids, range(6)):
        width, height = chance.randint(8, 90), chance.randint(8, 60)
        bbox = [chance.randint(0, 90), chance.randint(0, 40), width, height]
        crowd = int(number == 5 and image != 40)
        entry = {"image_id": image, "category_id": chance.choice(categories[:4]), "iscrowd": crowd}
        entry |= {"id": len(content["annotations"]) + 1, "bbox": bbox, "area": width * height}
        content["annotations"].append(entry)
        for _ in range(0 if image == 41 else chance.randint(0, 3)):
            moved = [value + chance.uniform(-4, 4) for value in bbox]
            category = chance.choice([entry["category_id"]] * 4 + categories)
            more = {"score": chance.choice([0.5, chance.random()]), "bbox": moved}
            results.append({"image_id": image, "category_id": category} | more)
    expected = as_by_hand(tmp_path, content, results)
    for entry in content["annotations"]:
        del entry["area"], entry["id"]
    read, _ = coco.load(write(tmp_path / "coco", content, names=[f"{entry}.jpg" for entry in ids]))
    image_of, label_of = read.ids.tolist().index, read.categories.index
    rows = [
        [image_of(e["image_id"]), *e["bbox"], e["score"], label_of(e["category_id"])]
        for e in results
    ]
    result = np.array(rows)
    got = metric.precision(read, result)
    assert (got["map"], got["map50"]) == pytest.approx(expected, rel=1e-12)
    assert expected[1] > 0.1
    assert list(got) == ["map", "map50", *(f"ap50/n{entry}" for entry in categories[:4])]
    assert np.mean(list(got.values())[2:]) == pytest.approx(got["map50"])
    nothing = metric.precision(read, np.zeros((0, metric.FIELDS)))
    assert nothing == dict.fromkeys(got, 0.0)


def test_two_categories_of_one_name_have_a_precision_each(tmp_path: Path) -> None:
    pytest.importorskip("pycocotools")
    names = {4: "ant", 5: "bee", 6: "ant"}
    content = {
        "images": [{"id": 1, "file_name": "1.jpg", "width": 99, "height": 99}],
        "annotations": [
            {"image_id": 1, "category_id": identity, "bbox": [9, 9, 50, 50]} for identity in names
        ],
        "categories": [{"id": identity, "name": name} for identity, name in names.items()],
    }
    read, _ = coco.load(write(tmp_path, content, names=["1.jpg"]))
    got = metric.precision(read, np.array([[0, 9.0, 9, 50, 50, 0.5, 2]]))
    assert list(got) == ["map", "map50", "ap50/ant 4", "ap50/bee", "ap50/ant 6"]
    assert (got["ap50/ant 4"], got["ap50/ant 6"]) == (0, pytest.approx(1))


def test_an_output_becomes_detections_in_pixels() -> None:
    _, val = data.drawn(0)
    defaults = boxes.default_boxes()
    output = torch.zeros(8732, 4 + 1 + 3, dtype=torch.float64)
    output[:, 4] = 20
    output[5000, 4:] = torch.tensor([0.0, 0, 9, 0])
    result = metric.detections(val, defaults, 3, output.numpy())
    left, top, right, bottom = (boxes.corners(defaults[5000]).clamp(0, 1) * 300).tolist()
    score = math.exp(9) / (math.exp(9) + 3)
    expected = [3, left, top, right - left, bottom - top, score, 1]
    assert result[0] == pytest.approx(np.array(expected))
    assert len(result) == 1
    y = np.array([[[0, 0, 0, 0, 0, 3]]])
    images, texts = metric.columns(val).values(y, output.numpy()[None])
    assert images.tolist() == [val.ids[3]]
    assert [row[0] for row in json.loads(texts[0])] == [val.categories[1]]


# The network


@pytest.mark.parametrize("model", WORKLOAD.models)
def test_a_network_has_an_output_for_each_default_box(model: str) -> None:
    with torch.device("meta"):  # of the shapes alone
        network, images = SSD300(model, 3), torch.zeros(2, 3, 300, 300)
        assert network(images).shape == (2, 8732, 8)
        assert network.backbone(images).shape[2:] == (38, 38)


def test_an_empty_batch_has_a_backward_pass() -> None:
    network = SSD300("resnet18", 3)
    output = network(torch.zeros(0, 3, 300, 300))
    assert output.shape[0] == 0
    losses = boxes.MultiboxLoss(boxes.default_boxes())(output, torch.zeros(0, 1, 6))
    assert losses.shape == (0,)
    losses.sum().backward()
    assert all(entry.grad is None or not entry.grad.any() for entry in network.parameters())


def test_the_weights_of_a_backbone_come_from_a_file(tmp_path: Path) -> None:
    resnet = torchvision().models.get_model("resnet18", weights=None, num_classes=7)
    weights = resnet.state_dict()
    tensors, pickled, bare = (tmp_path / name for name in ("a.safetensors", "b.pth", "c.pt"))
    safetensors.torch.save_file(weights, tensors)
    torch.save(weights, pickled)
    without = {k: v for k, v in weights.items() if not k.endswith("num_batches_tracked")}
    torch.save({k: v for k, v in without.items() if k[:6] not in ("layer4", "fc.wei")}, bare)
    for path in (tensors, pickled, bare) if READS_PICKLES else (tensors,):
        network = SSD300("resnet18", 3)
        load_backbone(network, path)
        for name, value in network.backbone.state_dict().items():
            assert torch.equal(value, weights[name]), name


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("other", "its layer1.0.conv1.weight does not match this network"),
        ("lacking", "its bn1.weight does not match this network"),
        ("damaged.safetensors", "cannot be read"),
        ("damaged.pth", "cannot be read"),
        ("an object", "cannot be read"),
        ("absent", "cannot be read"),
    ],
)
def test_weights_that_do_not_fit_are_one_line(kind: str, words: str, tmp_path: Path) -> None:
    if not (READS_PICKLES or kind.endswith(".safetensors")):
        words = "may execute code"
    path = tmp_path / (kind if "." in kind else "weights.pth")
    model = "resnet50" if kind == "other" else "resnet18"
    weights = torchvision().models.get_model(model, weights=None).state_dict()
    if kind == "lacking":
        del weights["bn1.weight"]
    elif kind == "an object":
        weights = {"conv1.weight": random.Random()}
    if kind.startswith("damaged"):
        path.write_bytes(b"\x80nothing of the kind\n" * 9)
    elif kind != "absent":
        torch.save(weights, path)
    message = error_of(load_backbone, SSD300("resnet18", 3), path)
    assert words in message and f"--backbone-path {path}" in message


@pytest.mark.parametrize("version", ["2.4.1", "2.9.1"])
def test_a_torch_that_may_execute_a_state_dictionary_does_not_read_it(
    version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torchvision().models.get_model("resnet18", weights=None).state_dict()
    torch.save(weights, tmp_path / "w.pth")
    safetensors.torch.save_file(weights, tmp_path / "w.safetensors")
    monkeypatch.setattr(torch, "__version__", version)
    message = error_of(load_backbone, SSD300("resnet18", 3), tmp_path / "w.pth")
    assert "CVE-2025-32434" in message and "use a safetensors file" in message
    load_backbone(SSD300("resnet18", 3), tmp_path / "w.safetensors")
