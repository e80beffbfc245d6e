"""The script that README shows, sequential and distributed."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.conftest import BIN, ROOT, run

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
        mpirun = [str(BIN / "mpirun"), "--oversubscribe", "-n", str(number), sys.executable]
        outcome = run([*mpirun, str(EXAMPLES / "digits_distributed.py")], cwd=folder)
        assert outcome.code == 0, outcome.err
        assert accuracy(outcome.out) > 0.85
        newest = sorted((folder / "checkpoints").glob("step-*"))[-1]
        weights.append(safetensors.numpy.load_file(newest / "model.safetensors"))
    for other in weights[1:]:
        for name, value in weights[0].items():
            assert np.linalg.norm(value - other[name]) <= 1e-9 * np.linalg.norm(value)


def test_the_script_of_the_page_on_own_data_runs_as_printed(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own.md").read_text()
    block = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert block
    (tmp_path / "own.py").write_text(block[1])
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
