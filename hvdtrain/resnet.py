"""``mpirun -n 2 python -m hvdtrain.resnet``: train a ResNet on images."""

from __future__ import annotations

import sys

from hvdtrain.launch import terminal

if __name__ == "__main__" and not {"-h", "--help", "--quiet"} & set(sys.argv):
    terminal.begin("resnet")

import dataclasses
import importlib

from hvdtrain.errors import UsageError
from hvdtrain.launch import ending
from hvdtrain.training.options import Options
from hvdtrain.training.plan import Recipe, Workload
from hvdtrain.training.trainer import main as train_main
from hvdtrain.workloads.base import Task, TaskOptions
from hvdtrain.workloads.resnet import data

EPILOG = """\
models:
  resnet18 resnet34 resnet50 (default) resnet101 resnet152

data:
  --data DIR holds train/CLASS/*.jpg and val/CLASS/*.jpg (PNG too; grey and CMYK images too).
  Without it: random images made once, 100 updates unless told otherwise, no evaluation.

defaults:
  batch 32 a rank, learning rate 0.0125 a rank (0.0005 with adam) and weight decay 1e-4; 90 epochs
  with 5 of warm-up, then a cosine to 0; bf16 where the processor or GPU has it

examples:
  mpirun -n 2 python -m hvdtrain.resnet --batch-size 8
  mpirun -n 8 python -m hvdtrain.resnet --data ~/imagenet --checkpoint-dir checkpoints
  mpirun -n 2 python -m hvdtrain.resnet --framework tensorflow --model resnet18 --num-steps 20
"""

SYNTHETIC_STEPS = 100


def is_synthetic(options: Options) -> bool:
    """Whether random images take the place of real ones."""
    return options.data is None


def recipe(options: Options) -> Recipe:
    """Goyal et al. (2017): 0.1 for 256 images, five epochs of warm-up, 90 epochs."""
    return Recipe(
        batch_size=32,
        lr=0.0125 if options.optimizer == "sgd" else 0.0005,
        epochs=90,
        warmup_epochs=5.0,
        lr_schedule="cosine",
        weight_decay=1e-4,
    )


def build(options: Options, settings: TaskOptions) -> Task:
    """The task in the framework that the options name."""
    if options.dropout is not None:
        raise UsageError("--dropout is for hvdtrain.mnist: a ResNet has none")
    if settings.image_size < 32:
        raise UsageError(f"--image-size {settings.image_size}: a ResNet needs 32 pixels or more")
    module = importlib.import_module(f"hvdtrain.workloads.resnet.{options.framework}")
    task: Task
    if options.data is None:
        task = module.task(settings, module.synthetic(settings), None, data.SYNTHETIC_CLASSES)
        task.notes = ("SYNTHETIC images: random pixels, for measuring speed; nothing is learnt",)
        return task
    train, test = data.load(options.data, skip_broken=options.skip_broken)
    left_out = []
    if options.skip_broken:
        workers = max(1, settings.workers)
        train, broken = data.without_broken(train, workers)
        left_out += broken
        if test is not None:
            test, broken = data.without_broken(test, workers)
            left_out += broken
    test_settings = dataclasses.replace(settings, workers=min(settings.workers, 1))
    task = module.task(
        settings,
        module.folder(train, settings, training=True),
        None if test is None else module.folder(test, test_settings, training=False),
        len(train.classes),
    )
    if left_out:
        task.notes = (f"left out {len(left_out)} broken images, {left_out[0]} for one",)
    return task


WORKLOAD = Workload(
    name="resnet",
    models=("resnet50", "resnet18", "resnet34", "resnet101", "resnet152"),
    recipe=recipe,
    build=build,
    short_steps=lambda model: False,
    prefers_bf16=lambda model: True,
    default_steps=lambda options: (
        SYNTHETIC_STEPS if is_synthetic(options) and options.epochs is None else None
    ),
)


def main() -> int:
    """Train; the exit code."""
    return train_main(
        WORKLOAD, sys.argv[1:], description="Train a ResNet on images.", epilog=EPILOG
    )


if __name__ == "__main__":
    ending.run(main)
