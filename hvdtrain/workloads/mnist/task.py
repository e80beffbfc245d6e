"""MNIST as a workload: recipe, help text, and the task for one process."""

from __future__ import annotations

import dataclasses
import importlib

from hvdtrain.tasks.task import LearningRates, Recipe, Task, Workload
from hvdtrain.workloads.mnist import data
from hvdtrain.workloads.mnist.data import MnistOptions

LR = LearningRates(sgd=0.03, adam=0.001, adamw=0.001, lars=1.25, lamb=0.008)
DIGITS_LR = LearningRates(sgd=0.0125, adam=0.0005, adamw=0.0005, lars=2.0, lamb=0.004)
DIGITS_DROPOUT = 0.1

EPILOG = f"""\
models:
  tutorial   two convolutions (32, 64), a dense layer (128); 1.2 million weights
  small      the network of Horovod's MNIST example; 22 thousand parameters

data:
  --data DIR contains the four IDX files of MNIST (or Fashion-MNIST), gzipped
  or not, in DIR or DIR/MNIST/raw, or the output of `hvdtrain pack`. Without
  --data: the 1,797 handwritten digits of scikit-learn.

defaults:
  batch 64 per rank; momentum 0.9, weight decay 1e-4; 6 epochs: half an epoch
  of warm-up, then linear decay to 0; bf16 for the tutorial network if the
  processor or GPU supports it, otherwise fp32; learning rate per rank (of lars
  and lamb: for a batch of 64, see --lr-scaling):
    {LR}
  For the small set of embedded digits: batch 16; dropout {DIGITS_DROPOUT};
  14 epochs, 3 of warm-up; random rotation, shear, scale and shift of every
  image in each epoch; learning rate (of lars and lamb: for a batch of 16):
    {DIGITS_LR}

examples:
  python -m hvdtrain.mnist
  mpirun -n 2 python -m hvdtrain.mnist --data ~/mnist --epochs 6 \\
      --summary result.json
  mpirun -n 2 python -m hvdtrain.mnist --framework tensorflow \\
      --checkpoint-dir checkpoints
"""


def recipe(options: MnistOptions) -> Recipe:
    """Return the default recipe; the embedded digits are few, so they take small batches."""
    few = options.data is None
    return Recipe(
        batch_size=16 if few else 64,
        lr=DIGITS_LR if few else LR,
        epochs=14 if few else 6,
        warmup_epochs=3.0 if few else 0.5,
        lr_schedule="linear",
        weight_decay=1e-4,
    )


def build(options: MnistOptions) -> Task:
    """Return the task in the framework that the options name."""
    train, test = data.load(options.data)
    if options.data is None and options.dropout is None:
        options = dataclasses.replace(options, dropout=DIGITS_DROPOUT)
    module = importlib.import_module(f"hvdtrain.workloads.mnist.{options.framework}")
    task: Task = module.task(options, train, test)
    return task


WORKLOAD = Workload(
    name="mnist",
    description="Train on handwritten digits.",
    epilog=EPILOG,
    models=("tutorial", "small"),
    recipe=recipe,
    build=build,
    options=MnistOptions,
    short_steps=lambda model: True,
    prefers_bf16=lambda model: model == "tutorial",
)
