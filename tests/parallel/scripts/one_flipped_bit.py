"""``hvdtrain.mnist`` in which one bit of one parameter flips after update 7 on rank ``FLIPS``."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

import numpy as np

from hvdtrain import mnist
from hvdtrain.system.runtime.exit import run_and_exit

TASK = {"pytorch": "TorchTask", "tensorflow": "TFTask"}
BIT = 1 << 20  # of the mantissa, so that nothing else happens
updates = 0

if __name__ == "__main__":
    framework = "tensorflow" if "--framework=tensorflow" in sys.argv else "pytorch"
    kind = getattr(importlib.import_module(f"hvdtrain.tasks.{framework}"), TASK[framework])
    make_update = kind.update

    def update(task: Any, *arguments: Any, **more: Any) -> Any:
        global updates
        loss = make_update(task, *arguments, **more)
        updates += 1
        if updates == 7 and os.environ["OMPI_COMM_WORLD_RANK"] == os.environ["FLIPS"]:
            if framework == "tensorflow":
                weights = task.model.trainable_variables[2]
                array = weights.numpy().copy()
            else:  # an array of the same memory
                array = list(task.model.parameters())[2].detach().numpy()
            array.reshape(-1).view(np.uint32)[5] ^= BIT
            if framework == "tensorflow":
                weights.assign(array)
        return loss

    kind.update = update
    run_and_exit(mnist.main)
