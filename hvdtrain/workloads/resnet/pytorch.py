"""ResNets for PyTorch: torchvision's networks and transforms."""

from __future__ import annotations

import importlib
from types import ModuleType

import torch
from PIL import Image

import hvdtrain.workloads.torchvision_mend  # noqa: F401
from hvdtrain.errors import UsageError
from hvdtrain.tasks.dataset import Dataset
from hvdtrain.tasks.training_step_pytorch import TorchTask
from hvdtrain.workloads.data.image_folder import ImageOptions
from hvdtrain.workloads.data.torch_images import Synthetic, View, cut
from hvdtrain.workloads.resnet.task import DEVIATION, MAX_LENGTH, MEAN, RESIZE


def random_view(image: Image.Image, size: int) -> View:
    """Return torchvision's random resized crop and horizontal flip, drawn by torch's generator."""
    top, left, height, width = torchvision().transforms.RandomResizedCrop.get_params(
        image, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)
    )
    flip = bool(torch.rand(()) < 0.5)
    spare = min(width, height) / size
    return View(left, top, width, height, (size, size), size, flip=flip, spare=spare)


def random_crop(image: Image.Image, size: int) -> Image.Image:
    """Return the square of a ``random_view``.

    A JPEG is decoded at a half, a quarter or an eighth of its sides if the crop still has ``size``
    pixels. On photographs of 800 pixels and more, and crops of 224, the mean difference from
    torchvision's result is 0.8 of 255, and at most 5 for an image.
    """
    return cut(image, random_view(image, size))


def centre_view(image: Image.Image, size: int) -> View:
    """Return torchvision's centre crop of the image, whose shorter side is 256/224 of ``size``."""
    shorter, least = round(size * RESIZE), min(image.size)
    middle = [min(side, MAX_LENGTH * least + side % 2) for side in image.size]
    left, top = ((side - part) // 2 for side, part in zip(image.size, middle, strict=True))
    width, height = (int(shorter * part / least) for part in middle)
    corner = (round((width - size) / 2), round((height - size) / 2))
    return View(left, top, middle[0], middle[1], (width, height), size, corner)


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """Return the square of the ``centre_view``."""
    return cut(image, centre_view(image, size))


def task(options: ImageOptions, train: Dataset, test: Dataset | None, classes: int) -> TorchTask:
    """Return a ResNet as a task."""
    torch.manual_seed(options.seed)
    model = torchvision().models.get_model(options.model, weights=None, num_classes=classes)
    scale = None if isinstance(train, Synthetic) else normalization()
    return TorchTask(model, options, train, test, scale, channels_last=True)


def normalization() -> tuple[torch.Tensor, torch.Tensor]:
    """Return factor and offset that normalize pixels, shape (3, 1, 1)."""
    deviation, mean = (torch.tensor(values).view(3, 1, 1) for values in (DEVIATION, MEAN))
    return 1 / (255 * deviation), -mean / deviation


def torchvision() -> ModuleType:
    """Import torchvision.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return importlib.import_module("torchvision")
    except ModuleNotFoundError as error:
        raise UsageError("torchvision is not installed; pip install 'hvdtrain[pytorch]'") from error
