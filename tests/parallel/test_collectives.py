"""The collectives of each library on real ranks, and the lesson."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import environment, ranks
from tests.parallel import resident

SCRIPT = Path(__file__).parent / "scripts" / "collectives.py"
LIBRARIES = ("mpi4py", "horovod_torch", "horovod_tf", "torch_distributed")


@pytest.mark.parametrize("library", LIBRARIES)
def test_each_collective_of_each_library(library: str, tmp_path: Path) -> None:
    framework = "tensorflow" if library == "horovod_tf" else "pytorch"
    outcome = resident.ranks(3, str(SCRIPT), library, str(tmp_path), framework=framework)
    assert outcome.code == 0, outcome.err[-3000:]
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{r}-of-3" for r in range(3)]


def test_the_lesson_at_three_ranks() -> None:
    outcome = ranks(3, "-m", "hvdtrain.collectives")
    assert outcome.code == 0, outcome.err
    shown = [line.split(":")[1].strip() for line in outcome.out.splitlines() if "->" in line]
    assert shown == [
        *("10 -> 10", "20 -> 10", "30 -> 10"),
        *("10 -> 10 20 30", "20 -> 10 20 30", "30 -> 10 20 30"),
        *("10 -> 60", "20 -> 60", "30 -> 60"),
    ]


def test_the_lesson_without_mpi4py(tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise ImportError('there is none')")
    outcome = subprocess.run(
        [sys.executable, "-m", "hvdtrain.collectives"],
        env=environment(PYTHONPATH=str(tmp_path)),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (outcome.returncode, outcome.stdout) == (2, "")
    (line,) = outcome.stderr.splitlines()
    assert "the lesson needs mpi4py (there is none): pip install mpi4py" in line
