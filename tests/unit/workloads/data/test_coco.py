"""Data in COCO's layout: boxes, ids and images that are not as they should be."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config.command_line import parse
from hvdtrain.errors import UsageError
from hvdtrain.steps.world import World
from hvdtrain.training.plan import TrainingPlan, make_plan
from hvdtrain.workloads.data.coco import Annotation, Coco, load
from hvdtrain.workloads.ssd300.task import ALIASES, WORKLOAD, DetectorOptions
from tests.conftest import error_of

Content = dict[str, Any]


def annotation(image: int, *bbox: float, category: int = 7, **more: Any) -> Content:
    return {"image_id": image, "bbox": list(bbox), "category_id": category, **more}


def content(*annotations: Content, ids: tuple[int, ...] = (20, 10)) -> Content:
    """Two images of 40 x 30 pixels, the later id first; three categories with gaps in their ids."""
    return {
        "images": [
            {"id": identity, "file_name": f"{identity}.jpg", "width": 40, "height": 30}
            for identity in ids
        ],
        "annotations": [{"id": number, **entry} for number, entry in enumerate(annotations)],
        "categories": [
            {"id": 7, "name": "ant"},
            {"id": 90, "name": "bee"},
            {"id": 3, "name": "cat"},
        ],
    }


def write(
    folder: Path,
    document: Any,
    split: str = "train2017",
    names: Sequence[str] = ("10.jpg", "20.jpg"),
) -> Path:
    """Write a split; its images of these ``names`` are not opened here."""
    (folder / split).mkdir(parents=True, exist_ok=True)
    (folder / "annotations").mkdir(exist_ok=True)
    for name in names:
        (folder / split / name).touch()
    text = document if isinstance(document, str) else json.dumps(document)
    (folder / "annotations" / f"instances_{split}.json").write_text(text)
    return folder


def train(folder: Path, *annotations: Content, **how: Any) -> Coco:
    return load(write(folder, content(*annotations)), **how)[0]


refusal = functools.partial(error_of, load)


def rows(coco: Coco) -> list[list[tuple[list[float], int]]]:
    """Of each image its boxes and their category ids."""
    return [
        [(box.tolist(), coco.categories[label]) for box, label in zip(*coco.of(at), strict=True)]
        for at in range(len(coco.ids))
    ]


def test_images_come_by_id_and_labels_are_places_among_the_ids(tmp_path: Path) -> None:
    coco = train(
        tmp_path,
        annotation(20, 1, 2, 3, 4, category=90),
        annotation(10, 5, 6, 7, 8, category=3),
        annotation(20, 0, 0, 40, 30),
    )
    assert coco.ids.tolist() == [10, 20]
    assert list(coco.files.names) == ["10.jpg", "20.jpg"]
    assert coco.sizes.tolist() == [[40, 30], [40, 30]]
    assert (coco.categories, coco.names) == ([3, 7, 90], ["cat", "ant", "bee"])
    assert rows(coco) == [[([5, 6, 12, 14], 3)], [([1, 2, 4, 6], 90), ([0, 0, 40, 30], 7)]]
    assert coco.labels.tolist() == [0, 2, 1]
    assert coco.notes == ()


def test_images_without_annotation_stay(tmp_path: Path) -> None:
    assert rows(train(tmp_path, annotation(20, 1, 2, 3, 4))) == [[], [([1, 2, 4, 6], 7)]]
    empty = train(tmp_path)
    assert rows(empty) == [[], []]
    assert (empty.boxes.shape, empty.labels.shape) == ((0, 4), (0,))


def test_crowds_are_no_boxes_but_stay_for_the_evaluation(tmp_path: Path) -> None:
    coco = train(
        tmp_path,
        annotation(10, 1, 2, 3, 4, iscrowd=1, segmentation={"counts": [1], "size": [30, 40]}),
        annotation(10, 1, 2, 3, 4, iscrowd=0, area=9.5, segmentation=[[1, 2, 3, 4, 5, 6]]),
        annotation(10, 1, 2, 3, 4, iscrowd=None, area=None),
    )
    assert rows(coco) == [[([1, 2, 4, 6], 7)] * 2, []]
    assert coco.annotations == [
        Annotation(10, 7, (1, 2, 3, 4), area, crowd) for area, crowd in ((12, 1), (9.5, 0), (12, 0))
    ]
    assert coco.notes == ()


def test_boxes_are_clipped_and_those_without_area_reported(tmp_path: Path) -> None:
    coco = train(
        tmp_path,
        annotation(10, -5, -5, 10, 10),
        annotation(10, 35, 25, 10, 10),
        annotation(10, 38.5, 10, 1.5, 0.25),
        annotation(10, 40, 0, 5, 5),  # outside
        annotation(10, -9, 0, 5, 5),
        annotation(10, 5, 5, 0, 5),  # no area
        annotation(10, 5, 5, 3, -2),
    )
    assert rows(coco)[0] == [
        ([0, 0, 5, 5], 7),
        ([35, 25, 40, 30], 7),
        ([38.5, 10, 40, 10.25], 7),
    ]
    assert coco.notes == ("train2017: skipped 4 annotations outside their image or without area",)
    assert coco.annotations[0].bbox == (-5, -5, 10, 10)


def test_annotations_of_unlisted_images_are_reported(tmp_path: Path) -> None:
    coco = train(tmp_path, annotation(99, 1, 2, 3, 4), annotation(10, 1, 2, 3, 4))
    assert rows(coco) == [[([1, 2, 4, 6], 7)], []]
    assert len(coco.annotations) == 1
    assert coco.notes == ("train2017: skipped 1 annotation of an image not listed",)


@pytest.mark.parametrize("kind", ["images", "categories"])
def test_an_id_of_two_is_named(tmp_path: Path, kind: str) -> None:
    twice = content()
    twice[kind].append(dict(twice[kind][0], name="another", file_name="30.jpg"))
    message = refusal(write(tmp_path, twice))
    assert f"id {twice[kind][0]['id']}" in message and "instances_train2017.json" in message


def test_images_that_are_not_there(tmp_path: Path) -> None:
    boxes = (annotation(10, 1, 2, 3, 4), annotation(20, 5, 6, 7, 8, category=90))
    write(tmp_path, content(*boxes, ids=(20, 15, 10)))
    message = refusal(tmp_path)
    assert "lists 1 image not to be found in train2017, 15.jpg for one" in message
    assert "--skip-broken" in message
    whole = load(tmp_path, skip_broken=True)[0]
    assert whole.ids.tolist() == [10, 20]
    assert whole.notes == ("skipped 1 image not to be found, 15.jpg for one",)
    (tmp_path / "train2017" / "10.jpg").unlink()
    left = load(tmp_path, skip_broken=True)[0]
    assert rows(left) == [[([5, 6, 12, 14], 90)]]
    assert [entry.image_id for entry in left.annotations] == [20]
    assert left.first.tolist() == [0, 1]
    assert left.notes == ("skipped 2 images not to be found, 10.jpg for one",)
    (tmp_path / "train2017" / "20.jpg").unlink()
    assert "all images that" in refusal(tmp_path, skip_broken=True)


@pytest.mark.parametrize("name", ["a.webp", "a.bmp", "a.tif", "a.jfif", "a.gif", "a"])
def test_an_image_of_another_kind_is_named_as_such(tmp_path: Path, name: str) -> None:
    document = content(ids=(20, 15, 10))
    document["images"][1]["file_name"] = name
    write(tmp_path, document, names=("10.jpg", "20.jpg", name))
    message = refusal(tmp_path)
    kinds = "1 image missing or of other kinds than .jpg, .jpeg, .png"
    assert f"lists {kinds} in train2017, {name} for one: convert them" in message
    assert "copy" not in message
    left = load(tmp_path, skip_broken=True)[0]
    assert left.ids.tolist() == [10, 20]
    assert left.notes == (f"skipped {kinds}, {name} for one",)


@pytest.mark.parametrize(
    ("listed", "stored"),
    [
        ("./a.jpg", "a.jpg"),
        ("train2017/a.jpg", "a.jpg"),
        ("b\\a.jpg", "b/a.jpg"),
        ("u\u0308.jpg", "\u00fc.jpg"),  # as macOS and as others write a letter
        ("\u00fc.jpg", "u\u0308.jpg"),
    ],
)
def test_a_name_is_found_as_other_tools_write_it(tmp_path: Path, listed: str, stored: str) -> None:
    document = content()
    document["images"][0]["file_name"] = listed
    (tmp_path / "train2017" / "b").mkdir(parents=True)
    coco = load(write(tmp_path, document, names=("10.jpg", "20.jpg", stored)))[0]
    assert list(coco.files.names) == ["10.jpg", stored]


def test_val_is_there_or_not_and_has_the_same_categories(tmp_path: Path) -> None:
    write(tmp_path, content())
    assert load(tmp_path)[1] is None
    write(tmp_path, content(annotation(10, 1, 2, 3, 4)), "val2017")
    val = load(tmp_path)[1]
    assert val is not None and len(val.labels) == 1
    for change in ({"id": 8}, {"name": "wasp"}):
        changed = content()
        changed["categories"][0] |= change
        write(tmp_path, changed, "val2017")
        assert "instances_val2017.json has other categories" in refusal(tmp_path)
    changed["categories"] = content()["categories"][::-1]  # another order is no other set
    assert load(write(tmp_path, changed, "val2017"))[1] is not None


def test_missing_files_are_named(tmp_path: Path) -> None:
    assert "no such directory" in refusal(tmp_path / "absent")
    assert "annotations/instances_*.json" in refusal(tmp_path)
    write(tmp_path, content())
    (tmp_path / "annotations" / "instances_val2017.json").write_text(json.dumps(content()))
    assert "val2017/" in refusal(tmp_path)
    for kind in ("images", "categories"):
        assert "lists no" in refusal(write(tmp_path, content() | {kind: []}))


@pytest.mark.parametrize("text", ["", "{", "[]"])
def test_a_damaged_file_is_named(tmp_path: Path, text: str) -> None:
    message = refusal(write(tmp_path, text))
    assert "instances_train2017.json is not in COCO's form" in message


def test_a_pipe_is_not_waited_for_and_a_huge_file_not_read(tmp_path: Path) -> None:
    file = write(tmp_path, content()) / "annotations" / "instances_train2017.json"
    os.truncate(file, 2**32 + 1)
    assert f"{file} cannot be read: more than 4,294,967,296 bytes" in refusal(tmp_path)
    file.unlink()
    os.mkfifo(file)
    assert f"{file} cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"bbox": [1, 2, 3]}, "$.annotations[0].bbox"),
        ({"category_id": 8}, "image id 10 has a category id that is not listed"),
    ],
)
@pytest.mark.parametrize("crowd", [0, 1])
def test_an_annotation_that_an_evaluation_would_stumble_over_is_refused(
    tmp_path: Path, change: Content, words: str, crowd: int
) -> None:
    entry = annotation(10, 1, 2, 3, 4, iscrowd=crowd) | change
    assert words in refusal(write(tmp_path, content(entry)))


def test_the_digest_is_of_names_sizes_and_boxes(tmp_path: Path) -> None:
    boxes = (annotation(10, 1, 2, 3, 4), annotation(20, 5, 6, 7, 8, category=90))
    digest = train(tmp_path / "here", *boxes).digest
    assert train(tmp_path / "there", *boxes[::-1]).digest == digest  # of images, not of the file
    for moved in (annotation(10, 1, 2.5, 3, 4), annotation(10, 1, 2, 3, 4, category=3)):
        assert train(tmp_path / "there", moved, boxes[1]).digest != digest
    larger = content(*boxes)
    larger["images"][0]["width"] += 1
    assert load(write(tmp_path / "there", larger))[0].digest != digest
    (tmp_path / "there" / "train2017" / "30.jpg").touch()
    larger = content(*boxes)
    larger["images"][0]["file_name"] = "30.jpg"
    assert load(write(tmp_path / "there", larger))[0].digest != digest


# The command line of the articles, and the recipe


def read(*words: str) -> Any:
    return parse("ssd300", words, description="words", epilog="end", kind=DetectorOptions)


VALUES = {  # of aliases that are no switch; what follows is the value of its option
    "--backbone": "resnet18",
    "--bs": "8",
    "-e": "12",
    "--learning-rate": "2.6e-3",
    "-m": "0.8",
    "--wd": "5e-4",
    "-s": "42",
    "--multistep": "43,54",
    "--warmup": "300",
    "--evaluation": "21,31",
    "--report-period": "100",
    "--num-workers": "4",
}


@pytest.mark.parametrize("alias", [name for name in ALIASES if not name.endswith("-config")])
def test_an_alias_equals_its_option(alias: str) -> None:
    value, rest = VALUES.get(alias, ""), ["--checkpoint-dir=c"] * (alias == "--mode evaluation")
    option = read(*f"{ALIASES[alias]} {value}".split(), *rest)
    assert read(*f"{alias} {value}".split(), *rest) == option
    name, _, last = f"{alias} {value}".strip().rpartition(" ")
    assert not name or read(f"{name}={last}", *rest) == option
    first, *words = f"{alias} {value}".split()
    assert (
        read(f"--{first[2:].replace('-', '_')}" if first[1] == "-" else first, *words, *rest)
        == option
    )
    line = f"  {alias:27} {ALIASES[alias] or '(no effect)'}"
    assert line in WORKLOAD.epilog.splitlines()


def test_settings_in_files_are_spelled_so_too(tmp_path: Path) -> None:
    model, data = tmp_path / "model.yaml", tmp_path / "data.yaml"
    model.write_text("model-name: ssd300\nbackbone: resnet34\nmultistep: [43, 54]\namp: true\n")
    data.write_text("data: coco\nnum_workers: 4\nbs: 16\nmulti-gpu: true\nmode: training\n")
    files = (f"--model-config={model}", "--data-config", str(data))
    options = read(*files, "--bs=8")
    assert options == read(
        *("--model=resnet34", "--multistep", "43", "54", "--data=coco", "--workers=4"),
        *("--batch-size=8", "--precision=auto"),
    )
    for text, words in ((f"data-config: {data}\n", "nested"), ("bs: 4\nbatch-size: 8\n", "line 1")):
        model.write_text(text)
        with pytest.raises(UsageError, match=words):
            read(files[0])


@pytest.mark.parametrize("line", ["--mode dance", "--mode=dance", "--model-name ssd512"])
def test_another_value_is_refused(line: str) -> None:
    assert "choose from" in error_of(read, *line.split())


def test_a_missing_value_is_refused() -> None:
    assert error_of(read, "--mode") == "--mode: expected one argument"


def plan(*words: str) -> TrainingPlan:
    return make_plan(WORKLOAD, read(*words), World(0, 1, 0, 1, "host", 1))


def test_milestones_scale_with_the_training_unless_they_are_specified() -> None:
    training_plan = plan("--data=coco", "-e", "13")
    assert training_plan.schedule["milestones"] == pytest.approx((8.6, 10.8))
    assert plan("-e", "13", "--multistep", "4", "9").schedule["milestones"] == (4.0, 9.0)


def test_drawn_images_are_for_a_hundred_updates() -> None:
    assert plan().num_steps == 100
    assert plan("-e", "2").num_steps is None
    assert plan("--num-steps=7").num_steps == 7
