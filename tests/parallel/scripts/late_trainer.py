"""hvdtrain.mnist in which one rank sleeps before each of its steps.

late_trainer.py RANK MILLISECONDS OPTIONS...
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from hvdtrain import mnist
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.tasks.task import Task

late, milliseconds = int(sys.argv.pop(1)), int(sys.argv.pop(1))
build = mnist.WORKLOAD.build


def sleepy(*arguments: Any) -> Task:
    task = build(*arguments)
    update = task.update

    def slowly(*words: Any, **more: Any) -> Any:
        if detect(os.environ).rank == late:
            time.sleep(milliseconds / 1000)
        return update(*words, **more)

    task.update = slowly  # type: ignore[method-assign]
    return task


object.__setattr__(mnist.WORKLOAD, "build", sleepy)
run_and_exit(mnist.main)
