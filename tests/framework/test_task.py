"""The update of PyTorch's task, in one process."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.config.options import Options


def test_updates_are_seeded_as_by_torch_and_queue_nothing() -> None:
    """torch.manual_seed notes seed and stack for each kind of device that is not in use."""
    torch = pytest.importorskip("torch")
    from hvdtrain.workloads.data.dataset import Batch
    from hvdtrain.workloads.torch_task import InMemory, TorchTask

    options = replace(Options(), precision="fp32", device="cpu", weight_decay=0.0)
    x, y = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    task = TorchTask(model, options, InMemory(x, y, "cpu"), None)
    batch = Batch(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    drawn = []
    model[0].register_forward_hook(lambda module, args, output: drawn.append(output.tolist()))
    queued = torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    for _ in range(2):
        task.update(batch, learning_rate=0.1, seed=3)
    assert torch.cuda._lazy_seed_tracker.manual_seed_all_cb is queued
    torch.manual_seed(3)
    assert drawn == [torch.nn.functional.dropout(torch.ones(8, 4)).tolist()] * 2
