"""Images for PyTorch: read ahead by worker processes, or generated once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch.utils import data as torch_data
from typing_extensions import override

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices, Part, seed_of
from hvdtrain.system.machine import accelerator
from hvdtrain.system.runtime.outlive import end_with_parent, worker_context
from hvdtrain.tasks.dataset import Batch, Dataset, Indexed
from hvdtrain.workloads.data.files import Files
from hvdtrain.workloads.data.image_folder import (
    SYNTHETIC_CLASSES,
    SYNTHETIC_POOL,
    SYNTHETIC_SAMPLES,
    ImageFolder,
    ImageOptions,
    broken_image,
    rgb,
    worker_errors,
)

Wanted = tuple[list[int], int | None]  # indices, and the epoch to augment for (None: none)
Crop = Callable[[Image.Image, int], Image.Image]
MAX_AHEAD = 16  # maximum number of batches in /dev/shm per rank


@dataclass(frozen=True)
class View:
    """The square of an image that is a sample: of a region that is resized, a part.

    Attributes:
        left, top, width, height: region of the image in pixels.
        resized: width and height to which the region is resized.
        size: side of the square in pixels.
        corner: left and top edge of the square in the resized region.
        flip: whether the square is mirrored.
        spare: permitted reduction factor of decoding, see ``decoded``.
    """

    left: int
    top: int
    width: int
    height: int
    resized: tuple[int, int]
    size: int
    corner: tuple[int, int] = (0, 0)
    flip: bool = False
    spare: float = 1.0


class Reader(Protocol):
    """Reads the samples of a batch, in worker processes, to which it is sent by pickle."""

    samples: int  # number of samples
    digest: str  # of the samples in order

    def batch(self, indices: list[int], epoch: int | None) -> Any:
        """Return these samples; with an epoch, augmented as a function of seed, epoch and sample.

        They are a ``Batch``, or a dataclass with tensors that ``ReadAhead._read`` converts to one.

        Raises:
            UsageError: naming a broken file.
        """


class _Batches(torch_data.Dataset[Any]):
    """The batches of a ``Reader``, by (indices, epoch).

    The error of a broken sample is returned, not raised: a worker's exception would reach the user
    wrapped in the worker's traceback.
    """

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, batch: Wanted) -> Any:
        try:
            with worker_errors():
                return _shared(self.reader.batch(*batch))
        except UsageError as error:
            return error


class Images:
    """Decoded images; uint8, shape (n, 3, size, size)."""

    def __init__(self, images: ImageFolder, crop: Crop, size: int, seed: int) -> None:
        self.images, self.crop, self.size, self.seed = images, crop, size, seed
        self.samples, self.digest = len(images.files), images.digest

    def batch(self, indices: list[int], epoch: int | None) -> Batch:
        """Read, decode and crop these images."""
        self.images.files.will_need(indices)
        pixels = np.empty((len(indices), self.size, self.size, 3), np.uint8)
        for row, index in enumerate(indices):
            pixels[row] = self._read(index, epoch)
        labels = torch.from_numpy(self.images.labels[indices])
        # In the layout of the decoder: the view is channels_last, the fastest for convolutions.
        return Batch(torch.from_numpy(pixels).permute(0, 3, 1, 2), labels)

    def _read(self, index: int, epoch: int | None) -> np.ndarray[Any, Any]:
        if epoch is not None:
            # The augmentation depends only on (seed, epoch, sample), not on the worker.
            torch.default_generator.manual_seed(seed_of(self.seed, epoch, index))
        with opened(self.images.files, index) as image:
            return np.asarray(self.crop(image, self.size))


@contextlib.contextmanager
def opened(files: Files, index: int) -> Iterator[Image.Image]:
    """Open the image at ``index``, and read only its header.

    Raises:
        UsageError: naming the broken file.
    """
    name = files.name(index)
    with decoding_errors(name):
        file = files.open(index)
    with file:
        with decoding_errors(name):
            image = Image.open(file)
        image.filename = name  # for ``decoded``
        yield image


def decoded(image: Image.Image, spare: float = 1.0) -> tuple[Image.Image, int]:
    """Decode the result of ``Image.open``.

    Args:
        image: image of which only the header was read.
        spare: permitted reduction factor. A JPEG is then decoded at a half, a quarter or an eighth
            of its sides, which saves most of the work.

    Returns:
        The image in RGB, and its reduction factor: 1, 2, 4 or 8, at most ``spare``.

    Raises:
        UsageError: naming the broken file.
    """
    with decoding_errors(getattr(image, "filename", "an image")):
        width, height = image.size
        most = max(factor for factor in (1, 2, 4, 8) if factor <= max(spare, 1))
        reduced = image.draft("RGB", (width // most, height // most)) if most > 1 else None
        image.load()
        smaller = round(width / reduced[1][2]) if reduced else 1
        return rgb(image), smaller


def cut(image: Image.Image, view: View) -> Image.Image:
    """Return the square of ``view`` in RGB, of the result of ``Image.open``.

    Raises:
        UsageError: naming the broken file.
    """
    image, smaller = decoded(image, view.spare)
    box = (
        view.left / smaller,
        view.top / smaller,
        (view.left + view.width) / smaller,
        (view.top + view.height) / smaller,
    )
    square = image.resize(view.resized, Image.Resampling.BILINEAR, box=box)
    if view.resized != (view.size, view.size):
        left, top = view.corner
        square = square.crop((left, top, left + view.size, top + view.size))
    return square.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if view.flip else square


@contextlib.contextmanager
def decoding_errors(name: str) -> Iterator[None]:
    """Convert decoding errors within the block to one that names the file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's remarks on metadata
            yield
    except UsageError:
        raise
    except Exception as error:  # Pillow raises many kinds for broken bytes
        raise broken_image(name, error) from error


def _shared(batch: Any) -> Any:
    """Move ``batch``, in a worker, to shared memory, for the training process.

    The queue would do so too, but if there is no space it drops the batch without an error.
    """
    if torch_data.get_worker_info() is not None:
        for tensor in vars(batch).values():
            if isinstance(tensor, torch.Tensor):
                tensor.share_memory_()
    return batch


def _ahead(workers: int) -> int | None:
    """Return the number of batches each worker prefetches: MAX_AHEAD in all, at least one."""
    return max(1, min(2, MAX_AHEAD // workers)) if workers else None


def _whole(batch: Any) -> Any:
    return batch  # a batch is read as a whole: nothing to collate


class ReadAhead(Dataset):
    """Samples that worker processes read ahead by ``reader``; without workers, this process."""

    def __init__(self, reader: Reader, options: Options) -> None:
        self.samples, self.digest = reader.samples, reader.digest
        self._reader = _Batches(reader)
        self._workers = options.workers or 0
        self._pin = torch.device(options.device).type != accelerator.CPU
        self._batches: list[Wanted] = []
        self._loader: torch_data.DataLoader[Any] | None = None

    def _read(self, batches: list[Wanted]) -> Iterator[Batch]:
        """Yield the batches."""
        return self._loaded(batches)

    def _loaded(self, batches: list[Wanted]) -> Iterator[Any]:
        """Yield the batches as the reader returns them."""
        self._batches[:] = batches
        if self._loader is None:  # kept, with its workers, from epoch to epoch
            self._loader = torch_data.DataLoader(
                self._reader,
                batch_size=None,
                sampler=self._batches,
                num_workers=self._workers,
                prefetch_factor=_ahead(self._workers),
                multiprocessing_context=worker_context() if self._workers else None,
                persistent_workers=self._workers > 0,
                collate_fn=_whole,
                worker_init_fn=end_with_parent if self._workers else None,
                pin_memory=self._pin,
            )
        with worker_errors():
            for loaded in self._loader:
                if isinstance(loaded, UsageError):
                    raise loaded
                yield loaded

    @override
    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        wanted = list(parts)
        batches: list[Wanted] = [(part.indices.tolist(), part.start.epoch) for part in wanted]
        yield from zip(wanted, self._read(batches), strict=True)

    @override
    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Batch]:
        yield from self._read([(indices.tolist(), None) for indices in batches])

    @override
    def close(self) -> None:
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None and self._workers:
            iterator._shutdown_workers()
        self._loader = None


class Folder(ReadAhead):
    """The images of a folder, or packed.

    The function ``crop`` converts an opened image, by ``decoded``, to a square in RGB of a side in
    pixels; it is defined in a module, and may use torch's generator in a training.
    """

    def __init__(self, images: ImageFolder, crop: Crop, options: ImageOptions) -> None:
        super().__init__(Images(images, crop, options.image_size, options.seed), options)


class Synthetic(Indexed):
    """Random images, generated once, for measuring speed."""

    samples = SYNTHETIC_SAMPLES

    def __init__(self, options: ImageOptions) -> None:
        generator = torch.Generator().manual_seed(options.seed)
        shape = (SYNTHETIC_POOL, 3, options.image_size, options.image_size)
        pixels = torch.randn(shape, generator=generator)
        self.images = pixels.to(options.device, memory_format=torch.channels_last)
        self.labels = torch.randint(SYNTHETIC_CLASSES, (SYNTHETIC_POOL,), generator=generator).to(
            options.device
        )

    @override
    def fetch(self, indices: Indices) -> Batch:
        index = accelerator.send(torch.from_numpy(indices % SYNTHETIC_POOL), self.labels.device)
        return Batch(self.images[index], self.labels[index])
