"""``hvdtrain doctor --data`` on real files: what it counts, and that each stage has its time."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("torchvision")

from PIL import Image

from hvdtrain.commands.doctor import diagnosis
from hvdtrain.commands.doctor.checks.data import (
    NORMALISING,
    SAMPLE,
    STORAGE,
    WORKER,
    Measured,
    find,
    measure,
)
from hvdtrain.commands.launch.prepare import Request
from hvdtrain.workloads.data.image_folder import ImageFolder
from tests.unit.commands.doctor.doctor import PLENTY


def measured(directory: Path) -> Measured:
    images = find(directory)
    assert isinstance(images, ImageFolder)
    result = measure(directory, images)
    assert isinstance(result, Measured)
    return result


def test_a_sample_is_drawn_and_each_stage_timed(tmp_path: Path) -> None:
    noise = np.random.default_rng(0)
    (tmp_path / "train" / "cat").mkdir(parents=True)
    count = SAMPLE + 44
    for number in range(count):
        pixels = noise.integers(0, 256, (30, 40, 3), np.uint8)
        Image.fromarray(pixels).save(tmp_path / "train" / "cat" / f"{number:03}.jpg")
    result = measured(tmp_path)
    assert (result.images, result.sampled, result.broken) == (count, SAMPLE, ())
    assert (result.width, result.height) == (40, 30)
    sizes = [file.stat().st_size for file in (tmp_path / "train" / "cat").iterdir()]
    assert min(sizes) <= result.size <= max(sizes)
    assert set(result.seconds) == {*WORKER, STORAGE, NORMALISING}
    assert all(seconds > 0 for seconds in result.seconds.values())
    assert result.rate == pytest.approx(1 / sum(result.seconds[stage] for stage in WORKER))


def test_broken_ones_are_named_and_the_others_measured(tmp_path: Path) -> None:
    folder = tmp_path / "train" / "cat"
    folder.mkdir(parents=True)
    Image.new("L", (64, 48), 7).save(folder / "a.jpg")
    (folder / "b.jpg").write_bytes((folder / "a.jpg").read_bytes()[:200])
    (folder / "c.jpg").write_text("no image")
    result = measured(tmp_path)
    assert (result.sampled, result.width, result.height) == (3, 64, 48)
    assert sorted(reason.split(" cannot be")[0] for reason in result.broken) == [
        str(folder / "b.jpg"),
        str(folder / "c.jpg"),
    ]
    (folder / "a.jpg").unlink()
    nothing = measured(tmp_path)
    assert (len(nothing.broken), nothing.seconds) == (2, {})


def test_a_rank_has_its_share_of_the_cores_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train" / "cat").mkdir(parents=True)
    Image.new("L", (64, 48), 7).save(tmp_path / "train" / "cat" / "a.jpg")
    monkeypatch.setattr(diagnosis, "find_resources", lambda: PLENTY)  # 8 cores
    monkeypatch.setattr(diagnosis.gpus, "find_driver", lambda: None)
    for request, cores in ((None, 8), (Request(8, (), ppn=4, hosts="localhost,other"), 2)):
        findings, _ = diagnosis.check_data(tmp_path, find(tmp_path), request, {})
        assert f"; a rank with {cores} cores has" in findings[-1].evidence
