"""Images decoded by DALI: only the region of each sample.

DALI decodes plain JPEGs, and Pillow all other images, among them broken ones, so that each file has
the same result, or the same error, as without DALI. On a CPU, the worker processes decode. On a
GPU, they read the files and draw the views, and the rank has its GPU decode a batch while it trains
on the previous one; the pixels of a GPU differ slightly from those of a CPU.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from typing_extensions import override

from hvdtrain.steps.sharding import seed_of
from hvdtrain.tasks.dataset import Batch
from hvdtrain.workloads.data.dali_decoder import Jpeg, JpegDecoder, Pixels, gpu_number
from hvdtrain.workloads.data.image_folder import ImageFolder, ImageOptions
from hvdtrain.workloads.data.torch_images import ReadAhead, View, Wanted, cut, opened

Views = Callable[[Image.Image, int], View]
# Reduction factor of decoding from which Pillow, which skips most of the work, is faster on a CPU.
REDUCED = 4
# A marker that ends a scan: in it, a zero is stuffed after each byte of 255, unless it restarts.
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]", re.DOTALL)
END_OF_IMAGE = b"\xff\xd9"


def dali_folder(images: ImageFolder, views: Views, options: ImageOptions) -> ReadAhead:
    """Return the images of a folder, or packed, decoded by DALI.

    The function ``views`` returns the view of an opened image for a side in pixels; it is defined
    in a module, and may use torch's generator in a training.
    """
    if gpu_number(options) is None:
        return ReadAhead(DecodedImages(EncodedImages(images, views, options, REDUCED)), options)
    return GpuFolder(images, views, options)


def plain_jpeg(image: Image.Image) -> Pixels | None:
    """Return the bytes of an opened JPEG that DALI decodes like Pillow; None: use Pillow.

    It is in colour, baseline, and intact as far as the markers show: after the header there is a
    single scan up to the end of the file. So one that is truncated is not plain.
    """
    if image.format != "JPEG" or image.mode != "RGB" or "progressive" in image.info:
        return None
    if image.info.get("adobe_transform") == 0:  # RGB itself, unknown to some decoders
        return None
    file: Any = image.fp  # type: ignore[attr-defined]
    scan = file.tell()  # Pillow has read the header
    file.seek(0)
    data = file.read()
    mark = MARKER.search(data, scan)
    intact = mark and mark[0] == END_OF_IMAGE and mark.end() == len(data)
    return np.frombuffer(data, np.uint8) if intact else None


@dataclass(frozen=True)
class Encoded:
    """A batch whose plain JPEGs are not decoded; its tensors are sent through shared memory.

    Attributes:
        indices: indices of the samples in the dataset.
        views: view of each plain JPEG; None: Pillow has decoded the sample.
        data: bytes of the plain JPEGs, one after the other, uint8.
        ends: end of each in ``data``.
        others: the other samples, uint8, shape (n, size, size, 3).
        y: labels of the batch.
    """

    indices: list[int]
    views: list[View | None]
    data: torch.Tensor
    ends: list[int]
    others: torch.Tensor
    y: torch.Tensor

    @property
    def jpegs(self) -> list[Jpeg]:
        """Its plain JPEGs."""
        plain = [(i, view) for i, view in zip(self.indices, self.views, strict=True) if view]
        files = np.split(self.data.numpy(), self.ends)[:-1]
        return [Jpeg(i, data, view) for (i, view), data in zip(plain, files, strict=True)]

    def decoded(self, squares: torch.Tensor) -> Batch:
        """Return the batch, with the squares of its plain JPEGs."""
        x, y = squares, self.y
        if len(self.others):
            x = squares.new_empty((len(y), *squares.shape[1:]))
            plain = torch.tensor([view is not None for view in self.views])
            x[plain], x[~plain] = squares, self.others.to(x.device)
        return Batch(x.permute(0, 3, 1, 2), y.pin_memory() if x.is_cuda else y)


class EncodedImages:
    """Reads batches as ``Encoded``, see ``torch_images.Reader``.

    Args:
        images: the dataset.
        views: function that draws the view of an image.
        options: size of the images, and seed.
        reduced: permitted reduction factor of decoding from which Pillow decodes.
    """

    def __init__(
        self, images: ImageFolder, views: Views, options: ImageOptions, reduced: float = np.inf
    ) -> None:
        self.images, self.views, self.reduced = images, views, reduced
        self.size, self.seed = options.image_size, options.seed
        self.samples, self.digest = len(images.files), images.digest

    def batch(self, indices: list[int], epoch: int | None) -> Encoded:
        """Read these files, draw their views, and decode by Pillow those that DALI does not."""
        self.images.files.will_need(indices)
        samples = [self.sample(index, epoch) for index in indices]
        jpegs = [sample for sample in samples if isinstance(sample, Jpeg)]
        files = [np.empty(0, np.uint8), *(jpeg.data for jpeg in jpegs)]
        others = np.empty((len(samples) - len(jpegs), self.size, self.size, 3), np.uint8)
        for row, pixels in enumerate(s for s in samples if not isinstance(s, Jpeg)):
            others[row] = pixels
        return Encoded(
            indices=indices,
            views=[s.view if isinstance(s, Jpeg) else None for s in samples],
            data=torch.from_numpy(np.concatenate(files)),
            ends=np.cumsum([len(jpeg.data) for jpeg in jpegs], dtype=int).tolist(),
            others=torch.from_numpy(others),
            y=torch.from_numpy(self.images.labels[indices]),
        )

    def sample(self, index: int, epoch: int | None) -> Jpeg | Pixels:
        """Return a sample, encoded, or decoded by Pillow.

        Raises:
            UsageError: naming a broken file.
        """
        if epoch is not None:
            # The augmentation depends only on (seed, epoch, sample), not on the worker.
            torch.default_generator.manual_seed(seed_of(self.seed, epoch, index))
        with opened(self.images.files, index) as image:
            view = self.views(image, self.size)
            data = plain_jpeg(image) if view.spare < self.reduced else None
            return np.asarray(cut(image, view)) if data is None else Jpeg(index, data, view)


class DecodedImages:
    """Decodes batches where they are read, see ``torch_images.Reader``."""

    def __init__(self, encoded: EncodedImages) -> None:
        self.encoded = encoded
        self.samples, self.digest = encoded.samples, encoded.digest
        self._decoder = JpegDecoder(encoded.size, files=encoded.images.files)

    def batch(self, indices: list[int], epoch: int | None) -> Batch:
        """Read, decode and crop these images."""
        encoded = self.encoded.batch(indices, epoch)
        self._decoder.start(encoded.jpegs)
        return encoded.decoded(self._decoder.finish())


class GpuFolder(ReadAhead):
    """The images of a folder, or packed, decoded on the device of the training.

    This is a GPU; with a CPU the results are those of ``DecodedImages``.
    """

    def __init__(self, images: ImageFolder, views: Views, options: ImageOptions) -> None:
        reader = EncodedImages(images, views, options)
        super().__init__(reader, options)
        self._decoder = JpegDecoder(
            reader.size,
            gpu=gpu_number(options),
            threads=max(1, options.workers or 0),
            files=images.files,
        )

    @override
    def _read(self, batches: list[Wanted]) -> Iterator[Batch]:
        started: Encoded | None = None
        for encoded in self._loaded(batches):
            done = None if started is None else started.decoded(self._decoder.finish())
            self._decoder.start(encoded.jpegs)
            started = encoded
            if done is not None:
                yield done
        if started is not None:
            yield started.decoded(self._decoder.finish())
