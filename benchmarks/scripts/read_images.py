"""Read images as for a training, in one process: read_images.py LOADER DATA.

DATA holds train/CLASS/*; LOADER is hvdtrain, dali, torchvision, timm or decoding. Each turns files
into normalised float batches of 16 crops of 224 pixels: hvdtrain by its own loader, with Pillow or
(dali) with NVIDIA DALI on the CPU; torchvision by
ImageFolder, a DataLoader and the transforms of its reference training; timm by its own dataset,
loader and prefetcher, with the same augmentation. "decoding" stops when an image is decoded whole,
in RGB: what a loader that decodes all of it cannot exceed.
"""

import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from arguments import DEVIATION, MEAN
from PIL import Image

from hvdtrain.steps.sharding import Shards
from hvdtrain.tasks.training_step_pytorch import network_input
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.image_folder import DALI, PILLOW, ImageOptions
from hvdtrain.workloads.data.torch_images import Folder
from hvdtrain.workloads.resnet.pytorch import random_crop, random_view, torchvision

BATCH, SIZE, SECONDS = 16, 224, 6.0
which, data = sys.argv[1], Path(sys.argv[2])
torch.set_num_threads(1)
train, _ = image_folder.load(data)
if len(train.files) < BATCH:
    sys.exit(f"{data}: give at least {BATCH} images, of fewer timm's loader makes no batch")


def hvdtrain(decoder: str = PILLOW) -> Iterator[int]:
    options = ImageOptions(image_size=SIZE, workers=0)
    if decoder == DALI:
        from hvdtrain.workloads.data.dali_images import dali_folder

        folder = dali_folder(train, random_view, options)
    else:
        folder = Folder(train, random_crop, options)
    deviation = 255 * torch.tensor(DEVIATION).view(3, 1, 1)
    mean = torch.tensor(MEAN).view(3, 1, 1)
    scale, offset = 1 / deviation, -255 * mean / deviation
    for epoch in itertools.count():
        for _, batch in folder.training(Shards(folder.samples, BATCH).parts(epoch)):
            yield len(network_input(batch.x, torch.float32, (scale, offset), torch.channels_last))


def loader() -> Iterator[int]:
    transforms = torchvision().transforms
    change = transforms.Compose(
        [
            transforms.RandomResizedCrop(SIZE),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize(MEAN, DEVIATION),
        ]
    )
    images = torchvision().datasets.ImageFolder(str(data / "train"), change)
    while True:
        for x, _ in torch.utils.data.DataLoader(images, BATCH, shuffle=True):
            yield len(x)


def timms() -> Iterator[int]:
    from timm.data import create_dataset, create_loader

    images = create_loader(
        create_dataset("", root=str(data / "train"), is_training=True, batch_size=BATCH),
        input_size=(3, SIZE, SIZE),
        batch_size=BATCH,
        is_training=True,
        scale=(0.08, 1.0),
        ratio=(3 / 4, 4 / 3),
        hflip=0.5,
        color_jitter=None,
        interpolation="bilinear",
        mean=MEAN,
        std=DEVIATION,
        num_workers=0,
        persistent_workers=False,
        device=torch.device("cpu"),
    )
    while True:
        for x, _ in images:
            yield len(x)


def decoding() -> Iterator[int]:
    for index in itertools.cycle(range(len(train.files))):
        Image.open(train.files.name(index)).convert("RGB")
        yield 1


candidates: dict[str, Callable[[], Iterator[int]]] = {
    "hvdtrain": hvdtrain,
    "dali": functools.partial(hvdtrain, DALI),
    "torchvision": loader,
    "timm": timms,
    "decoding": decoding,
}
batches = candidates[which]()
sum(itertools.islice(batches, 4))  # what is read for the first time
start, used, count = time.perf_counter(), time.process_time(), 0
while time.perf_counter() - start < SECONDS:
    count += next(batches)
print("images_per_second", count / (time.perf_counter() - start))
# Of all threads; unlike images/s hardly changed by what else runs on the machine.
print("processor_milliseconds", 1e3 * (time.process_time() - used) / count)
