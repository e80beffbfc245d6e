"""``hvdtrain.mnist`` on digits of which one is not a number: the last one of the first epoch.

``BAD`` names another place, or several, such as ``0:1000``. ``FUSED`` makes the optimizer a fused
one, as on a GPU; by ``deferred`` it also learns later that an update was left out.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from hvdtrain import mnist
from hvdtrain.steps.sharding import Part, permutation
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.tasks.dataset import Batch

SAMPLES = 1500
first, _, end = os.environ.get("BAD", "-1").partition(":")
BAD = permutation(SAMPLES, 0, 0)[int(first) : int(end) if end else int(first) + 1 or None]

if __name__ == "__main__":
    framework = "tensorflow" if "--framework=tensorflow" in sys.argv else "pytorch"
    tasks = importlib.import_module(f"hvdtrain.tasks.{framework}")
    training = tasks.InMemory.training
    tensor = tasks.tf.constant if framework == "tensorflow" else tasks.torch.from_numpy

    def spoilt(data: Any, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        for part, batch in training(data, parts):
            factor = np.where(np.isin(part.indices, BAD), np.nan, 1.0).reshape(-1, 1, 1, 1)
            yield part, Batch(tensor(np.asarray(batch.x) * factor), batch.y)

    tasks.InMemory.training = spoilt
    if fused := os.environ.get("FUSED"):
        start = tasks.TorchTask.__init__

        def start_fused(task: Any, *arguments: Any, **named: Any) -> None:
            start(task, *arguments, **named)
            task.optimizer = tasks.make_optimizer(task.model, task.options, fused=True)
            task.may_defer = fused == "deferred"

        tasks.TorchTask.__init__ = start_fused
    run_and_exit(mnist.main)
