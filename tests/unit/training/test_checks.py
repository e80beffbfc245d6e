"""What is refused before a framework is imported: what options, recipe and launcher tell."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint import read_newest_state
from hvdtrain.steps.checkpoint_files import STATE_FILE, Checkpoint
from hvdtrain.system.runtime.detect import SINGLE_RANK
from hvdtrain.training.checks import check_early
from hvdtrain.workloads.mnist.task import WORKLOAD as MNIST
from hvdtrain.workloads.ssd300.task import WORKLOAD as SSD300
from tests.saves import save


def look(size: int = 1, **options: Any) -> None:
    kind = options.pop("workload", MNIST)
    launch = replace(SINGLE_RANK, launcher="mpirun (Open MPI)" if size > 1 else None, size=size)
    check_early(kind, kind.options(**options), launch)


@pytest.mark.parametrize(
    ("size", "options", "words"),
    [
        (1, {"lr_schedule": "multistep"}, "--lr-schedule multistep needs --lr-milestones"),
        (1, {"model": "resnet50"}, "--model resnet50: choose from tutorial, small"),
        (2, {"strategy": "single"}, "--strategy single trains in one process"),
        (1, {"strategy": "ddp", "framework": "tensorflow"}, "--strategy ddp is for pytorch"),
        (2, {"strategy": "horovod", "compression": "bf16"}, "--compression bf16: Horovod cannot"),
        (2, {"profile": (2, 4), "profile_ranks": (0, 2)}, "--profile-ranks 2: .* ranks 0 to 1"),
        (1, {"profile": (2, 4), "profile_ranks": (7, 9)}, "--profile-ranks 7,9: .* only rank 0"),
    ],
)
def test_what_is_refused(size: int, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=f"^{words}"):
        look(size, **options)


def test_what_is_not() -> None:
    look()
    look(workload=SSD300)  # its recipe has milestones
    look(workload=replace(MNIST, options=Options, models=()), model="whatever")
    look(lr_schedule="multistep", lr_milestones=(3.0,))
    look(lr_schedule="multistep", evaluate_only=True, checkpoint=Path("nowhere"))


ORIGIN = {"framework": "pytorch", "workload": "mnist", "model": "tutorial", "optimizer": "sgd"}


def checkpoint(folder: Path, step: int = 3) -> Path:
    state = {"step": step, "origin": {**ORIGIN, "seed": 0, "training_samples": 7}, "metrics": None}
    return save(folder, Checkpoint({}, {}, state), keep=3)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"framework": "tensorflow"}, "framework 'pytorch' there, 'tensorflow' here"),
        ({"model": "small"}, "model 'tutorial' there, 'small' here"),
        ({"optimizer": "adam"}, "optimizer 'sgd' there, 'adam' here"),
        ({"seed": 3}, "seed 0 there, 3 here"),
        ({"framework": "tensorflow", "evaluate_only": True}, "'tensorflow' here"),
    ],
)
def test_the_checkpoint_of_another_training(
    options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path)
    look(checkpoint_dir=tmp_path)
    with pytest.raises(UsageError, match=f"step-000000003 is the checkpoint of another .*{words}"):
        look(checkpoint_dir=tmp_path, **options)


def test_a_checkpoint_that_is_not_taken(tmp_path: Path) -> None:
    path = checkpoint(tmp_path)
    look(checkpoint_dir=tmp_path, seed=3, resume="never")
    look(checkpoint=path, seed=3, optimizer="adam", evaluate_only=True)
    (path / STATE_FILE).write_text("{")  # that it is damaged is found where it is loaded
    look(checkpoint_dir=tmp_path, seed=3)


def test_a_glance_is_at_the_newest(tmp_path: Path) -> None:
    assert read_newest_state(tmp_path) is None
    assert read_newest_state(tmp_path / "nowhere") is None
    checkpoint(tmp_path, 3)
    newest = checkpoint(tmp_path, 12)
    for path in (tmp_path, newest):
        seen = read_newest_state(path)
        assert seen and seen.path == newest and seen.state["step"] == 12


def test_no_framework_is_imported_for_it() -> None:
    program = (
        "import sys\n"
        "from hvdtrain.errors import UsageError\n"
        "from hvdtrain.training import trainer\n"
        "from hvdtrain.workloads.mnist.task import WORKLOAD\n"
        "try:\n    trainer.main(WORKLOAD, ['--lr-schedule=multistep'])\n"
        "except UsageError as error:\n    print(error)\n"
        "print(sorted({'torch', 'tensorflow', 'horovod', 'mpi4py'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    refused, loaded = result.stdout.splitlines()
    assert "needs --lr-milestones" in refused
    assert loaded == "[]"
