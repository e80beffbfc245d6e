"""Read one epoch of images as for a training: read_packed.py DATA [--cold] [--crop].

Under mpirun each rank reads its parts, in its own process. DATA is what --data takes. Prints, over
all ranks, images/s, and per image the files opened and the bytes read by system calls and from the
disk. With --cold the files are dropped from the page cache first (what others have mapped stays).
With --crop each image is decoded and cropped, too; otherwise its bytes are read and nothing else.
"""

import os
import sys
import time
from pathlib import Path

import torch
from mpi4py import MPI

from hvdtrain.steps.sharding import Shards
from hvdtrain.workloads.data import image_folder
from hvdtrain.workloads.data.image_folder import ImageOptions
from hvdtrain.workloads.data.torch_images import Folder
from hvdtrain.workloads.resnet.pytorch import random_crop

BATCH = 16
data, cold, crop = Path(sys.argv[1]), "--cold" in sys.argv, "--crop" in sys.argv
world = MPI.COMM_WORLD
torch.set_num_threads(1)


def counters() -> dict[str, int]:
    lines = Path("/proc/self/io").read_text().splitlines()
    return {key: int(value) for key, value in (line.split(": ") for line in lines)}


def drop() -> None:
    """Let the system forget what it holds of the data; what is not written yet it would keep."""
    os.sync()
    for path in data.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


if cold and world.rank == 0:
    drop()
train, _ = image_folder.load(data)
folder = Folder(train, random_crop, ImageOptions(workers=0))
shards = Shards(folder.samples, BATCH * world.size, rank=world.rank, size=world.size)
opened = 0


def count(event: str, arguments: tuple[object, ...]) -> None:
    global opened
    opened += event == "open" and str(arguments[0]).startswith(str(data))


sys.addaudithook(count)
world.Barrier()
before, start = counters(), time.perf_counter()
if crop:
    images = sum(batch.count for _, batch in folder.training(shards.parts(0)))
else:
    images = 0
    for part in shards.parts(0):
        train.files.will_need(part.indices.tolist())
        for index in part.indices.tolist():
            with train.files.open(index) as file:
                file.read()
        images += part.count
seconds = world.allreduce(time.perf_counter() - start, MPI.MAX)
after = counters()
facts = [
    images,
    opened,
    after["rchar"] - before["rchar"],
    after["read_bytes"] - before["read_bytes"],
]
images, opens, read, disk = (world.allreduce(value) for value in facts)
if world.rank == 0:
    print("images_per_second", images / seconds)
    print("opens_per_image", opens / images)
    print("bytes_read_per_image", read / images)
    print("bytes_from_disk_per_image", disk / images)
    print("digest", folder.digest)
