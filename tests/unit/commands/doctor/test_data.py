"""``hvdtrain doctor --data``: accepted data, and the judgement of measurements."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hvdtrain.commands.doctor.checks.data import (
    COPY,
    CROP,
    DECODING,
    NORMALISING,
    READING,
    STORAGE,
    Measured,
    data_findings,
    data_text,
    find,
)
from hvdtrain.commands.doctor.diagnosis import report
from hvdtrain.commands.doctor.findings import ABSENT, ERROR, OK, WARNING, Finding
from hvdtrain.errors import UsageError
from hvdtrain.workloads.data.image_folder import ImageFolder
from tests.unit.commands.doctor.doctor import by_check

# A worker takes 1 + 5 + 3 + 1 = 10 ms: 100 images/s.
SECONDS = {READING: 1e-3, DECODING: 5e-3, CROP: 3e-3, COPY: 1e-3, STORAGE: 2e-3, NORMALISING: 5e-4}
FOUND = Measured(Path("pictures"), 9000, 10, 256, (), 500.0, 400.0, 110_000.0, SECONDS)


def idx(path: Path, *shape: int) -> None:
    head = bytes([0, 0, 8, len(shape)]) + np.array(shape, ">u4").tobytes()
    path.write_bytes(gzip.compress(head + bytes(int(np.prod(shape)))))


def test_an_image_folder_is_read_by_the_trainers_reader(tmp_path: Path) -> None:
    for name in ("train/cat/1.jpg", "train/dog/2.png"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    images = find(tmp_path)
    assert isinstance(images, ImageFolder)
    assert [Path(name).name for name in images.files.names] == ["1.jpg", "2.png"]


def test_mnist_needs_no_workers(tmp_path: Path) -> None:
    for prefix, count in (("train", 7), ("t10k", 3)):
        idx(tmp_path / f"{prefix}-images-idx3-ubyte.gz", count, 28, 28)
        idx(tmp_path / f"{prefix}-labels-idx1-ubyte.gz", count)
    finding = find(tmp_path)
    assert isinstance(finding, Finding) and finding.state == OK
    assert "7 training images, 3 for evaluation" in finding.evidence


def test_a_coco_folder_is_not_measured(tmp_path: Path) -> None:
    (tmp_path / "annotations").mkdir()
    (tmp_path / "annotations" / "instances_train2017.json").write_text("{}")
    finding = find(tmp_path)
    assert isinstance(finding, Finding) and finding.state == ABSENT
    assert "COCO" in finding.evidence and "train/CLASS" in finding.remedy


@pytest.mark.parametrize(
    ("folders", "message"), [((), "train"), (("train",), "class"), (("train/cat",), "image")]
)
def test_a_directory_without_images_is_rejected(
    folders: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    for folder in folders:
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(UsageError, match=message):
        find(tmp_path)
    with pytest.raises(UsageError, match="no such directory"):
        find(tmp_path / "absent")


@pytest.mark.parametrize(
    ("cores", "gpu", "evidence"),
    [
        (16, True, "a GPU and 16 cores has --workers 8 by default, for 800 images/s"),
        (2, True, "a GPU and 2 cores has --workers 1 by default, for 100 images/s"),
        (16, False, "a rank with 16 cores has --workers 1 by default, for 100 images/s"),
    ],
)
def test_the_speed_of_a_rank(cores: int, gpu: bool, evidence: str) -> None:
    findings = by_check(data_findings(FOUND, cores=cores, gpu=gpu))
    assert {finding.state for finding in findings.values()} == {OK}
    assert "9,000 training images" in findings["data"].evidence
    assert "500 x 400" in findings["data"].evidence
    assert "100 images/s per core" in findings["reading images"].evidence
    assert evidence in findings["reading images"].evidence


@pytest.mark.parametrize(
    ("measured", "remedy"),
    [
        (replace(FOUND, width=1600.0, height=1200.0), "--resize 512"),
        (replace(FOUND, seconds={**SECONDS, STORAGE: 0.01}), "hvdtrain pack"),
        (replace(FOUND, seconds={**SECONDS, STORAGE: 0.008}), ""),  # 8 of 17 ms
        (replace(FOUND, width=1600.0, height=699.0), ""),
    ],
)
def test_slow_storage_and_large_images_have_a_remedy(measured: Measured, remedy: str) -> None:
    finding = by_check(data_findings(measured, cores=4, gpu=False))["reading images"]
    assert finding.state == (WARNING if remedy else OK)
    assert remedy in finding.remedy


def test_broken_images_are_counted_and_the_first_is_named() -> None:
    measured = replace(FOUND, sampled=200, broken=("a.jpg cannot be decoded (x)", "b"))
    finding = by_check(data_findings(measured, cores=1, gpu=False))["broken images"]
    assert finding.state == WARNING and "--skip-broken" in finding.remedy
    assert finding.evidence == "2 of 200 (1.0 %): a.jpg cannot be decoded (x)"


def test_without_readable_images_there_is_no_speed() -> None:
    measured = replace(FOUND, sampled=1, broken=("a.jpg cannot be decoded",), seconds={})
    findings = list(data_findings(measured, cores=1, gpu=False))
    assert [finding.state for finding in findings] == [ERROR]
    shown = report(findings, None, None, measured)
    assert shown.exit_code == 1 and "a.jpg" in shown.text and "a worker" not in shown.text
    assert shown.data["data"]["images_per_second_per_core"] is None


def test_the_table_and_the_json_data_agree() -> None:
    shown = report([], None, None, FOUND)
    assert data_text(FOUND) in shown.text and len(data_text(FOUND).splitlines()) == 1 + 1 + 7
    rows = [line.split() for line in shown.text.splitlines()]
    assert ["decoding", "5.00", "50", "%", "200"] in rows
    assert ["a", "worker,", "total", "10.00", "100"] in rows
    data = json.loads(json.dumps(shown.data))["data"]
    assert data["seconds_per_image"] == SECONDS
    assert data["images_per_second_per_core"] == pytest.approx(100)
    assert (data["images"], data["sampled"], data["broken"]) == (9000, 256, 0)
