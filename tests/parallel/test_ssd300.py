"""The detector on real ranks: N compute what one computes, and what is wrong is one line."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hvdtrain.config import strategies
from tests.conftest import on_demand
from tests.parallel import resident
from tests.parallel.conftest import Training, assert_bit_equal, assert_close, train

SMALL = ("--model=resnet18", "--workers=0", "--warmup-epochs=0", "--seed=1", "--quiet")
EXACT = (*SMALL, "--precision=fp64", "--sync-batchnorm", "--lr=0.001", "--lr-scaling=none")
COLOURS = {3: (220, 60, 50), 7: (60, 90, 230)}  # by category id


def write(folder: Path, split: str, count: int, first: int) -> None:
    """Write noise of odd sizes with coloured boxes; the first image has none, one has a crowd."""
    chance = np.random.default_rng(first)
    found: dict[str, Any] = {
        "images": [],
        "annotations": [],
        "categories": [{"id": 7, "name": "blue"}, {"id": 3, "name": "red"}],
    }
    (folder / split).mkdir(parents=True)
    (folder / "annotations").mkdir(exist_ok=True)
    for place in range(count):
        identity = first + 3 * place
        width, height = (int(one) for one in chance.integers(90, 200, 2))
        pixels = chance.integers(0, 120, (height, width, 3), np.uint8)
        for number in range(place % 3 if place else 0):
            category = (3, 7)[int(chance.integers(2))]
            side = [int(one) for one in chance.integers(30, 70, 2)]
            left, top = (
                int(chance.integers(size - one))
                for size, one in zip((width, height), side, strict=True)
            )
            pixels[top : top + side[1], left : left + side[0]] = COLOURS[category]
            found["annotations"].append(
                {
                    "image_id": identity,
                    "category_id": category,
                    "bbox": [left, top, *side],
                    "iscrowd": int(place == 5 and number == 1),
                }
            )
        name = f"{identity:06}.jpg"
        Image.fromarray(pixels).save(folder / split / name, quality=95)
        found["images"].append(
            {"id": identity, "file_name": name, "width": width, "height": height}
        )
    (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(found))


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


OTHERS = [name for name, one in strategies.STRATEGIES.items() if "pytorch" in one.adapters]
CASES = [
    ("horovod", 3),
    ("ddp", 2),
    pytest.param("horovod", 2, marks=on_demand),
    *(
        pytest.param(name, size, marks=on_demand)
        for name in OTHERS
        if name not in ("horovod", "single") and strategies.STRATEGIES[name].launchers
        for size in (2, 3)
        if (name, size) != ("ddp", 2)
    ),
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


def test_predictions_are_the_same_and_give_the_same_precision(
    images: Path, alone: Training, tmp_path: Path
) -> None:
    """Of the file alone, pycocotools computes what the evaluation has told."""
    texts = []
    line = (*EXACT, f"--data={images}", "--global-batch-size=3")
    for number in (1, 3):
        file, summary = tmp_path / f"{number}.csv", tmp_path / f"{number}.json"
        outcome = resident.ranks(
            number,
            *("-m", "hvdtrain.ssd300", *line, f"--predict={file}", f"--summary={summary}"),
            f"--save={alone.folder / 'checkpoints'}",
        )
        assert outcome.code == 0, outcome.err[-3000:]
        texts.append(file.read_text())
        told = json.loads(summary.read_text())
        assert told["eval_metrics"] == pytest.approx(alone.summary["eval_metrics"], rel=1e-9)
    assert texts[0] == texts[1]
    rows = list(csv.DictReader(texts[0].splitlines()))
    assert [row["image_id"] for row in rows] == [str(100 + 3 * place) for place in range(5)]
    results = [
        {"image_id": int(row["image_id"]), "category_id": one[0], "score": one[1], "bbox": one[2:]}
        for row in rows
        for one in json.loads(row["detections"])
    ]
    assert results
    assert precision(images, results, tmp_path) == pytest.approx(
        (told["eval_metrics"]["map"], told["eval_metrics"]["map50"]), abs=1e-4
    )


def precision(images: Path, results: list[dict[str, Any]], folder: Path) -> tuple[float, float]:
    """What pycocotools makes of results and annotations, read from files as everybody does."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    content = json.loads((images / "annotations" / "instances_val2017.json").read_text())
    for number, one in enumerate(content["annotations"], 1):
        one |= {"id": number, "area": one["bbox"][2] * one["bbox"][3]}
    (folder / "truth.json").write_text(json.dumps({"info": {}, **content}))
    (folder / "results.json").write_text(json.dumps(results))
    truth = COCO(str(folder / "truth.json"))
    judge = COCOeval(truth, truth.loadRes(str(folder / "results.json")), "bbox")
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    return float(judge.stats[0]), float(judge.stats[1])


def test_an_evaluation_alone_is_that_of_the_training(
    images: Path, alone: Training, tmp_path: Path
) -> None:
    outcome = resident.ranks(
        2,
        *("-m", "hvdtrain.ssd300", *EXACT, f"--data={images}", "--mode", "evaluation"),
        *(f"--checkpoint={alone.newest}", "--bs=2", f"--summary={tmp_path / 'told.json'}"),
        f"--pictures={tmp_path / 'pictures'}",
    )
    assert outcome.code == 0, outcome.err[-3000:]
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


def refusal(*words: str) -> str:
    outcome = resident.ranks(2, "-m", "hvdtrain.ssd300", *SMALL, *words, framework="pytorch")
    assert outcome.code == 2, outcome.err[-3000:]
    assert "Traceback" not in outcome.err
    (said,) = outcome.said
    return said


def test_what_is_wrong_is_one_line_and_exit_code_2(images: Path, tmp_path: Path) -> None:
    assert "--framework tensorflow: ssd300 supports only PyTorch" in refusal(
        "--framework=tensorflow"
    )
    data = tmp_path / "data"
    shutil.copytree(images, data)
    (tmp_path / "file").touch()
    assert f"--pictures {tmp_path / 'file'}: File exists" in refusal(
        f"--data={data}", f"--pictures={tmp_path / 'file'}"
    )
    odd = data / "train2017" / "000013.jpg"
    odd.write_bytes(odd.read_bytes()[:600])
    line = (f"--data={data}", "--global-batch-size=7", "--epochs=1", "--precision=fp32")
    assert f"{odd} cannot be decoded" in refusal(*line)
    Image.new("RGB", (50, 60)).save(odd)
    said = refusal(*line)
    assert f"{odd} has 50 x 60 pixels, " in said
    odd.unlink()
    assert "lists 1 image not to be found in train2017, 000013.jpg" in refusal(*line)


def test_a_broken_image_is_left_out(images: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(images, data)
    (data / "train2017" / "000013.jpg").write_bytes(b"no image")
    (data / "train2017" / "000016.jpg").unlink()
    line = (*SMALL, f"--data={data}", "--precision=fp32", "--skip-broken")
    told = train(2, tmp_path, "ssd300", *line, "--global-batch-size=6", "--epochs=1").summary
    assert (told["samples_trained"], told["eval_samples"]) == (5, 5)


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
