"""Packing: the samples are those of the folder, the result is atomic and reproducible."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from hvdtrain import cli
from hvdtrain.commands.pack.packing import Packing
from hvdtrain.commands.pack.source import PackOptions
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.workloads.data.files import Files, PackedFiles, open_split, read_file
from hvdtrain.workloads.data.image_folder import ImageFolder, load, without_broken
from hvdtrain.workloads.data.packed import INDEX, WORK, Pack, PackIndex
from hvdtrain.workloads.mnist import data as mnist
from tests.conftest import SHARED, error_of, flipped, unmeasured
from tests.unit.workloads.data.test_image_folder import picture
from tests.unit.workloads.mnist.test_data import write as write_mnist


def fill(root: Path, names: dict[str, bytes]) -> Path:
    for name, content in names.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return root


def noise(count: int = 12, size: int = 3000) -> dict[str, bytes]:
    """Return files of an image folder of two classes, with random content, of various sizes."""
    draw = np.random.default_rng(3)
    return {
        f"{split}/{label}/{number}.jpg": draw.bytes(size + 97 * number)
        for split in ("train", "val")
        for label in ("ant", "bee")
        for number in range(count)
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return fill(tmp_path / "folder", noise())


def packed(
    folder: Path, out: Path, *, size: int = 2**14, workers: int = 2, resize: int = 0
) -> Pack:
    return Packing(folder, out, PackOptions(size, workers, resize)).run()[0]


def bytes_of(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.iterdir()) if path.is_file()}


def assert_same_files(expected: Files | None, actual: Files | None) -> None:
    assert expected is not None
    assert actual is not None
    assert list(expected.names) == list(actual.names)
    assert (expected.digest, len(expected)) == (actual.digest, len(actual))
    for index in range(len(expected)):
        with expected.open(index) as file, actual.open(index) as same:
            assert file.read() == same.read()


def assert_equal(expected: ImageFolder | None, actual: ImageFolder | None) -> None:
    assert expected is not None
    assert actual is not None
    assert_same_files(expected.files, actual.files)
    assert expected.labels.tolist() == actual.labels.tolist()
    assert (expected.labels.dtype, expected.classes) == (actual.labels.dtype, actual.classes)
    assert expected.digest == actual.digest


def test_the_samples_are_those_of_the_folder(folder: Path, tmp_path: Path) -> None:
    packed(folder, tmp_path / "out")
    for split, pack in zip(load(folder), load(tmp_path / "out"), strict=True):
        assert_equal(split, pack)
        assert pack is not None
        assert_equal(split, pickle.loads(pickle.dumps(pack)))
        assert len(pickle.dumps(pack.files)) < 500  # its path only, not its samples
    assert len(list((tmp_path / "out").glob("train-*.tar"))) > 3


NAME = st.binary(min_size=1, max_size=30).filter(
    lambda name: not set(name) & set(b"/\0") and not name.startswith(b".")  # hidden
)
TREES = st.dictionaries(
    st.tuples(NAME, st.lists(NAME, max_size=2).map(tuple), NAME),
    st.binary(max_size=2000),
    min_size=1,
    max_size=8,
)


@settings(max_examples=40, deadline=None)
@given(tree=TREES, size=st.integers(1, 2**14))
def test_any_directory_tree_is_packed(
    tree: dict[tuple[bytes, tuple[bytes, ...], bytes], bytes],
    size: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    root = tmp_path_factory.mktemp("tree")
    written = {}
    for (label, between, name), content in tree.items():
        path = root / "in" / "train" / Path(*map(os.fsdecode, (label, *between, name + b".JPEG")))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except (NotADirectoryError, FileExistsError, IsADirectoryError):
            continue  # there is already a file or folder of this name
        written[os.fspath(path.relative_to(root / "in"))] = content
    if any(path.is_dir() for path in root.rglob("*.JPEG")):
        return
    packed(root / "in", root / "out", size=size)
    assert_equal(load(root / "in")[0], load(root / "out")[0])
    assert cli.main(["pack", "--check", str(root / "out")]) == 0
    # WebDataset's format: members with the same name up to the first dot are a sample.
    samples: dict[str, dict[str, bytes]] = {}
    for shard in sorted((root / "out").glob("*.tar")):
        with tarfile.open(shard) as tar:
            for member in tar:
                key, _, kind = member.name.partition(".")
                file = tar.extractfile(member)
                assert file is not None
                samples.setdefault(key, {})[kind] = file.read()
    assert len(samples) == len(written)
    for sample in samples.values():
        assert sample["JPEG"] == written[json.loads(sample["json"])["path"]]


def test_tar_reads_a_shard(folder: Path, tmp_path: Path) -> None:
    packed(folder, tmp_path / "out", size=2**30)
    (tmp_path / "members").mkdir()
    shard = tmp_path / "out" / "train-000000.tar"
    subprocess.run(["tar", "xf", str(shard), "-C", str(tmp_path / "members")], check=True)
    names = sorted(path.name for path in (tmp_path / "members").iterdir())
    assert names == [f"{n:09}.{kind}" for n in range(24) for kind in ("jpg", "json")]
    metadata = json.loads((tmp_path / "members" / "000000013.json").read_text())
    assert metadata == {"path": "train/bee/1.jpg", "label": 1, "class": "bee"}
    content = (folder / metadata["path"]).read_bytes()
    assert (tmp_path / "members" / "000000013.jpg").read_bytes() == content


def test_packing_is_reproducible(folder: Path, tmp_path: Path) -> None:
    for workers in (1, 4):
        packed(folder, tmp_path / f"{workers}", workers=workers)
    for path in folder.rglob("*"):
        os.utime(path, (1, 1))
    packed(folder, tmp_path / "later", workers=3)
    first = bytes_of(tmp_path / "1")
    assert bytes_of(tmp_path / "4") == first
    assert bytes_of(tmp_path / "later") == first


SLOW = """
import os, sys, time
from pathlib import Path
from hvdtrain.commands.pack import packing
header, written = packing._header, 0
def slowly(*args):
    global written
    written += 1
    if written == int(sys.argv[3]):
        print("ready", flush=True)
        time.sleep(5)
    return header(*args)
packing._header = slowly
options = packing.PackOptions(2**14, 2)
packing.Packing(Path(sys.argv[1]), Path(sys.argv[2]), options).run()
"""


@pytest.mark.parametrize(
    ("headers", "number"),
    [(1, signal.SIGKILL), (33, signal.SIGKILL), (95, signal.SIGKILL), (40, signal.SIGINT)],
)
def test_an_ended_run_is_continued(
    folder: Path, tmp_path: Path, headers: int, number: signal.Signals
) -> None:
    packed(folder, tmp_path / "whole")
    out = tmp_path / "out"
    line = [sys.executable, "-c", SLOW, str(folder), str(out), str(headers)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(line, env=unmeasured(), text=True, **output) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        assert process.wait(30) != 0
    with pytest.raises(UsageError, match="run `hvdtrain pack"):
        load(out)
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert before or headers < 20  # the other thread may be ahead
    noted = {path.name.removesuffix(".json") for path in (out / WORK).glob("*.json")}
    packed(folder, out)
    assert bytes_of(out) == bytes_of(tmp_path / "whole")
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert {name: before[name] for name in noted} == {name: after[name] for name in noted}
    assert [path.name for path in (out / WORK).iterdir()] == ["lock"]


def test_damaged_or_changed_shards_are_packed_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(PackIndex, "save", lambda *_: sys.exit(9))
        with pytest.raises(SystemExit):
            packed(folder, out)
    assert not (out / INDEX).exists()
    shards = sorted(out.glob("*.tar"))
    shards[1].write_bytes(flipped(shards[1].read_bytes(), 700))
    shards[2].write_bytes(b"short")
    shards[3].unlink()
    (out / "val-000777.tar").write_bytes(b"of other options")
    changed = folder / "train/ant/0.jpg"
    changed.write_bytes(changed.read_bytes()[::-1])
    packed(folder, out)
    packed(folder, tmp_path / "whole")
    assert bytes_of(out) == bytes_of(tmp_path / "whole")


@pytest.mark.parametrize("resize", [0, 8])
def test_a_file_of_the_same_size_that_was_replaced_is_reported(tmp_path: Path, resize: int) -> None:
    out, image = tmp_path / "out", tmp_path / "in/train/ant/2.png"
    image.parent.mkdir(parents=True)
    Image.new("L", (9, 9), 1).save(image, "BMP")  # whose size is that of any other image
    packed(tmp_path / "in", out, resize=resize)
    copy = shutil.copytree(tmp_path / "in", tmp_path / "copy")  # newer than the index
    assert Packing(copy, out, PackOptions(2**14, 2, resize)).run()[1]
    Image.new("L", (9, 9), 200).save(image, "BMP")
    os.utime(image, (1, 1))  # as a download that keeps the publisher's time
    with pytest.raises(UsageError, match=r"2\.png was changed since .*out was packed: specify"):
        packed(tmp_path / "in", out, resize=resize)


def test_two_parallel_runs_succeed(folder: Path, tmp_path: Path) -> None:
    program = "from hvdtrain.cli import main; raise SystemExit(main())"
    line = [sys.executable, "-c", program, "pack", str(folder), str(tmp_path / "out")]
    runs = [subprocess.Popen(line, env=unmeasured(), stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [run.wait(60) for run in runs] == [0, 0]
    assert cli.main(["pack", "--check", str(tmp_path / "out")]) == 0


@pytest.mark.parametrize(
    ("kept", "word"), [(None, "No such file"), (-512, "bytes")], ids=["missing", "truncated"]
)
def test_a_missing_or_truncated_shard_is_reported(
    folder: Path, tmp_path: Path, kept: int | None, word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    packed(folder, tmp_path / "out")
    shard = tmp_path / "out" / "train-000002.tar"
    content = shard.read_bytes()
    shard.unlink()
    if kept:
        shard.write_bytes(content[:kept])
    message = error_of(load, tmp_path / "out")
    assert word in message and str(shard) in message
    assert cli.main(["pack", "--check", str(tmp_path / "out")]) == 1
    out = capsys.readouterr().out
    assert str(shard) in out
    assert "1 bad" in out


def test_check_reports_each_shard_and_an_index_with_a_changed_bit(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    packed(folder, out)
    assert cli.main(["pack", str(folder), str(out), "--check", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["ok"], data["samples"], data["splits"]) == (True, 48, {"train": 24, "val": 24})
    bad = [out / "train-000001.tar", out / "val-000000.tar"]
    for path in bad:
        path.write_bytes(flipped(path.read_bytes(), 5000, 4))
    assert cli.main(["pack", "--check", str(out), "--json"]) == 1
    data = json.loads(capsys.readouterr().out)
    assert [problem.partition(":")[0] for problem in data["problems"]] == [*map(str, bad)]
    index = out / INDEX
    index.write_bytes(index.read_bytes()[::-1].replace(b"3/tna", b"4/tna", 1)[::-1])
    assert cli.main(["pack", "--check", str(out), "--json"]) == 1
    assert str(index) in json.loads(capsys.readouterr().out)["problems"][0]


@pytest.mark.parametrize("kept", [0, 200, -1])
def test_a_truncated_index_is_reported(folder: Path, tmp_path: Path, kept: int) -> None:
    packed(folder, tmp_path / "out")
    index = tmp_path / "out" / INDEX
    index.write_bytes(index.read_bytes()[:kept])
    assert f"{index} is damaged" in error_of(load, tmp_path / "out")


def test_a_newer_version_is_rejected(folder: Path, tmp_path: Path) -> None:
    packed(folder, tmp_path / "out")
    index = tmp_path / "out" / INDEX
    content = index.read_bytes()
    assert content.count(rb"\"version\": 1") == 1
    index.write_bytes(content.replace(rb"\"version\": 1", rb"\"version\": 2"))
    with pytest.raises(UsageError, match="version 2"):
        load(tmp_path / "out")


def test_a_header_larger_than_any_is_not_read(folder: Path, tmp_path: Path) -> None:
    packed(folder, tmp_path / "out")
    index = tmp_path / "out" / INDEX
    index.write_bytes((2**28 + 1).to_bytes(8, "little") + index.read_bytes()[8:])
    os.truncate(index, 2**29)
    with pytest.raises(UsageError, match=r"damaged .*a header of 268,435,457 bytes"):
        load(tmp_path / "out")


def refused(folder: Path, out: Path, *words: str, code: int = 2) -> None:
    assert cli.main(["pack", str(folder), str(out), *words]) == code


def test_unsuitable_directories_are_rejected(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    notes = fill(tmp_path / "notes", {"notes.txt": b"mine"})
    cases = {
        "no such directory": (tmp_path / "absent", out),
        "unknown layout": (notes, out),
        "must not contain each other": (folder, folder / "deep" / "out"),
        "has other files": (folder, notes),
        "not a writable directory": (folder, notes / "notes.txt" / "out"),
    }
    for word, (source, target) in cases.items():
        refused(source, target)
        message = capsys.readouterr().err
        assert word in message.splitlines()[-1], message
    refused(folder / "train", folder)
    assert "must not contain each other" in capsys.readouterr().err
    assert not out.exists()
    assert cli.main(["pack", str(folder)]) == 2
    assert cli.main(["pack", "--check", str(folder)]) == 2
    packed(folder, out)
    assert cli.main(["pack", str(folder), str(out), "--shard-size", "16K"]) == 0
    assert "already" in capsys.readouterr().out
    refused(folder, out, "--shard-size", "9K")
    refused(out, tmp_path / "again")
    (folder / "train/ant/new.jpg").write_bytes(b"x")
    refused(folder, out, "--shard-size", "16K")
    os.mkfifo(folder / "train/ant/pipe.jpg")
    refused(folder, tmp_path / "third")
    assert "pipe.jpg is not a regular file" in capsys.readouterr().err


def test_a_link_in_a_shared_directory_is_not_followed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / WORK).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=f"{WORK} is not a directory of yours"):
        packed(folder, tmp_path / "out")
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_lack_of_space_is_reported(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    free = type("Free", (), {"free": 10_000})()
    monkeypatch.setattr("shutil.disk_usage", lambda _: free)
    refused(folder, tmp_path / "out")
    assert "9.8 KiB are free" in capsys.readouterr().err


@pytest.mark.parametrize("event", ["removed", "changed"])
def test_a_file_changed_during_packing_is_reported(
    folder: Path, tmp_path: Path, event: str
) -> None:
    from hvdtrain.commands.pack import packing as module

    victim = folder / "val/bee/7.jpg"
    find = module.find

    def then(*args: object) -> object:
        source = find(*args)  # type: ignore[arg-type]
        victim.unlink() if event == "removed" else victim.write_bytes(b"other")
        return source

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "find", then)
        with pytest.raises(HvdtrainError, match=rf"7\.jpg was {event} while") as caught:
            packed(folder, tmp_path / "out")
    assert type(caught.value) is HvdtrainError
    victim.write_bytes(b"back")
    packed(folder, tmp_path / "out")
    assert_equal(load(folder)[1], load(tmp_path / "out")[1])


def test_resize(tmp_path: Path) -> None:
    source = tmp_path / "in" / "train" / "ant"
    picture(source / "a.jpg", "RGB", (300, 200))
    picture(source / "b.png", "RGBA", (90, 400))
    picture(source / "c.jpg", "CMYK", (150, 220))
    picture(source / "d.jpg", "L", (64, 40))
    whole, small = packed(tmp_path / "in", tmp_path / "whole"), tmp_path / "small"
    packed(tmp_path / "in", small, resize=50)
    train = load(small)[0]
    images = []
    for index in range(4):
        with Image.open(train.files.open(index)) as image:
            images.append((image.size, image.mode, image.format))
    assert images == [
        ((75, 50), "RGB", "JPEG"),
        ((50, 222), "RGB", "PNG"),
        ((50, 73), "RGB", "JPEG"),
        ((64, 40), "L", "JPEG"),
    ]
    deep = np.full((120, 60), 0x1234, np.uint16)
    Image.fromarray(deep).save(source / "e.png")
    packed(tmp_path / "in", tmp_path / "deep", resize=50)
    with Image.open(load(tmp_path / "deep")[0].files.open(4)) as image:
        assert (image.size, image.getpixel((9, 9))) == ((50, 100), (0x12, 0x12, 0x12))
    (source / "e.png").unlink()
    # Different pixels with the same names have different digests, which checkpoints record.
    assert train.digest != load(tmp_path / "whole")[0].digest
    assert train.files.digest != PackedFiles(whole, "train").digest
    (source / "e.jpg").write_bytes(b"broken")
    packed(tmp_path / "in", tmp_path / "unchanged")
    with pytest.raises(UsageError, match=r"--resize: .*e\.jpg cannot be decoded"):
        packed(tmp_path / "in", tmp_path / "no", resize=50)


def test_broken_images_are_skipped_as_in_the_folder(tmp_path: Path) -> None:
    source = tmp_path / "in"
    for number in range(6):
        picture(source / "train" / "ab"[number % 2] / f"{number}.jpg")
    for name in ("a/2.jpg", "b/5.jpg"):
        (source / "train" / name).write_bytes(b"\xff\xd8broken")
    packed(source, tmp_path / "out")
    kept, left_out = without_broken(load(source, skip_broken=True)[0], 1)
    same, left_too = without_broken(load(tmp_path / "out")[0], 1)
    assert_equal(kept, same)
    assert len(left_out) == len(left_too) == 2
    assert left_too[0].endswith("train-000000.tar: 000000001.jpg (train/a/2.jpg)")
    assert_equal(kept, pickle.loads(pickle.dumps(same)))


def test_coco(tmp_path: Path) -> None:
    bccd = SHARED / "data" / "bccd"
    if not bccd.is_dir():
        pytest.skip(f"{bccd} does not exist")
    packed(bccd, tmp_path / "out", size=2**20)
    for split in ("train2017", "val2017"):
        assert_same_files(open_split(bccd, split), open_split(tmp_path / "out", split))
        name = f"annotations/instances_{split}.json"
        assert read_file(bccd, name) == read_file(tmp_path / "out", name)
    assert open_split(tmp_path / "out", "test2017") is open_split(bccd, "test2017") is None
    for directory in (bccd, tmp_path / "out"):
        with pytest.raises(UsageError, match="instances_x"):
            read_file(directory, "annotations/instances_x.json")
    with pytest.raises(UsageError, match=r"another kind \(COCO"):
        load(tmp_path / "out")
    with pytest.raises(UsageError, match="--resize needs an image folder"):
        packed(bccd, tmp_path / "small", resize=100)


def test_the_next_command_is_that_of_a_trainer_of_the_data(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for split, trains in (("train2017", True), ("train2014", False)):  # ssd300 reads 2017 only
        annotations = {f"annotations/instances_{split}.json": b"{}"}
        source = fill(tmp_path / split, {f"{split}/1.jpg": b"image", **annotations})
        assert cli.main(["pack", str(source), str(tmp_path / f"{split}-out")]) == 0
        assert ("python -m hvdtrain.ssd300 --data" in capsys.readouterr().out) is trains


def test_what_is_left_out_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = fill(tmp_path / "in", {"train/a/1.jpg": b"image", "train/a/2.webp": b"image"})
    assert cli.main(["pack", str(source), str(tmp_path / "out")]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "skipped 1 image of other kinds" in shown and f"no val/ in {source}" in shown


def test_mnist(tmp_path: Path) -> None:
    packed(write_mnist(tmp_path / "in"), tmp_path / "out")
    splits = zip(mnist.load(tmp_path / "in"), mnist.load(tmp_path / "out"), strict=True)
    for expected, actual in splits:
        assert (expected.images == actual.images).all()
        assert (expected.labels == actual.labels).all()
    with pytest.raises(UsageError, match="another kind"):
        load(tmp_path / "out")
    packed(fill(tmp_path / "images", noise(2)), tmp_path / "packed images")
    with pytest.raises(UsageError, match="another kind"):
        mnist.load(tmp_path / "packed images")


def test_many_shards_are_read_with_few_open(tmp_path: Path) -> None:
    packed(fill(tmp_path / "in", noise(60, 10)), tmp_path / "out", size=1)
    train = load(tmp_path / "out")[0]
    assert len(list((tmp_path / "out").glob("train-*.tar"))) == 120
    before = len(list(Path("/proc/self/fd").iterdir()))
    for index in (*range(120), *range(120)):
        train.files.will_need([index])
        train.files.open(index).close()
    assert len(list(Path("/proc/self/fd").iterdir())) - before <= 64
