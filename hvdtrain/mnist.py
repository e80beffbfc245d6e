"""``mpirun -n 2 python -m hvdtrain.mnist``: train on handwritten digits."""

from __future__ import annotations

import sys

from hvdtrain.launch import terminal

if __name__ == "__main__" and not {"-h", "--help", "--quiet"} & set(sys.argv):
    terminal.begin("mnist")

import importlib

from hvdtrain.errors import UsageError
from hvdtrain.launch import ending
from hvdtrain.training.options import Options
from hvdtrain.training.plan import Recipe, Workload
from hvdtrain.training.trainer import main as train_main
from hvdtrain.workloads.base import Task, TaskOptions
from hvdtrain.workloads.mnist import data

EPILOG = """\
models:
  tutorial   two convolutions (32, 64) and a dense layer of 128; 1.2 million parameters
  small      the net of Horovod's MNIST example; 22 thousand parameters

data:
  --data DIR holds the four IDX files of MNIST (or Fashion-MNIST), gzipped or not, flat or under
  MNIST/raw. Without it: the 1,797 handwritten digits that scikit-learn brings along.

defaults:
  batch 64 a rank, learning rate 0.03 a rank with momentum 0.9 and weight decay 1e-4; 6 epochs with
  half an epoch of warm-up, then a straight line to 0 (20 epochs and 2 on the embedded digits)

examples:
  python -m hvdtrain.mnist
  mpirun -n 2 python -m hvdtrain.mnist --data ~/mnist --epochs 6 --summary result.json
  mpirun -n 2 python -m hvdtrain.mnist --framework tensorflow --checkpoint-dir checkpoints
"""


def recipe(options: Options) -> Recipe:
    """The default recipe; the embedded digits are few, so they take more epochs."""
    return Recipe(
        batch_size=64,
        lr=0.03,
        epochs=6 if options.data else 20,
        warmup_epochs=0.5 if options.data else 2.0,
        lr_schedule="linear",
        weight_decay=1e-4,
    )


def build(options: Options, settings: TaskOptions) -> Task:
    """The task in the framework that the options name."""
    if options.synthetic:
        raise UsageError("--synthetic is for hvdtrain.resnet: leave --data out for embedded digits")
    if options.image_size not in (None, data.SIDE):
        raise UsageError(f"--image-size {options.image_size}: the images of MNIST are 28x28")
    train, test = data.load(options.data)
    module = importlib.import_module(f"hvdtrain.workloads.mnist.{options.framework}")
    task: Task = module.task(settings, train, test)
    return task


WORKLOAD = Workload(
    name="mnist",
    models=("tutorial", "small"),
    recipe=recipe,
    build=build,
    short_steps=lambda model: True,
    prefers_bf16=lambda model: model == "tutorial",
)


def main() -> int:
    """Train; the exit code."""
    return train_main(
        WORKLOAD, sys.argv[1:], description="Train on handwritten digits.", epilog=EPILOG
    )


if __name__ == "__main__":
    ending.run(main)
