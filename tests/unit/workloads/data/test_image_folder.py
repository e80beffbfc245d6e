"""Folders of images: classes, labels, what is missing and what is broken."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hvdtrain.errors import UsageError
from hvdtrain.workloads.data.files import FolderFiles, Names
from hvdtrain.workloads.data.image_folder import (
    ImageOptions,
    decoding_error,
    load,
    notes,
    scan,
    without_broken,
)
from hvdtrain.workloads.resnet.task import WORKLOAD as RESNET
from tests.conftest import error_of


def picture(path: Path, mode: str = "RGB", size: tuple[int, int] = (24, 24)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    bands = len(Image.new(mode, (1, 1)).getbands())
    pixels = np.random.default_rng(1).integers(0, 256, (*size[::-1], bands), np.uint8)
    Image.fromarray(pixels.squeeze(), mode).save(path)
    return path


def folder(root: Path, **classes: int) -> Path:
    for name, count in classes.items():
        for number in range(count):
            picture(root / name / f"{number}.jpg")
    return root


def broken(path: Path) -> str | None:
    return decoding_error(FolderFiles(path.parent, Names.of([path.name])), 0)


refusal = functools.partial(error_of, load)


def test_classes_are_folders_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder(tmp_path / "train", cat=2, ant=3, dog=1)
    folder(tmp_path / "val", dog=1, ant=1, cat=1)
    train, val = load(tmp_path)
    assert train.classes == ["ant", "cat", "dog"]
    assert train.labels.tolist() == [0, 0, 0, 1, 1, 2]
    assert train.labels.dtype == np.int64
    names = list(train.files.names)
    assert [name.partition("/")[0] for name in names] == ["ant"] * 3 + ["cat"] * 2 + ["dog"]
    assert names == sorted(names)
    assert val is not None
    assert val.labels.tolist() == [0, 1, 2]


def test_labels_mean_the_same_in_val_if_a_class_or_all_is_absent(tmp_path: Path) -> None:
    folder(tmp_path / "train", ant=1, cat=1, dog=1)
    assert load(tmp_path)[1] is None
    folder(tmp_path / "val", dog=2, cat=1)
    _, val = load(tmp_path)
    assert val is not None
    assert val.labels.tolist() == [1, 2, 2]
    assert val.labels.dtype == np.int64
    assert val.classes == ["ant", "cat", "dog"]


@pytest.mark.parametrize(
    ("made", "emptied", "words"),
    [
        ({}, "absent", "absent: no such directory"),
        ({"val": {"ant": 1}}, "", "train/CLASS"),
        ({"val": {"ant": 1}}, "train", "train"),
        ({"train": {"ant": 1}}, "val", "val"),
        ({"train": {"ant": 1, "cat": 1}}, "train/bee", "train/bee"),
        ({"train": {"ant": 1}, "val": {"ant": 1, "bee": 1}}, "", "val/bee"),
    ],
)
def test_what_is_missing_is_named(
    tmp_path: Path, made: dict[str, dict[str, int]], emptied: str, words: str
) -> None:
    for split, classes in made.items():
        folder(tmp_path / split, **classes)
    if emptied == "absent":
        assert words in refusal(tmp_path / "absent")
        return
    if emptied:
        (tmp_path / emptied).mkdir()
        for name in ("notes.txt", "1.jpg.part"):  # no image
            (tmp_path / emptied / name).write_text("")
    message = refusal(tmp_path)
    assert words in message and str(tmp_path) in message


def test_endings_in_any_case_and_folders_below(tmp_path: Path) -> None:
    for name in ("a.JPG", "b.jpeg", "c.png", "deep/er/d.jpg", "e.Jpeg"):
        picture(tmp_path / "ant" / name)
    picture(tmp_path / "elsewhere" / "f.jpg")
    (tmp_path / "ant" / "more").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "ant" / "deep" / "loop").symlink_to("..")
    (tmp_path / "ant" / "readme.md").write_text("no image")
    (tmp_path / "list.txt").write_text("no class")
    folder = scan(tmp_path)
    names = sorted(Path(name).name for name in folder.files.names)
    assert names == ["a.JPG", "b.jpeg", "c.png", "d.jpg", "e.Jpeg", "f.jpg", "f.jpg"]
    assert folder.classes == ["ant", "elsewhere"]
    (tmp_path / "ant" / "itself").symlink_to("itself")
    with pytest.raises(UsageError, match="/ant/itself: Too many levels of symbolic links"):
        scan(tmp_path)


def test_hidden_folders_and_files_are_not_read(tmp_path: Path) -> None:
    """Of Jupyter, which would be a class and move the labels, and of macOS, beside an image."""
    for split in ("train", "val"):
        folder(tmp_path / split, ant=1, cat=1)
        for name in (".ipynb_checkpoints/0.jpg", "ant/.ipynb_checkpoints/0-checkpoint.jpg"):
            picture(tmp_path / split / name)
        (tmp_path / split / "cat" / "._0.jpg").write_bytes(b"\0\5\x16\7")
    train, val = load(tmp_path)
    assert val is not None
    for split in (train, val):
        assert (list(split.files.names), split.labels.tolist()) == (
            ["ant/0.jpg", "cat/0.jpg"],
            [0, 1],
        )
        assert split.classes == ["ant", "cat"]
    assert notes(tmp_path, train, val) == []


@pytest.mark.parametrize(
    ("made", "line"),
    [
        ((), "no val/ in {}: nothing is evaluated"),
        ((".git", "valid"), "no val/ in {} (there is valid/): nothing is evaluated"),
        (("Val", "test"), "no val/ in {} (there is Val/, test/): nothing is evaluated"),
        (("val/dog",), "val/ has no images of 2 of the 3 classes of train/, e.g. ant"),
        (("val/ant", "val/cat", "val/dog"), None),
    ],
)
def test_what_is_not_evaluated_is_said(
    tmp_path: Path, made: tuple[str, ...], line: str | None
) -> None:
    folder(tmp_path / "train", ant=1, cat=1, dog=1)
    for name in made:
        folder(tmp_path, **{name: 1})
    assert notes(tmp_path, *load(tmp_path)) == ([line.format(tmp_path)] if line else [])


def test_images_of_other_kinds_are_counted(tmp_path: Path) -> None:
    for split, others in (("train", ("a.webp", "b.BMP", "deep/c.tiff")), ("val", ("d.gif",))):
        folder(tmp_path / split, ant=1)
        for name in (*others, "notes.txt", "Thumbs.db", ".hidden.webp"):
            path = tmp_path / split / "ant" / name
            path.parent.mkdir(exist_ok=True)
            path.write_text("")
    (tmp_path / "train" / "ant" / "folder.tif").mkdir()
    train, val = load(tmp_path)
    first = tmp_path / "train" / "ant" / "a.webp"
    line = f"skipped 4 images of other kinds (not .jpg, .jpeg, .png, e.g. {first})"
    assert len(train.files) == 1 and notes(tmp_path, train, val) == [line]


@pytest.mark.parametrize("kind", ["folder", "link to nothing"])
def test_what_is_no_file_is_refused_or_skipped(tmp_path: Path, kind: str) -> None:
    folder(tmp_path / "train", ant=2)
    odd = tmp_path / "train" / "ant" / "odd.jpg"
    if kind == "folder":
        odd.mkdir()
    else:
        odd.symlink_to(tmp_path / "nothing")
    assert f"{odd} cannot be decoded" in refusal(tmp_path)
    train, _ = load(tmp_path, skip_broken=True)
    whole, left_out = without_broken(train, workers=1)
    assert left_out == [str(odd)]
    assert len(whole.files) == 2


def test_the_digest_is_of_names_and_labels_wherever_they_are(tmp_path: Path) -> None:
    here, there = folder(tmp_path / "here", ant=2, bee=1), folder(tmp_path / "there", ant=2, bee=1)
    assert scan(here).digest == scan(there).digest
    (there / "ant" / "1.jpg").rename(there / "ant" / "2.jpg")
    assert scan(here).digest != scan(there).digest
    (there / "ant" / "2.jpg").rename(there / "bee" / "1.jpg")
    (here / "ant" / "1.jpg").rename(here / "ant" / "2.jpg")
    assert scan(here).digest != scan(there).digest


def test_a_class_may_be_a_link_to_a_folder(tmp_path: Path) -> None:
    folder(tmp_path / "elsewhere", ant=2)
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "ant").symlink_to(tmp_path / "elsewhere" / "ant")
    assert len(scan(tmp_path / "train").files) == 2


@pytest.mark.parametrize(
    ("name", "mode"), [("x.jpg", "RGB"), ("x.jpg", "L"), ("x.jpg", "CMYK"), ("x.png", "RGBA")]
)
def test_an_image_of_any_mode_is_not_broken(tmp_path: Path, name: str, mode: str) -> None:
    path = picture(tmp_path / name, mode)
    with Image.open(path) as image:
        assert image.mode == mode
    assert broken(path) is None


def test_broken_images_are_reported_with_a_reason(tmp_path: Path) -> None:
    path = picture(tmp_path / "x.jpg")
    whole = path.read_bytes()
    for content in (b"", b"<html>404</html>", whole[:100], whole[: len(whole) // 2], whole[20:]):
        path.write_bytes(content)
        assert broken(path), content[:20]
    assert broken(tmp_path / "absent.jpg")


def test_a_small_file_of_a_huge_image_is_not_decoded(tmp_path: Path) -> None:
    Image.new("1", (20_000, 10_000)).save(path := tmp_path / "huge.png")
    assert path.stat().st_size < 2**16
    assert "DecompressionBombError" in (broken(path) or "")


def test_without_broken_leaves_out_and_lists_just_those(tmp_path: Path) -> None:
    folder(tmp_path, ant=3, bee=2, cat=2)
    picture(tmp_path / "cat" / "grey.jpg", "L")
    picture(tmp_path / "cat" / "print.jpg", "CMYK")
    damaged = [tmp_path / "ant" / "1.jpg", tmp_path / "bee" / "0.jpg", tmp_path / "bee" / "1.jpg"]
    for path in damaged:
        path.write_bytes(path.read_bytes()[:150])
    before = scan(tmp_path)
    after, left_out = without_broken(before, workers=2)
    assert left_out == [str(path) for path in damaged]
    kept = [name for name in before.files.names if tmp_path / name not in damaged]
    assert list(after.files.names) == kept
    assert after.labels.tolist() == [0, 0, 2, 2, 2, 2]
    assert after.classes == ["ant", "bee", "cat"]  # the labels mean what they meant


def test_nothing_left_is_wrong_use(tmp_path: Path) -> None:
    for path in folder(tmp_path, ant=1).rglob("*.jpg"):
        path.write_bytes(b"x")
    with pytest.raises(UsageError, match=r"0\.jpg"):
        without_broken(scan(tmp_path), workers=0)


def test_dali_is_refused_before_a_framework_is_imported() -> None:
    message = error_of(RESNET.build, ImageOptions(framework="tensorflow", decoder="dali"))
    assert message == "--decoder dali: tensorflow decodes images itself: omit it"
