"""A step of a training asks the device for nothing that it would have to wait for.

``torch.cuda.set_sync_debug_mode("error")`` raises where the host waits for the device: reading a
number, copying from memory that is not pinned, indexing by a mask.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import run
from tests.gpu.conftest import DEVICE, REHEARSE, STRATEGIES, needs_cuda, needs_gpu

SCRIPT = Path(__file__).parent / "scripts" / "no_waiting.py"
BATCH = 16
PRECISIONS = ["fp32", "bf16", pytest.param("fp16", marks=needs_gpu)]


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """Raise where the host waits for the device; in a rehearsal there is none."""
    import torch

    if DEVICE != "cuda":
        assert REHEARSE
        yield
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def task_of(workload: str, **chosen: Any) -> Any:
    """The task with its data, on the device."""
    from hvdtrain.workloads.data.image_folder import ImageOptions
    from hvdtrain.workloads.mnist.data import MnistOptions

    recipe = {"device": DEVICE, "weight_decay": 1e-4, **chosen}
    if workload == "mnist":
        from hvdtrain.workloads.mnist.task import build

        return build(replace(MnistOptions(), model="tutorial", **recipe))
    from hvdtrain.workloads.resnet.task import build as build_resnet

    return build_resnet(replace(ImageOptions(), model="resnet18", image_size=32, **recipe))


@needs_cuda
def test_waiting_would_be_told() -> None:
    import torch

    with waiting_is_an_error(), pytest.raises(RuntimeError, match="synchroniz"):
        torch.ones(1, device=DEVICE).item()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("workload", "more"),
    [
        pytest.param("resnet", {}, id="resnet"),
        pytest.param("mnist", {}, id="mnist"),
        pytest.param("mnist", {"clip_norm": 1.0}, id="clipped"),
        pytest.param("mnist", {"accumulate_steps": 2}, id="accumulated"),
        pytest.param("mnist", {"optimizer": "adamw"}, id="adamw"),
    ],
)
def test_an_update_waits_for_nothing(workload: str, more: dict[str, Any], precision: str) -> None:
    task = task_of(workload, precision=precision, **more)
    task.may_defer = True  # as the trainer does on a GPU
    batch = task.train.fetch(np.arange(BATCH))
    for step in range(3):  # what the first ones make is kept: workspaces, the optimizer's state
        task.update(batch, learning_rate=0.01, seed=step)
    with waiting_is_an_error():
        losses = [task.update(batch, learning_rate=0.01, seed=step) for step in range(3, 9)]
    assert all(np.isfinite(task.loss_values(losses)))


@pytest.mark.parametrize("workload", ["mnist", "resnet"])
def test_a_batch_is_cut_without_waiting(workload: str) -> None:
    task = task_of(workload, precision="fp32")
    task.train.fetch(np.arange(BATCH))
    with waiting_is_an_error():
        batch = task.train.fetch(np.arange(BATCH, 2 * BATCH))
    assert batch.count == BATCH


@pytest.mark.parametrize("strategy", ["single", *STRATEGIES[:2]])
@pytest.mark.parametrize("workload", ["mnist", "resnet"])
def test_the_trainer_waits_for_nothing_between_two_looks(workload: str, strategy: str) -> None:
    """It looks at losses, the wish to stop and gradients that are not finite every 20 steps."""
    small = ("--model=resnet18", "--image-size=32", "--synthetic") if workload == "resnet" else ()
    line = ("--batch-size=4", "--num-steps=400", "--quiet", f"--strategy={strategy}", *small)
    outcome = run([sys.executable, str(SCRIPT), workload, *line], code=0)
    assert outcome.out.splitlines()[-1] == "nothing was waited for in updates 23 to 36"
