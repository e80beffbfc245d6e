"""What needs an accelerator. HVDTRAIN_REHEARSE=1 runs on a CPU what can run there, too."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.system.machine.frameworks import is_installed
from tests.conftest import ranks

HERE = Path(__file__).parent
REHEARSE = os.environ.get("HVDTRAIN_REHEARSE") == "1"
HVDTRAIN = (sys.executable, "-m", "hvdtrain.cli")
SMALL = ("--model=small", "--dropout=0")  # of MNIST


def find_device() -> str:
    if importlib.util.find_spec("torch") is None:
        return "cpu"
    from hvdtrain.system.machine import accelerator

    return accelerator.kind()


DEVICE = find_device()
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="no accelerator, and nothing to rehearse")
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="no accelerator that torch calls cuda")
needs_horovod = pytest.mark.skipif(
    not is_installed("horovod.torch.mpi_lib_v2"), reason="no Horovod: hvdtrain install-horovod"
)
# Each that can train on one GPU.
STRATEGIES = [
    pytest.param("horovod", marks=needs_horovod),
    *("ddp", "fsdp", "zero", "mpi"),
]
FEW = STRATEGIES[:2] if DEVICE == "cpu" else STRATEGIES  # a rehearsal need not try them all


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = "" if REHEARSE or DEVICE != "cpu" else "no accelerator: torch computes on the CPU here"
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.gpu)
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


def train(number: int, folder: Path, workload: str, *options: str, **extra: str) -> dict[str, Any]:
    """Train on ``number`` ranks; the summary."""
    folder.mkdir(exist_ok=True)
    line = ("-m", f"hvdtrain.{workload}", *options, "--quiet")
    # Tests may run beside one another, and mpirun would bind the first rank of each to one core.
    extra = {"PRTE_MCA_hwloc_default_binding_policy": "none", **extra}
    ranks(number, *line, f"--summary={folder / 'summary.json'}", **extra, code=0)
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return summary
