"""``hvdtrain.mnist`` on digits of which one is not a number: the last one of the first epoch."""

from __future__ import annotations

import importlib
import sys
from typing import Any

import numpy as np

from hvdtrain import mnist
from hvdtrain.launch import ending
from hvdtrain.steps.sharding import permutation
from hvdtrain.workloads.base import Loaded

SAMPLES = 1500
BAD = permutation(SAMPLES, 0, 0)[-1]

if __name__ == "__main__":
    framework = "tensorflow" if "--framework=tensorflow" in sys.argv else "pytorch"
    tasks = importlib.import_module(f"hvdtrain.workloads.{framework}")
    fetch = tasks.InMemory.fetch

    def spoilt(data: Any, indices: np.ndarray[Any, Any]) -> Loaded:
        batch = fetch(data, indices)
        if data.samples != SAMPLES:
            return batch  # of the test set
        factor = np.where(indices == BAD, np.nan, 1.0).reshape(-1, 1, 1, 1)
        pixels = np.asarray(batch.x) * factor
        if framework == "tensorflow":
            return Loaded(tasks.tf.constant(pixels), batch.y)
        return Loaded(tasks.torch.from_numpy(pixels), batch.y)

    tasks.InMemory.fetch = spoilt
    ending.run(mnist.main)
