"""ResNets for PyTorch: torchvision's networks and transforms, read by worker processes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, get_worker_info

from hvdtrain.errors import UsageError
from hvdtrain.launch.ending import end_with_parent
from hvdtrain.steps.randomness import seed_of
from hvdtrain.steps.sharding import Indices, Part
from hvdtrain.workloads.base import Data, Indexed, Loaded, TaskOptions
from hvdtrain.workloads.pytorch import TorchTask
from hvdtrain.workloads.resnet import data
from hvdtrain.workloads.resnet.data import DEVIATION, MEAN, RESIZE, ImageFolder
from hvdtrain.workloads.torchvision_import import torchvision

Batch = tuple[list[int], int | None]  # indices, and the epoch to augment for (None: do not)


class _Images(Dataset[Loaded | UsageError]):
    """Batches of decoded images by (indices, epoch); uint8, shape (n, 3, size, size).

    A broken image comes back as an error, not raised: a worker's exception would reach the user
    wrapped in the worker's traceback.
    """

    def __init__(self, images: ImageFolder, size: int, seed: int) -> None:
        self.images, self.size, self.seed = images, size, seed

    def __getitem__(self, batch: Batch) -> Loaded | UsageError:
        try:
            with data.shared_memory():
                return _shared(self._batch(*batch))
        except UsageError as error:
            return error

    def _batch(self, indices: list[int], epoch: int | None) -> Loaded:
        pixels = np.empty((len(indices), self.size, self.size, 3), np.uint8)
        for row, index in enumerate(indices):
            pixels[row] = self._read(index, epoch)
        labels = torch.from_numpy(self.images.labels[indices])
        # Stored as they are decoded: the view is channels_last, what the convolutions want.
        return Loaded(torch.from_numpy(pixels).permute(0, 3, 1, 2), labels)

    def _read(self, index: int, epoch: int | None) -> np.ndarray[Any, Any]:
        path = self.images.paths[index]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Pillow's remarks on metadata
                image = Image.open(path).convert("RGB")
        except Exception as error:  # Pillow raises many kinds for broken bytes
            raise data.broken_image(path, error) from error
        if epoch is None:
            return np.asarray(centre_crop(image, self.size))
        # The augmentation is a function of (seed, epoch, sample), whichever worker does it.
        torch.manual_seed(seed_of(self.seed, epoch, index))
        return np.asarray(random_crop(image, self.size))


def _shared(batch: Loaded) -> Loaded:
    """In a worker: move ``batch`` to where the training process can read it.

    The queue would do so too, but where there is no room it drops the batch and nobody is told.
    """
    if get_worker_info() is not None:
        batch.x.share_memory_()
        batch.y.share_memory_()
    return batch


def random_crop(image: Image.Image, size: int) -> Image.Image:
    """Take torchvision's random resized crop and horizontal flip, drawn from torch's generator."""
    transforms = torchvision().transforms
    top, left, height, width = transforms.RandomResizedCrop.get_params(
        image, scale=(0.08, 1.0), ratio=(3 / 4, 4 / 3)
    )
    box = (left, top, left + width, top + height)
    crop = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    flip = bool(torch.rand(()) < 0.5)
    return crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if flip else crop


def centre_crop(image: Image.Image, size: int) -> Image.Image:
    """The shorter side resized to 256/224 of ``size``, then the middle square of ``size``."""
    functional = torchvision().transforms.functional
    resized = functional.resize(image, round(size * RESIZE))
    cropped: Image.Image = functional.center_crop(resized, [size, size])
    return cropped


def _whole(batch: Any) -> Any:
    return batch  # a batch is made in one piece, so there is nothing to collate


class Folder(Data):
    """Images read ahead by worker processes.

    The workers are started by a fork server: a fork beside MPI may hang.

    Args:
        images: the files.
        options: image size, seed, and number of workers; 0 reads in this process.
    """

    def __init__(self, images: ImageFolder, options: TaskOptions) -> None:
        self.samples, self.digest = len(images.paths), images.digest
        self._images = _Images(images, options.image_size, options.seed)
        self._workers = options.workers
        self._pin = torch.device(options.device).type == "cuda"
        self._batches: list[Batch] = []
        self._loader: DataLoader[Loaded | UsageError] | None = None

    def _read(self, batches: list[Batch]) -> Iterator[Loaded]:
        self._batches[:] = batches
        if self._loader is None:  # kept, with its workers, from epoch to epoch
            self._loader = DataLoader(
                self._images,
                batch_size=None,
                sampler=self._batches,
                num_workers=self._workers,
                multiprocessing_context="forkserver" if self._workers else None,
                persistent_workers=self._workers > 0,
                collate_fn=_whole,
                worker_init_fn=end_with_parent if self._workers else None,
                pin_memory=self._pin,
            )
        with data.shared_memory():
            for loaded in self._loader:
                if isinstance(loaded, UsageError):
                    raise loaded
                yield loaded

    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Loaded]]:
        """See ``Data``."""
        wanted = list(parts)
        batches: list[Batch] = [(part.indices.tolist(), part.start.epoch) for part in wanted]
        yield from zip(wanted, self._read(batches), strict=True)

    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Loaded]:
        """See ``Data``."""
        yield from self._read([(indices.tolist(), None) for indices in batches])

    def close(self) -> None:
        """See ``Data``."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and self._workers:
            iterator._shutdown_workers()
        self._loader = None


class Synthetic(Indexed):
    """Random images made once; as many samples as ImageNet, drawn from a small pool."""

    samples = data.SYNTHETIC_SAMPLES

    def __init__(self, options: TaskOptions) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        shape = (data.SYNTHETIC_POOL, 3, options.image_size, options.image_size)
        pixels = torch.randn(shape, generator=generator)
        self.images = pixels.to(options.device, memory_format=torch.channels_last)
        self.labels = torch.randint(
            data.SYNTHETIC_CLASSES, (data.SYNTHETIC_POOL,), generator=generator
        ).to(options.device)

    def fetch(self, indices: Indices) -> Loaded:
        """See ``Indexed``."""
        index = torch.from_numpy(indices % data.SYNTHETIC_POOL).to(self.labels.device)
        return Loaded(self.images[index], self.labels[index])


class BatchNorm2d(torch.nn.BatchNorm2d):
    """``nn.BatchNorm2d`` that takes a batch with one value a channel, where PyTorch's raises.

    The last batch of an epoch may be a single image, and of 32 pixels the last layers see one.
    Its variance is 0, so the layer gives its bias; there is no unbiased variance to track.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (as in torch)
        """Normalise ``input`` of shape (n, channels, height, width)."""
        if self.training and input.numel() == input.shape[1]:
            return torch.batch_norm(
                input, self.weight, self.bias, None, None, True, 0.0, self.eps, False
            )
        return super().forward(input)


def folder(
    images: ImageFolder,
    options: TaskOptions,
    *,
    training: bool,  # noqa: ARG001
) -> Folder:
    """The images of a folder; ``training`` is for frameworks that build two pipelines."""
    return Folder(images, options)


def synthetic(options: TaskOptions) -> Synthetic:
    """Random images."""
    return Synthetic(options)


def task(options: TaskOptions, train: Data, test: Data | None, classes: int) -> TorchTask:
    """A ResNet as a task."""
    torch.manual_seed(options.seed)
    model = torchvision().models.get_model(options.model, weights=None, num_classes=classes)
    for module in model.modules():
        if type(module) is torch.nn.BatchNorm2d:
            module.__class__ = BatchNorm2d
    if isinstance(train, Synthetic):
        return TorchTask(model, options, train, test)
    deviation = torch.tensor(DEVIATION).view(3, 1, 1)
    mean = torch.tensor(MEAN).view(3, 1, 1)
    return TorchTask(model, options, train, test, scale=(1 / (255 * deviation), -mean / deviation))
