"""``hvdtrain.mnist`` on digits of which one is not a number: the last one of the first epoch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from hvdtrain import mnist
from hvdtrain.steps.sharding import permutation
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.workloads.data.dataset import Batch

SAMPLES = 1500
TASK = {"pytorch": "torch_task", "tensorflow": "tf_task"}
BAD = permutation(SAMPLES, 0, 0)[-1]

if __name__ == "__main__":
    framework = "tensorflow" if "--framework=tensorflow" in sys.argv else "pytorch"
    tasks = importlib.import_module(f"hvdtrain.workloads.{TASK[framework]}")
    fetch = tasks.InMemory.fetch

    def spoilt(data: Any, indices: np.ndarray[Any, Any]) -> Batch:
        batch = fetch(data, indices)
        if data.samples != SAMPLES:
            return batch  # of the test set
        factor = np.where(indices == BAD, np.nan, 1.0).reshape(-1, 1, 1, 1)
        pixels = np.asarray(batch.x) * factor
        if framework == "tensorflow":
            return Batch(tasks.tf.constant(pixels), batch.y)
        return Batch(tasks.torch.from_numpy(pixels), batch.y)

    tasks.InMemory.fetch = spoilt
    run_and_exit(mnist.main)
