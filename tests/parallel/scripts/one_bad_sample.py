"""``hvdtrain.mnist`` on digits of which one is not a number: the last one of the first epoch.

``BAD`` names another place, or several, such as ``0:1000``. ``FUSED`` makes the optimizer a fused
one, as on a GPU; by ``deferred`` it also learns later that an update was left out.
"""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

from hvdtrain import mnist
from hvdtrain.steps.sharding import permutation
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.workloads.data.dataset import Batch

SAMPLES = 1500
TASK = {"pytorch": "torch_task", "tensorflow": "tf_task"}
first, _, end = os.environ.get("BAD", "-1").partition(":")
BAD = permutation(SAMPLES, 0, 0)[int(first) : int(end) if end else int(first) + 1 or None]

if __name__ == "__main__":
    framework = "tensorflow" if "--framework=tensorflow" in sys.argv else "pytorch"
    tasks = importlib.import_module(f"hvdtrain.workloads.{TASK[framework]}")
    fetch = tasks.InMemory.fetch

    def spoilt(data: Any, indices: np.ndarray[Any, Any]) -> Batch:
        batch = fetch(data, indices)
        if data.samples != SAMPLES:
            return batch  # of the test set
        factor = np.where(np.isin(indices, BAD), np.nan, 1.0).reshape(-1, 1, 1, 1)
        pixels = np.asarray(batch.x) * factor
        if framework == "tensorflow":
            return Batch(tasks.tf.constant(pixels), batch.y)
        return Batch(tasks.torch.from_numpy(pixels), batch.y)

    tasks.InMemory.fetch = spoilt
    if fused := os.environ.get("FUSED"):
        start = tasks.TorchTask.__init__

        def start_fused(task: Any, *arguments: Any, **named: Any) -> None:
            start(task, *arguments, **named)
            task.optimizer = tasks.make_optimizer(task.model, task.options, fused=True)
            task.may_defer = fused == "deferred"

        tasks.TorchTask.__init__ = start_fused
    run_and_exit(mnist.main)
