"""The detector on real ranks: N compute what one computes, and what is wrong is one line."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import on_demand
from tests.parallel import resident
from tests.parallel.conftest import (
    STRATEGIES,
    Training,
    assert_bit_equal,
    assert_close,
    assert_one_line,
    completed,
    train,
)
from tests.unit.workloads.data.test_coco import write as write_coco

SMALL = ("--model=resnet18", "--workers=0", "--warmup-epochs=0", "--seed=1", "--quiet")
EXACT = (*SMALL, "--precision=fp64", "--sync-batchnorm", "--lr=0.001", "--lr-scaling=none")
COLOURS = {3: (220, 60, 50), 7: (60, 90, 230)}  # by category id


def write(folder: Path, split: str, count: int, first: int) -> None:
    """Write noise of odd sizes with coloured boxes; the first image has none, one has a crowd."""
    chance = np.random.default_rng(first)
    images, annotations = [], []
    (folder / split).mkdir(parents=True)
    for place in range(count):
        identity, name = first + 3 * place, f"{first + 3 * place:06}.jpg"
        width, height = (int(one) for one in chance.integers(90, 200, 2))
        pixels = chance.integers(0, 120, (height, width, 3), np.uint8)
        for number in range(place % 3 if place else 0):
            category = (3, 7)[int(chance.integers(2))]
            wide, high = (int(one) for one in chance.integers(30, 70, 2))
            left, top = int(chance.integers(width - wide)), int(chance.integers(height - high))
            pixels[top : top + high, left : left + wide] = COLOURS[category]
            box = {"image_id": identity, "category_id": category, "bbox": [left, top, wide, high]}
            annotations.append(box | {"iscrowd": int(place == 5 and number == 1)})
        Image.fromarray(pixels).save(folder / split / name, quality=95)
        images.append({"id": identity, "file_name": name, "width": width, "height": height})
    categories = [{"id": 7, "name": "blue"}, {"id": 3, "name": "red"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    write_coco(folder, content, split, names=())


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven images to train on and five to evaluate on."""
    folder = tmp_path_factory.mktemp("coco")
    write(folder, "train2017", 7, 10)
    write(folder, "val2017", 5, 100)
    return folder


def assert_same_evaluation(one: Training, other: Training) -> None:
    first, second = one.summary, other.summary
    for key in ("train_loss", "eval_loss", "parameter_norm"):
        assert second[key] == pytest.approx(first[key], rel=1e-9), key
    assert second["eval_metrics"] == pytest.approx(first["eval_metrics"], rel=1e-9)
    assert {"map", "map50", "ap50/red", "ap50/blue"} == first["eval_metrics"].keys()
    assert second["eval_samples"] == 5


CASES = [
    pytest.param(name, size, marks=[] if (name, size) == ("horovod", 3) else on_demand)
    for name in STRATEGIES
    for size in (2, 3)
]


@pytest.fixture(scope="module")
def alone(images: Path, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """What one rank computes, of seven images in batches of three."""
    return train(1, tmp_path_factory.mktemp("alone"), "ssd300", *steps(images))


def steps(images: Path) -> tuple[str, ...]:
    return (*EXACT, f"--data={images}", "--global-batch-size=3", "--epochs=1")


@pytest.mark.parametrize(("strategy", "number"), CASES)
def test_ranks_compute_what_one_computes(
    strategy: str, number: int, images: Path, alone: Training, tmp_path: Path
) -> None:
    """The last batch is of one image: other ranks have an empty part; three evaluate 2, 2 and 1."""
    line = (*steps(images), f"--strategy={strategy}")
    other = train(number, tmp_path, "ssd300", *line)
    assert other.summary["samples_trained"] == alone.summary["samples_trained"] == 7
    assert_close(alone, other, 1e-9)
    assert_same_evaluation(alone, other)


def test_a_cut_and_resumed_training_is_bit_equal(images: Path, tmp_path: Path) -> None:
    line = (*SMALL, f"--data={images}", "--batch-size=2", "--precision=fp32", "--epochs=2")
    uncut = train(2, tmp_path / "uncut", "ssd300", *line, "--num-steps=3")
    train(2, tmp_path / "cut", "ssd300", *line, "--num-steps=1")
    resumed = train(2, tmp_path / "cut", "ssd300", *line, "--num-steps=3", "--resume=must")
    assert resumed.summary["steps_completed"] == 3
    assert_bit_equal(uncut, resumed)


def test_predictions_and_precision_are_the_same_at_1_and_3_ranks(
    images: Path, alone: Training, tmp_path: Path
) -> None:
    texts = []
    line = (*EXACT, f"--data={images}", "--global-batch-size=3")
    for number in (1, 3):
        file, summary = tmp_path / f"{number}.csv", tmp_path / f"{number}.json"
        files = (f"--predict={file}", f"--summary={summary}")
        saved = f"--checkpoint-dir={alone.folder / 'checkpoints'}"
        completed(number, "-m", "hvdtrain.ssd300", *line, *files, saved)
        texts.append(file.read_text())
        told = json.loads(summary.read_text())
        assert told["eval_metrics"] == pytest.approx(alone.summary["eval_metrics"], rel=1e-9)
    assert texts[0] == texts[1]
    rows = list(csv.DictReader(texts[0].splitlines()))
    assert [row["image_id"] for row in rows] == [str(100 + 3 * place) for place in range(5)]
    detections = [one for row in rows for one in json.loads(row["detections"])]
    assert detections and all(len(one) == 6 and one[0] in COLOURS for one in detections)


def test_an_evaluation_alone_is_that_of_the_training(
    images: Path, alone: Training, tmp_path: Path
) -> None:
    line = ("-m", "hvdtrain.ssd300", *EXACT, f"--data={images}", "--mode", "evaluation")
    line += ("--strategy=ddp", f"--checkpoint={alone.newest}", "--bs=2")
    files = (f"--summary={tmp_path / 'told.json'}", f"--pictures={tmp_path / 'pictures'}")
    completed(2, *line, *files)
    told = json.loads((tmp_path / "told.json").read_text())
    assert told["eval_metrics"] == pytest.approx(alone.summary["eval_metrics"], rel=1e-9)
    assert told["eval_loss"] == pytest.approx(alone.summary["eval_loss"], rel=1e-9)
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [one.stem for one in pictures] == [f"{100 + 3 * place:012}" for place in range(5)]
    for place, one in enumerate(pictures):
        with (
            Image.open(one) as drawn,
            Image.open(images / "val2017" / f"{100 + 3 * place:06}.jpg") as stored,
        ):
            assert drawn.size == stored.size


def test_a_broken_image_is_one_line_and_exit_code_2(images: Path, tmp_path: Path) -> None:
    data = shutil.copytree(images, tmp_path / "data")
    odd = data / "train2017" / "000013.jpg"
    odd.write_bytes(odd.read_bytes()[:600])
    line = (f"--data={data}", "--global-batch-size=7", "--epochs=1", "--precision=fp32")
    outcome = resident.ranks(2, "-m", "hvdtrain.ssd300", *SMALL, *line)
    assert_one_line(outcome, 2, f"{odd} cannot be decoded")


@on_demand
def test_eight_images_are_learnt_by_heart(tmp_path: Path) -> None:
    """Augmentation is on: what is learnt is to find boxes of these images wherever they are."""
    data = tmp_path / "data"
    write(data, "train2017", 8, 10)
    shutil.copytree(data / "train2017", data / "val2017")
    file = data / "annotations" / "instances_train2017.json"
    shutil.copy(file, file.with_name("instances_val2017.json"))
    line = (*("--model=resnet18", "--workers=0", "--seed=1"), f"--data={data}", "--batch-size=2")
    schedule = ("--epochs=150", "--evaluate-epochs=150", "--warmup-steps=20", "--lr=0.004")
    told = train(2, tmp_path, "ssd300", *line, *schedule, "--lr-scaling=none", timeout=3000)
    assert told.summary["eval_metrics"]["map50"] > 0.9
