"""Read training batches ahead by worker processes: read_ahead.py DECODER DATA WORKERS.

DATA holds train/CLASS/*; DECODER is pillow or dali. Batches of crops of 224 pixels arrive on the
device, a GPU if there is one, and are normalised there; nothing is trained.
"""

import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from hvdtrain.steps.sharding import Shards
from hvdtrain.system.machine import accelerator
from hvdtrain.tasks.training_step_pytorch import network_input
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.dali_images import dali_folder
from hvdtrain.workloads.data.image_folder import DALI, ImageOptions
from hvdtrain.workloads.data.torch_images import Folder
from hvdtrain.workloads.resnet.pytorch import normalization, random_crop, random_view

SIZE, WARM, SECONDS = 224, 10, 8.0


def batches(options: ImageOptions, data: Path, batch: int) -> Iterator[int]:
    """Yield the number of images of each batch that is on the device."""
    train, _ = image_folder.load(data)
    if options.decoder == DALI:
        folder = dali_folder(train, random_view, options)
    else:
        folder = Folder(train, random_crop, options)
    copies = accelerator.Copies(torch.device(options.device))
    scale = tuple(part.to(options.device) for part in normalization())
    for epoch in itertools.count():
        for _, loaded in folder.training(Shards(folder.samples, batch).parts(epoch)):
            yield len(network_input(copies(loaded.x), torch.float32, scale, torch.channels_last))


def processor_seconds() -> float:
    """Return those of this process and its workers up to now."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def main() -> None:
    """Print images/s and processor time per image."""
    decoder, data, workers = sys.argv[1:]
    device = accelerator.kind()
    batch = 256 if device != accelerator.CPU else 16  # a rehearsal
    options = ImageOptions(
        decoder=decoder, image_size=SIZE, workers=int(workers), device=device, data=Path(data)
    )
    counts = batches(options, Path(data), batch)
    sum(itertools.islice(counts, WARM))
    start, used, number = time.perf_counter(), processor_seconds(), 0
    while time.perf_counter() - start < SECONDS:
        number += next(counts)
    if device != accelerator.CPU:
        torch.cuda.synchronize()
    print("images_per_second", number / (time.perf_counter() - start))
    print("processor_milliseconds", 1e3 * (processor_seconds() - used) / number)


if __name__ == "__main__":  # a worker imports this file, too
    main()
