"""MNIST as ``hvdtrain.mnist`` trains it, with faults on request, and a record of the samples."""

from __future__ import annotations

import sys
from dataclasses import replace

from hvdtrain.config.options import Options
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.tasks.task import Task
from hvdtrain.training import trainer
from hvdtrain.workloads.mnist.task import WORKLOAD
from tests.faults.task import Faulty


def build(options: Options) -> Task:
    """Return the task with samples whose loading fails on request."""
    task = WORKLOAD.build(options)
    task.train = Faulty(task.train)
    return task


def main() -> int:
    """Train; return the exit code."""
    return trainer.main(replace(WORKLOAD, build=build), sys.argv[1:])


if __name__ == "__main__":
    run_and_exit(main)
