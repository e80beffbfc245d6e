"""ResNets as a workload: recipe, help text, and the task for one process."""

from __future__ import annotations

import importlib
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import plural
from hvdtrain.tasks.task import LearningRates, Recipe, Task, Workload
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.image_folder import (
    DALI,
    SYNTHETIC_CLASSES,
    ImageFolder,
    ImageOptions,
)

LR = LearningRates(sgd=0.0125, adam=0.0005, adamw=0.0005, lars=1.0, lamb=0.001)

EPILOG = f"""\
models:
  resnet18 resnet34 resnet50 (default) resnet101 resnet152

data:
  --data DIR contains train/CLASS/*.jpg and val/CLASS/*.jpg (also PNG; also
  grey and CMYK images), or the output of `hvdtrain pack`. Without --data: a
  benchmark on random images, 100 updates unless --num-steps is set, no
  evaluation.

defaults:
  batch 32 per rank; weight decay 1e-4; 90 epochs: 5 of warm-up, then cosine
  decay to 0; bf16 if the processor or GPU supports it; learning rate per rank
  (of lars and lamb: for a batch of 32, see --lr-scaling):
    {LR}

examples:
  mpirun -n 2 python -m hvdtrain.resnet --batch-size 8
  mpirun -n 8 python -m hvdtrain.resnet --data ~/imagenet \\
      --checkpoint-dir checkpoints
  mpirun -n 2 python -m hvdtrain.resnet --framework tensorflow \\
      --model resnet18 --num-steps 20
"""

# Of ImageNet's training pixels, as fractions, by channel, as in the ResNet papers.
MEAN = (0.485, 0.456, 0.406)
DEVIATION = (0.229, 0.224, 0.225)
RESIZE = 256 / 224  # the shorter side before the centre crop of an evaluation, times the crop
# Times its shorter side. Of a longer image only the middle is resized for an evaluation: otherwise
# one of 20,000 x 2 pixels would take gigabytes.
MAX_LENGTH = 16
LOADERS = {"pytorch": "torch_images", "tensorflow": "tf_images"}


def recipe(_: ImageOptions) -> Recipe:
    """Return the recipe of Goyal et al. (2017): 0.1 for 256 images, 5 warm-up and 90 epochs."""
    return Recipe(
        batch_size=32,
        lr=LR,
        epochs=90,
        warmup_epochs=5.0,
        lr_schedule="cosine",
        weight_decay=1e-4,
    )


def build(options: ImageOptions) -> Task:
    """Return the task in the framework that the options name."""
    if options.image_size < 32:
        raise UsageError(f"--image-size {options.image_size}: a ResNet needs 32 pixels or more")
    if options.framework != "pytorch" and options.decoder == DALI:
        raise UsageError(f"--decoder dali: {options.framework} decodes images itself: omit it")
    module = importlib.import_module(f"hvdtrain.workloads.resnet.{options.framework}")
    loader = importlib.import_module(f"hvdtrain.workloads.data.{LOADERS[options.framework]}")
    task: Task
    if options.data is None:
        task = module.task(options, loader.Synthetic(options), None, SYNTHETIC_CLASSES)
        task.speed_only = (
            "--synthetic: measuring speed on random images, {updates}; nothing is learned"
            if options.synthetic
            else "no --data: measuring speed on random images, {updates}; use --data DIR to train"
        )
        return task
    train, test, broken = _load(options.data, options)
    folder, random, centre = loader.Folder, "random_crop", "centre_crop"
    decoder = _decoder(options)
    if decoder == DALI:
        dali = importlib.import_module("hvdtrain.workloads.data.dali_images")
        folder, random, centre = dali.dali_folder, "random_view", "centre_view"
    task = module.task(
        options,
        folder(train, getattr(module, random), options),
        None if test is None else folder(test, getattr(module, centre), options),
        len(train.classes),
    )
    task.decoder = decoder
    notes = ["images are decoded by DALI"] if decoder == DALI else []
    notes += image_folder.notes(options.data, train, test)
    if broken:
        notes.append(f"skipped {plural(len(broken), 'broken image')}, e.g. {broken[0]}")
    task.notes = tuple(notes)
    return task


def _load(data: Path, options: ImageOptions) -> tuple[ImageFolder, ImageFolder | None, list[str]]:
    """Return the training and the test images, and the names of skipped ones."""
    train, test = image_folder.load(data, skip_broken=options.skip_broken)
    broken: list[str] = []
    if options.skip_broken:
        decode = image_folder.by_pillow
        if options.framework == "tensorflow":
            loader = importlib.import_module(f"hvdtrain.workloads.data.{LOADERS['tensorflow']}")
            decode = loader.by_tensorflow
        workers = options.workers or 1
        train, broken = image_folder.without_broken(train, workers, decode)
        if test is not None:
            test, more = image_folder.without_broken(test, workers, decode)
            broken = broken + more
    return train, test, broken


def _decoder(options: ImageOptions) -> str:
    """Return the name of the library that decodes; empty: the framework does."""
    if options.framework != "pytorch":
        return ""
    dali = importlib.import_module("hvdtrain.workloads.data.dali_decoder")
    return str(dali.choose_decoder(options))


WORKLOAD = Workload(
    name="resnet",
    description="Train a ResNet on images.",
    epilog=EPILOG,
    models=("resnet50", "resnet18", "resnet34", "resnet101", "resnet152"),
    recipe=recipe,
    build=build,
    options=ImageOptions,
    prefers_bf16=lambda model: True,
    random_without_data=True,
)
