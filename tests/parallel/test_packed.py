"""Packed data in a training: equal to the folder, interchangeable on resume, staged, damaged."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from hvdtrain.commands.pack.packing import Packing
from hvdtrain.commands.pack.source import PackOptions
from hvdtrain.workloads.data.packed import INDEX
from tests.conftest import LONG, run
from tests.parallel import resident
from tests.parallel.conftest import (
    SOME,
    assert_bit_equal,
    assert_one_line,
    completed,
    train,
)

SHORT = ("--model=resnet18", "--image-size=48", "--batch-size=3", "--epochs=2", "--precision=fp32")


@pytest.fixture(scope="module")
def packed(few_images: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the images of ``few_images`` in small shards."""
    out = tmp_path_factory.mktemp("packed") / "out"
    Packing(few_images, out, PackOptions(2**16, workers=2)).run()
    return out


@pytest.mark.parametrize("framework", SOME)
@pytest.mark.parametrize("number", [1, 2, 3] if LONG else [2])
def test_packed_training_is_bit_equal_to_the_folder(
    number: int, framework: str, few_images: Path, packed: Path, tmp_path: Path
) -> None:
    """Train half on each of the two, in either order, and once with worker processes."""
    line = (f"--framework={framework}", *SHORT)
    line += ("--deterministic",) if number > 2 else ()
    steps = "--num-steps=9"  # seven an epoch
    folder = (f"--data={few_images}", steps, "--workers=0")
    whole = train(number, tmp_path / "whole", "resnet", *line, *folder)
    first, second = (packed, few_images) if framework == "pytorch" else (few_images, packed)
    train(number, tmp_path / "cut", "resnet", *line, f"--data={first}", "--num-steps=5")
    rest = (f"--data={second}", steps, "--resume=must")
    cut = train(number, tmp_path / "cut", "resnet", *line, *rest)
    assert_bit_equal(whole, cut)
    for key in ("eval_loss", "eval_accuracy", "samples_trained"):
        assert whole.summary[key] == cut.summary[key]


@pytest.mark.parametrize("framework", SOME)
def test_staging_on_a_single_rank(
    framework: str, few_images: Path, packed: Path, tmp_path: Path
) -> None:
    line = (f"--framework={framework}", *SHORT, "--num-steps=3", "--workers=0")
    plain = train(1, tmp_path / "plain", "resnet", *line, f"--data={few_images}")
    scratch = tmp_path / "scratch"
    staged = (*line, f"--data={packed}", "--stage=$SCRATCH/deep")
    words = ("-m", "hvdtrain.resnet", *staged, "--checkpoint-dir", str(tmp_path / "it/checkpoints"))
    words += ("--summary", str(tmp_path / "it/summary.json"))
    outcome = run([sys.executable, *words], SCRATCH=str(scratch), code=0)
    assert f"data staged in {scratch}/deep/out-" in outcome.out
    assert_bit_equal(plain, type(plain)(outcome, tmp_path / "it"))


def test_data_is_staged_once_per_host_and_failures_are_reported_once(
    few_images: Path, packed: Path, tmp_path: Path
) -> None:
    line = ("-m", "hvdtrain.resnet", *SHORT, "--num-steps=1", "--workers=0")
    staged = (*line, f"--data={packed}", f"--stage={tmp_path / 'disk'}")
    outcome = completed(2, *staged)
    assert "on 1 host: " in outcome.out
    assert "copied in" in outcome.out
    outcome = resident.ranks(2, *staged)
    assert "on 1 host: as it was" in outcome.out
    (copy,) = (tmp_path / "disk").iterdir()
    assert (copy / INDEX).read_bytes() == (packed / INDEX).read_bytes()
    (tmp_path / "file").touch()
    for words, messages in (
        ((f"--data={few_images}", f"--stage={tmp_path}"), ("is not packed: run `hvdtrain pack",)),
        ((f"--data={packed}", f"--stage={tmp_path / 'file'}"), ("--stage", "file", "directory")),
    ):
        assert_one_line(resident.ranks(2, *line, *words), 2, *messages)


def test_damaged_data_is_reported_once(packed: Path, tmp_path: Path) -> None:
    shutil.copytree(packed, tmp_path / "data")
    shard = tmp_path / "data" / "train-000001.tar"
    content = bytearray(shard.read_bytes())
    shard.write_bytes(content[:-512])
    line = ("-m", "hvdtrain.resnet", f"--data={tmp_path / 'data'}", *SHORT, "--workers=0")
    assert_one_line(resident.ranks(2, *line, "--quiet"), 2, f"{shard} is damaged (it has")
    content[512:4000] = bytes(3488)  # an image that was lost
    shard.write_bytes(content)
    assert_one_line(resident.ranks(2, *line, "--quiet", "--epochs=1"), 2, f"{shard}: 0000000")
    outcome = completed(2, *line, "--skip-broken", "--num-steps=2")
    assert "skipped 1 broken image" in outcome.out
    assert "39 images" in outcome.out
