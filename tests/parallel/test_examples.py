"""The script that README shows, sequential and distributed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from hvdtrain.steps.summary import Summary
from tests.conftest import BIN, ROOT, Outcome, ranks, run
from tests.parallel import resident
from tests.parallel.conftest import Training, assert_close

EXAMPLES = ROOT / "examples"


def accuracy(out: str) -> float:
    assert out.startswith("accuracy") and out.rstrip().endswith("of 297"), out
    return float(out.split()[1])


def test_sequential(tmp_path: Path) -> None:
    outcome = run([sys.executable, str(EXAMPLES / "digits_sequential.py")], cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert accuracy(outcome.out) > 0.85


def test_distributed_is_the_same_at_1_2_and_3_ranks(tmp_path: Path) -> None:
    weights = []
    for number in (1, 2, 3):
        folder = tmp_path / str(number)
        folder.mkdir()
        outcome = resident.ranks(number, str(EXAMPLES / "digits_distributed.py"), cwd=folder)
        assert outcome.code == 0, outcome.err
        assert accuracy(outcome.out) > 0.85
        newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
        weights.append(safetensors.numpy.load_file(newest / "model.safetensors"))
    for other in weights[1:]:
        for name, value in weights[0].items():
            assert np.linalg.norm(value - other[name]) <= 1e-9 * np.linalg.norm(value)


def test_the_script_of_the_page_on_own_data_runs_as_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own.md").read_text()
    task, script = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert task == (EXAMPLES / "own_task.py").read_text()
    (tmp_path / "own.py").write_text(script)
    mpirun = [str(BIN / "mpirun"), "--oversubscribe", "-n", "2", sys.executable]
    outcome = run([*mpirun, "own.py"], cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    losses = re.findall(r"^epoch \d: loss ([\d.]+) over 1000 samples$", outcome.out, re.MULTILINE)
    assert len(losses) == 3 and float(losses[-1]) < float(losses[0])


def test_the_two_scripts_are_eight_calls_apart() -> None:
    text = (EXAMPLES / "digits_distributed.py").read_text()
    assert [f"step {number}" in text for number in range(1, 9)] == [True] * 8
    sequential = (EXAMPLES / "digits_sequential.py").read_text().splitlines()
    gone = [line for line in sequential if line not in text.splitlines()]
    assert len(gone) <= 9  # its first line, the loop over batches, the save and the result


@pytest.fixture(autouse=True)
def _needs_scikit_learn() -> None:
    pytest.importorskip("sklearn")


OWN = {"pytorch": "own_task.py", "tensorflow": "own_task_tf.py"}


def own(
    folder: Path, number: int, framework: str, *options: str, file: str = "", fresh: bool = False
) -> Outcome:
    file = file or str(EXAMPLES / OWN[framework])
    where = [f"--summary={folder / 'summary.json'}", f"--checkpoint-dir={folder / 'checkpoints'}"]
    words = [file, f"--framework={framework}", "--precision=fp64", *where, *options]
    start = ranks if fresh else resident.ranks
    return start(number, "-m", "hvdtrain.train", *words)


@pytest.mark.parametrize("framework", OWN)
def test_a_task_of_ones_own_is_the_same_at_1_2_and_3_ranks(framework: str, tmp_path: Path) -> None:
    """353 samples in global batches of 88: parts differ in size, the last batch is one sample."""
    recipe = ("--global-batch-size=88", "--hidden=16", "--momentum=0.5", "--epochs=3")
    runs = []
    for number in (1, 2, 3):
        folder = tmp_path / str(number)
        if number == 3:  # stopped in the second epoch and resumed
            assert own(folder, 3, framework, *recipe, "--num-steps=7").code == 0
        outcome = own(folder, number, framework, *recipe)
        assert outcome.code == 0, outcome.err
        runs.append(Training(outcome, folder))
    one = runs[0].summary
    assert (one["workload"], one["eval_samples"]) == (Path(OWN[framework]).stem, 89)
    assert one["eval_accuracy"] is None
    assert 0 < one["eval_metrics"]["r2"] < 1
    assert one["options"]["hidden"] == 16
    assert "353 samples" in runs[0].outcome.out and "test r2" in runs[0].outcome.out
    for other in runs[1:]:
        found = other.summary
        assert found["eval_metrics"] == pytest.approx(one["eval_metrics"], rel=1e-9)
        for key in ("parameter_norm", "eval_loss"):
            assert found[key] == pytest.approx(one[key], rel=1e-9)
        assert_close(other, runs[0], 1e-9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import no_such_module\n", "line 1: ModuleNotFoundError"),
        ("x = 1\n", "defines no function task"),
        ("def task(options):\n    return 1 / 0\n", "line 2: ZeroDivisionError"),
    ],
)
def test_a_broken_task_is_one_line_and_exit_code_2(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "broken_task.py").write_text(text)
    outcome = own(
        tmp_path, 2, "pytorch", "--quiet", file=str(tmp_path / "broken_task.py"), fresh=True
    )
    assert outcome.code == 2, outcome.err
    assert len(outcome.said) == 1 and "broken_task.py" in outcome.said[0], outcome.err
    assert words in outcome.said[0] and "Traceback" not in outcome.err


def test_launch_starts_a_task_of_ones_own(tmp_path: Path) -> None:
    line = ["-m", "hvdtrain.train", str(EXAMPLES / "own_task.py"), "--epochs=1"]
    command = [str(BIN / "hvdtrain"), "launch", "-n", "2", "--", sys.executable, *line]
    outcome = run([*command, f"--summary={tmp_path / 'summary.json'}"], cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    summary = Summary.read(tmp_path / "summary.json", needed=["eval_metrics"])
    assert (summary.workload, summary.world_size, summary.steps_completed) == ("own_task", 2, 6)
