"""The homework's scripts: short, self-contained, and different by the eight steps."""

from __future__ import annotations

import ast
import csv
import difflib
from pathlib import Path

import pytest

from homework import grade
from hvdtrain.errors import UsageError
from tests.conftest import ROOT

HOMEWORK = ROOT / "homework"
# The grader is no exercise: it uses `hvdtrain verify`.
SCRIPTS = sorted(path for path in HOMEWORK.glob("*.py") if path.name != "grade.py")
WITH_HVDTRAIN = {"tensorflow2_keras_mnist_hvd"}  # Horovod does not support Keras 3
DISTRIBUTED = sorted(HOMEWORK.glob("*_hvd.py"))
STEPS = (
    "initialize",
    "pin device",
    "shard data",
    "scale learning rate",
    "distribute optimizer",
    "broadcast state",
    "save checkpoint",
    "average metrics",
)


def name(path: Path) -> str:
    return path.stem


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_one_file_of_at_most_150_lines_without_hvdtrain(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 150
    forbidden = {"hvdtrain", *(script.stem for script in SCRIPTS)} - (
        {"hvdtrain"} if path.stem in WITH_HVDTRAIN else set()
    )
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            assert not forbidden & {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert (node.module or "").split(".")[0] not in forbidden and node.level == 0


@pytest.mark.parametrize("path", SCRIPTS, ids=name)
def test_options_take_underscores_too(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            words = {word.value for word in node.args if isinstance(word, ast.Constant)}
            options = {str(word)[2:] for word in words if str(word).startswith("--")}
            assert {option.replace("-", "_") for option in options} <= options


@pytest.mark.parametrize("path", DISTRIBUTED, ids=name)
def test_each_step_is_marked_once(path: Path) -> None:
    text = path.read_text()
    assert {step: text.count(f"# Step: {step}") for step in STEPS} == dict.fromkeys(STEPS, 1)
    assert text.count("# Step: ") == len(STEPS)


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow2"])
def test_the_distributed_script_differs_by_the_eight_steps(framework: str) -> None:
    single = (HOMEWORK / f"{framework}_mnist.py").read_text().splitlines()
    distributed = (HOMEWORK / f"{framework}_mnist_hvd.py").read_text().splitlines()
    difference = list(difflib.ndiff(single, distributed))
    assert sum(line.startswith("- ") for line in difference) <= 15
    assert sum(line.startswith("+ ") for line in difference) <= 40
    assert sum(line.startswith("  ") for line in difference) >= 0.85 * len(single)
    assert not any("hvd" in line or "rank" in line for line in single)


def test_the_mnist_scripts_share_their_reader() -> None:
    """The IDX reader is the same lines in all five."""
    texts = [path.read_text() for path in SCRIPTS if "_mnist" in path.stem]
    reader = [text[text.index("def read_idx") : text.index("# Small enough")] for text in texts]
    assert len(texts) == 5 and len(set(reader)) == 1


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow2"])
def test_the_committed_curves_show_the_benefit_of_warm_up(framework: str) -> None:
    """Eight epochs per number of ranks; on eight ranks warm-up is needed, as the page says."""

    def accuracies(path: str) -> list[float]:
        with (HOMEWORK / "results" / path).open(newline="") as file:
            return [float(row["validation_accuracy"]) for row in csv.DictReader(file)]

    plain = {ranks: accuracies(f"{framework}/metrics_{ranks}.csv") for ranks in (1, 2, 4, 8)}
    warm = accuracies(f"{framework}-warmup/metrics_8.csv")
    assert {len(curve) for curve in (*plain.values(), warm)} == {8}
    assert warm[-1] > 0.97 > plain[8][-1]
    shown = [f"{100 * curve[-1]:.2f} %" for curve in (*plain.values(), warm)]
    name = framework.removesuffix("2").replace("pytorch", "PyTorch").replace("tensor", "Tensor")
    row = f"| {name.replace('flow', 'Flow')} | {' | '.join(shown)} |"
    assert row in (HOMEWORK / "README.md").read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["-n", "two", "a.py"], "-n: 'two' is not a whole number"),
        (["-n", "1", "a.py"], "-n 1: "),
        (["nosuch.py"], "nosuch.py: "),
        (["--tmeout", "3", "a.py"], "--tmeout: no such option; did you mean --timeout?"),
        ([], "FILE: missing; see grade.py --help"),
    ],
)
def test_wrong_use_of_the_grader_is_one_line(line: list[str], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        grade.read_options(line)
    assert str(caught.value).startswith(message)
