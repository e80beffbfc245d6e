"""SSD300 as a workload: options, recipe, help text, and the task for one process."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from hvdtrain.config.declare import optional, switch
from hvdtrain.errors import UsageError
from hvdtrain.tasks.task import LearningRates, Recipe, Task, Workload
from hvdtrain.workloads.data import coco
from hvdtrain.workloads.data.image_folder import SyntheticOptions, broken_files

LR = LearningRates(sgd=2.6e-3, adam=1e-4, adamw=1e-4, lars=0.5, lamb=0.001)

ALIASES = {
    "--backbone": "--model",
    "--bs": "--batch-size",
    "-e": "--epochs",
    "--learning-rate": "--lr",
    "-m": "--momentum",
    "--wd": "--weight-decay",
    "-s": "--seed",
    "--multistep": "--lr-schedule multistep --lr-milestones",
    "--warmup": "--warmup-steps",
    "--evaluation": "--evaluate-epochs",
    "--report-period": "--log-every",
    "--num-workers": "--workers",
    "--amp": "--precision auto",
    "--model-config": "--config",
    "--data-config": "--config",
    "--mode training": "",
    "--mode evaluation": "--evaluate-only",
    "--mode benchmark-training": "--benchmark training",
    "--mode benchmark-inference": "--benchmark inference",
    "--model-name ssd300": "",
    "--device-gpu": "",
    "--multi-gpu": "",
}

EPILOG = """\
models:
  backbone: resnet18 resnet34 resnet50 (default) resnet101 resnet152;
  --backbone-path FILE contains its weights, e.g. model.safetensors of a
  checkpoint of hvdtrain.resnet; nothing is downloaded

data:
  --data DIR has COCO's layout: train2017/*.jpg, val2017/*.jpg,
  annotations/instances_*2017.json. Without --data: a benchmark on random
  images with coloured boxes, 100 updates unless --num-steps is set.

defaults:
  batch 64 per rank; one epoch of warm-up, decay by 10 after 43 and 54 of 65
  epochs; momentum 0.9, weight decay 5e-4; learning rate at a global batch of
  32, scaled linearly, of lars and lamb by the square root (see --lr-scaling):
    {rates}

aliases, as in publications on SSD:
{aliases}

examples:
  mpirun -n 2 python -m hvdtrain.ssd300 --model resnet18 --batch-size 4 \\
      --num-steps 20
  mpirun -n 8 python -m hvdtrain.ssd300 --data ~/coco --batch-size 32 \\
      --checkpoint-dir checkpoints
  mpirun -n 8 python -m hvdtrain.ssd300 --data ~/coco --mode evaluation \\
      --checkpoint-dir checkpoints
"""


@dataclass(frozen=True)
class DetectorOptions(SyntheticOptions):
    """Options of the training of a detector."""

    ALIASES: ClassVar = {**SyntheticOptions.ALIASES, **ALIASES}

    skip_broken: bool = switch("skip and count images that are missing or cannot be decoded")
    backbone_path: Path | None = optional("file with the initial weights of the backbone", Path)
    pictures: Path | None = optional(
        "directory for 12 images with the detected boxes, written at each evaluation", Path
    )


def recipe(_: DetectorOptions) -> Recipe:
    """Return the recipe of Liu et al. (2016) for COCO, over 65 epochs."""
    return Recipe(
        batch_size=64,
        lr=LR,
        lr_base_batch=32,
        epochs=65,
        warmup_epochs=1.0,
        lr_schedule="multistep",
        lr_milestones=(43.0, 54.0),
        weight_decay=5e-4,
    )


def build(options: DetectorOptions) -> Task:
    """Return the task.

    Raises:
        UsageError: TensorFlow was requested, or the data is invalid.
    """
    if options.framework != "pytorch":
        raise UsageError(f"--framework {options.framework}: ssd300 supports only PyTorch; omit it")
    if options.pictures:
        try:
            options.pictures.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--pictures {options.pictures}: {error.strerror}") from error
    module = importlib.import_module("hvdtrain.workloads.ssd300.pytorch")
    if options.data is None:
        data = importlib.import_module("hvdtrain.workloads.ssd300.data")
        task: Task = module.task(options, *data.drawn(options.seed))
        task.notes = ("SYNTHETIC images: coloured boxes on noise",)
        return task
    splits = coco.load(options.data, skip_broken=options.skip_broken)
    train, test = (
        split and (_without_broken(split, options.workers) if options.skip_broken else split)
        for split in splits
    )
    assert train is not None
    task = module.task(options, train, test)
    absent = f"no annotations/instances_val2017.json in {options.data}: nothing is evaluated"
    task.notes = (*train.notes, *(test.notes if test else [absent]))
    return task


def _without_broken(images: coco.Coco, workers: int | None) -> coco.Coco:
    broken = broken_files(images.files, workers or 1)
    if not broken:
        return images
    return coco.without(images, broken, f"that cannot be decoded, {images.files.name(broken[0])}")


WORKLOAD = Workload(
    name="ssd300",
    description="Train a detector, SSD300, on images with boxes.",
    epilog=EPILOG.format(
        rates=LR,
        aliases="\n".join(
            f"  {name:27} {words or '(no effect)'}" for name, words in ALIASES.items()
        ),
    ),
    models=("resnet50", "resnet18", "resnet34", "resnet101", "resnet152"),
    recipe=recipe,
    build=build,
    options=DetectorOptions,
    prefers_bf16=lambda model: True,
    random_without_data=True,
)
