"""What the loops by hand over torch.distributed share: what they are asked for, images, the end."""

import argparse
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from hvdtrain.workloads.resnet.pytorch import torchvision

LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}
MEAN, DEVIATION = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("precision", choices=["fp32", "tf32", *LOW])
    parser.add_argument("steps", type=int)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--data", type=Path, help="holds train/CLASS/*; default: random images")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    options.warm = 10 if torch.cuda.is_available() else 5
    return options


def begin(options: argparse.Namespace) -> tuple[torch.device, bool]:
    """Find the other ranks; return this rank's device, and whether it is a GPU."""
    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    if not gpu:
        torch.set_num_threads(1)
        return torch.device("cpu"), False
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = (
        options.precision != "fp32"
    )
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device, True


def batches(
    options: argparse.Namespace, device: torch.device
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the batches of a run on the device."""
    number = options.steps + options.warm
    if options.data is None:
        pool = torch.randn(32, 3, options.size, options.size).to(
            device, memory_format=torch.channels_last
        )
        labels = torch.randint(0, 1000, (32,)).to(device)
        for _ in range(number):
            index = torch.randint(0, 32, (options.batch,), device=device)
            yield pool[index], labels[index]
        return
    loader = images(options)
    while number > 0:
        for x, y in loader:
            yield x.to(device, non_blocking=True), y.to(device, non_blocking=True)
            number -= 1
            if not number:
                return


def images(options: argparse.Namespace) -> torch.utils.data.DataLoader:
    """Return the loader of torchvision's reference training for ImageNet."""
    vision = torchvision()
    change = vision.transforms.Compose(
        [
            vision.transforms.RandomResizedCrop(options.size),
            vision.transforms.RandomHorizontalFlip(0.5),
            vision.transforms.PILToTensor(),
            vision.transforms.ConvertImageDtype(torch.float),
            vision.transforms.Normalize(MEAN, DEVIATION),
        ]
    )
    folder = vision.datasets.ImageFolder(str(options.data / "train"), change)
    return torch.utils.data.DataLoader(
        folder,
        batch_size=options.batch,
        sampler=torch.utils.data.distributed.DistributedSampler(folder),
        num_workers=options.workers,
        pin_memory=torch.cuda.is_available(),
        persistent_workers=options.workers > 0,
    )


def finish(options: argparse.Namespace, start: float) -> None:
    """Print the images/s of all ranks, and the peak memory of this rank's GPU."""
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        images = options.batch * options.steps * dist.get_world_size()
        print("images_per_second", images / seconds)
        print("peak_memory_bytes", torch.cuda.max_memory_allocated() if gpu else 0)
