"""The homework's scripts, run as a class runs them."""

from __future__ import annotations

import csv
import gzip
import re
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image as images

from tests.conftest import LONG, ROOT, Outcome, ranks, run
from tests.parallel import resident
from tests.unit.workloads.mnist.test_data import idx

HOMEWORK = ROOT / "homework"
COLUMNS = ["epoch", "train_loss", "train_accuracy", "validation_loss", "validation_accuracy"]
TRAINED, VALIDATED = 389, 101  # odd numbers: the parts are of different sizes
YIELD = {"OMPI_MCA_mpi_yield_when_idle": "1"}  # more ranks than cores

Rows = list[dict[str, float]]


def framework_of(name: str) -> str:
    """The framework that a script imports."""
    return "tensorflow" if "tensorflow" in name or "resnet34" in name else "pytorch"


def script(
    number: int, name: str, *options: str, fresh: bool = False, code: int | None = 0
) -> Outcome:
    """Run a script of the homework on ``number`` ranks; 0: a sequential one.

    What it computes is the same on resident ranks; ``fresh``: with a start of its own, as a class
    does it (which the tests of the pages' commands do, too).
    """
    path = str(HOMEWORK / name)
    if not fresh:
        framework = framework_of(name)
        how = {**YIELD, "code": code, "framework": framework}
        return resident.ranks(number or 1, path, *options, **how)
    if number:
        return ranks(number, path, *options, code=code)
    return run([sys.executable, path, *options], code=code)


def rows(path: Path) -> Rows:
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        found = [{name: float(value) for name, value in row.items()} for row in reader]
        assert reader.fieldnames == [*COLUMNS, "seconds"]
    return found


def write_idx(folder: Path, trained: int, validated: int) -> Path:
    """Real digits in MNIST's format, laid out as by torchvision, the images packed."""
    digits = pytest.importorskip("sklearn.datasets").load_digits()
    pictures = np.kron(digits.images * 255 / 16, np.ones((1, 3, 3)))
    pictures = np.pad(pictures, ((0, 0), (2, 2), (2, 2)))
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    cuts = {"train": slice(0, trained), "t10k": slice(trained, trained + validated)}
    for part, cut in cuts.items():
        packed = gzip.compress(idx(pictures[cut].astype(np.uint8)))
        (raw / f"{part}-images-idx3-ubyte.gz").write_bytes(packed)
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(idx(digits.target[cut].astype(np.uint8)))
    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_idx(tmp_path_factory.mktemp("small"), TRAINED, VALIDATED)


def weights(file: Path) -> list[np.ndarray[Any, Any]]:
    """The arrays in a checkpoint of either framework, in order."""
    if file.suffix == ".pt":
        import torch

        return [value.numpy() for value in torch.load(file).values()]
    import h5py

    found: list[np.ndarray[Any, Any]] = []
    with h5py.File(file) as opened:
        opened["layers"].visititems(
            lambda _, item: found.append(item[()]) if isinstance(item, h5py.Dataset) else None
        )
    return found


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow2"])
def test_ranks_compute_what_the_sequential_script_does(
    framework: str, small: Path, tmp_path: Path
) -> None:
    """The same training sequential (0), and on ranks with the same global batch.

    It is exact with float64 and no dropout. Each rank starts with weights of its own, so without
    the broadcast no two runs would agree. Two ranks scale a half of the learning rate; three are
    given the whole, with a warm-up so long that it never grows.
    """
    options = {
        0: ["--batch-size=96", "--lr=0.03"],
        1: ["--batch-size=96", "--lr=0.03"],
        2: ["--batch_size=48", "--lr=0.015"],
        3: ["--batch_size=32", "--lr=0.03", "--warmup_epochs=1e12"],
    }
    if framework != "pytorch" and not LONG:
        del options[1], options[2]
    for number, own in options.items():
        name = f"{framework}_mnist{'_hvd' if number else ''}.py"
        common = ["--epochs=2", "--dtype=float64", "--no_dropout", f"--data={small}"]
        outcome = script(number, name, *common, *own, f"--out={tmp_path / str(number)}")
        assert len(re.findall(r"^epoch \d: loss", outcome.out, re.M)) == 2  # from one rank only

    sequential = rows(tmp_path / "0" / "metrics_1.csv")
    assert [row["epoch"] for row in sequential] == [1, 2]
    assert sequential[1]["train_loss"] < sequential[0]["train_loss"]
    for row in sequential:  # each image was counted once
        right = row["train_accuracy"] * TRAINED
        assert right == pytest.approx(round(right), abs=1e-6)
    saved = "model.pt" if framework == "pytorch" else "model.weights.h5"
    expected_weights = weights(tmp_path / "0" / saved)
    assert sum(value.size for value in expected_weights) == 1_199_882
    for number in set(options) - {0}:
        folder = tmp_path / str(number)
        assert [path.name for path in folder.glob("*.csv")] == [f"metrics_{number}.csv"]
        assert not list(folder.glob("*tmp*"))
        many = rows(folder / f"metrics_{number}.csv")
        for name in COLUMNS:
            expected = [row[name] for row in sequential]
            assert [row[name] for row in many] == pytest.approx(expected, rel=1e-9), (number, name)
        for one, other in zip(expected_weights, weights(folder / saved), strict=True):
            assert np.linalg.norm(one - other) <= 1e-9 * np.linalg.norm(one)


def test_the_plots_of_a_ladder(tmp_path: Path) -> None:
    plain, warm = tmp_path / "plain", tmp_path / "warm"
    plain.mkdir()
    for number in (1, 2):
        shutil.copy(HOMEWORK / "results" / "pytorch" / f"metrics_{number}.csv", plain)
    shutil.copytree(HOMEWORK / "results" / "pytorch-warmup", warm)
    (plain / "note.txt").write_text("two cores, " * 30)
    script(0, "plot_accuracy.py", str(plain), f"--warmup={warm}", fresh=True)
    for stem in ("accuracy_1", "accuracy_2", "accuracy_summary"):
        pdf = (plain / f"{stem}.pdf").read_bytes()
        assert pdf.startswith(b"%PDF-") and b"/FontFile2" in pdf and len(pdf) > 5000
        pixels = images.imread(plain / f"{stem}.png")[..., :3]
        assert 0.01 < (pixels < 0.9).any(-1).mean() < 0.3  # lines and letters on white
    script(0, "plot_accuracy.py", str(tmp_path), fresh=True, code=2)


def test_it_learns_with_dropout_and_warmup_on_the_embedded_digits(tmp_path: Path) -> None:
    options = ["--epochs=2", "--batch-size=16", "--warmup-epochs=1", f"--out={tmp_path}"]
    script(2, "pytorch_mnist_hvd.py", *options)
    assert rows(tmp_path / "metrics_2.csv")[-1]["validation_accuracy"] > 0.8


def test_a_rank_without_an_image_in_a_step(tmp_path: Path) -> None:
    """Seven images in three steps over three ranks; of the two to validate each once."""
    write_idx(tmp_path, 7, 2)
    options = ["--epochs=1", "--batch-size=1", f"--data={tmp_path}", f"--out={tmp_path}"]
    script(3, "pytorch_mnist_hvd.py", *options)
    row = rows(tmp_path / "metrics_3.csv")[0]
    assert row["train_accuracy"] * 7 == pytest.approx(round(row["train_accuracy"] * 7))
    assert row["validation_accuracy"] in (0, 0.5, 1)


def test_missing_data_is_named(tmp_path: Path) -> None:
    outcome = script(0, "pytorch_mnist.py", f"--data={tmp_path}", code=2)
    assert f"--data {tmp_path}: train-images-idx3-ubyte[.gz] is neither there" in outcome.err


def speeds(outcome: Outcome, number: int) -> list[float]:
    """Images a second of each step; their mean and deviation are those of the last line."""
    found = [
        float(word) for word in re.findall(r"^step \d+: ([\d.]+) images/s$", outcome.out, re.M)
    ]
    last = outcome.out.splitlines()[-1]
    match = re.fullmatch(rf"([\d.]+) \+- ([\d.]+) images/s on {number} rank\(s\)", last)
    assert match, outcome.out
    kept = np.array(found[1:])
    assert [float(word) for word in match.groups()] == pytest.approx(
        [kept.mean(), kept.std()], abs=0.02
    )
    return found


def folder_of_images(folder: Path, train: int, validation: int) -> Path:
    """Images of two classes in every colour mode that photographs come in."""
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    for part, count in (("train", train), ("val", validation)):
        for number in range(count):
            path = folder / part / "ab"[number % 2]
            path.mkdir(parents=True, exist_ok=True)
            mode, bands = [("RGB", (3,)), ("L", ()), ("CMYK", (4,))][number % 3]
            ending = "png" if number == 3 else "JPEG" if number == 4 else "jpg"
            pixels = draw.integers(0, 255, (40, 50, *bands), dtype=np.uint8)
            image.fromarray(pixels, mode).save(path / f"{number}.{ending}")
    return folder


RESNET34 = 21_797_672  # trainable parameters with 1000 classes, as torchvision counts them
BATCHNORM = 8_512  # channels that are normalised: each has a running mean and a variance


def test_resnet34_on_made_up_images(tmp_path: Path) -> None:
    """The same steps in one process; in fp32, with threads that add up in another order."""
    options = ("--image-size=32", "--batch-size=2", "--num-steps=3")
    resident.address("tensorflow")  # started once, not by each thread
    with ThreadPoolExecutor() as threads:  # most of it is tracing, on one core each
        first, second = (
            threads.submit(script, number, name, *options, f"--out={tmp_path / str(number)}")
            for number, name in ((1, "train_resnet34_hvd.py"), (0, "train_resnet34.py"))
        )
    assert len(speeds(first.result(), 1)) == 3
    second.result()
    hvd, sequential = (
        np.concatenate([array.ravel() for array in weights(path)])
        for path in (tmp_path / name / "resnet34-1.weights.h5" for name in "10")
    )
    assert len(hvd) == RESNET34 + 2 * BATCHNORM
    np.testing.assert_allclose(hvd, sequential, atol=1e-3)


def test_resnet34_on_a_folder_of_images(tmp_path: Path) -> None:
    """Five images, one per rank: two steps per epoch, so that no rank is left without an image."""
    data = folder_of_images(tmp_path, 5, 3)
    options = ["--image_size=32", "--batch_size=1", "--epochs=3", "--num_steps=3"]
    outcome = script(2, "train_resnet34_hvd.py", *options, f"--data={data}", f"--out={tmp_path}")
    assert len(speeds(outcome, 2)) == 3
    line = (
        r"^epoch (\d): \[loss, accuracy\] of training and validation: \[\[.+\], \[.+, ([\d.]+)\]\]$"
    )
    epochs = re.findall(line, outcome.out, re.M)
    assert [epoch for epoch, _ in epochs] == ["1", "2"]  # the third step ended it
    assert sorted(path.name for path in tmp_path.glob("*.h5")) == [
        "resnet34-1.weights.h5",
        "resnet34-2.weights.h5",
    ]
    for _, accuracy in epochs:  # each of the three was validated once
        assert float(accuracy) * 3 == pytest.approx(round(float(accuracy) * 3), abs=1e-3)


def pi(number: int, seed: int) -> tuple[float, float]:
    outcome = script(number, "pi.py", "--samples=3000001", f"--seed={seed}")
    match = re.match(r"pi = ([\d.]+) \+- ([\d.]+), off by", outcome.out)
    assert match and f"3,000,001 darts, {number} rank(s)" in outcome.out
    return float(match[1]), float(match[2])


def test_pi_is_the_same_on_any_number_of_ranks() -> None:
    value, error = pi(1, 7)
    assert error == pytest.approx(4 * np.sqrt(np.pi / 4 * (1 - np.pi / 4) / 3_000_001), rel=0.01)
    assert abs(value - np.pi) < 4 * error
    assert pi(2, 7) == pi(3, 7) == (value, error)
    assert pi(2, 8)[0] != value


def test_two_ranks_with_half_a_net_each_compute_what_one_does() -> None:
    outcome = script(2, "model_parallel.py", "--steps=3", "--batch_size=16")
    steps = re.findall(r"^step \d: loss ([\d.]+) on two ranks, ([\d.]+) on one$", outcome.out, re.M)
    assert len(steps) == 3 and all(two == one for two, one in steps)
    match = re.search(r"difference of a weight after 3 steps: (\S+)$", outcome.out, re.M)
    assert match and float(match[1]) <= 1e-12


def test_the_net_is_not_split_over_other_numbers_of_ranks() -> None:
    outcome = script(1, "model_parallel.py", fresh=True, code=1)
    assert "two ranks share the net, not 1" in outcome.err
