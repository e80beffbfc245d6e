"""Images decoded by NVIDIA DALI: of a JPEG, only the region of the sample.

DALI decodes plain JPEGs, and Pillow all others, among them broken ones, so that each file has the
same result, or the same error, as without DALI. DALI's pixels are Pillow's; on a CPU torch resizes
them like torchvision, which differs from Pillow by rounding.

On a CPU, the worker processes decode. On a GPU see ``dali_gpu``.
"""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import seed_of
from hvdtrain.tasks.dataset import Batch
from hvdtrain.workloads.data.dali_decoder import Jpeg, JpegDecoder, Pixels
from hvdtrain.workloads.data.image_folder import AUTO, DALI, PILLOW, ImageFolder, ImageOptions
from hvdtrain.workloads.data.torch_images import (
    ReadAhead,
    View,
    cut,
    decoding_errors,
    opened,
)

Views = Callable[[Image.Image, int], View]
AT_ONCE = 16  # number of JPEGs that a worker's pipeline decodes; more only take more memory
# Reduction factor of decoding from which Pillow, which skips most of the work, is faster.
REDUCED = 4
# A marker that ends a scan: in it, a zero is stuffed after each byte of 255, unless it restarts.
MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7]", re.DOTALL)
END_OF_IMAGE = b"\xff\xd9"


def choose_decoder(options: ImageOptions) -> str:
    """Return ``pillow`` or ``dali``, according to ``--decoder``, device and installed packages.

    Raises:
        UsageError: DALI was requested and does not work.
    """
    requested = options.decoder
    if requested == PILLOW or (requested == AUTO and gpu_number(options) is None):
        return PILLOW
    try:
        _try(options)
    except Exception as error:  # of many kinds, from a missing package to a missing library
        if requested == AUTO:
            return PILLOW
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise UsageError(
            f"--decoder dali: DALI does not work here ({reason}): pip install 'hvdtrain[dali]', or "
            "use --decoder pillow"
        ) from error
    return DALI


def gpu_number(options: ImageOptions) -> int | None:
    """Return the number of the GPU that decodes; None: the CPU does."""
    device = torch.device(options.device)
    if device.type != "cuda" or torch.version.cuda is None:  # PyTorch calls ROCm cuda, too
        return None
    return torch.cuda.current_device() if device.index is None else device.index


def _try(options: ImageOptions) -> None:
    """Decode an image, on the device of the training."""
    file = io.BytesIO()
    Image.new("RGB", (16, 16)).save(file, "JPEG")
    view = View(0, 0, 8, 8, (4, 4), 4)
    decoder = JpegDecoder(1, gpu=gpu_number(options), size=4)
    decoder.start([Jpeg(0, np.frombuffer(file.getvalue(), np.uint8), view)])
    decoder.finish()


def dali_folder(images: ImageFolder, views: Views, options: ImageOptions) -> ReadAhead:
    """Return the images of a folder, or packed, decoded by DALI.

    The function ``views`` returns the view of an opened image for a side in pixels; it is defined
    in a module, and may use torch's generator in a training.
    """
    if gpu_number(options) is None:
        return ReadAhead(DaliImages(SampleReader(images, views, options)), options)
    gpu: Any = importlib.import_module("hvdtrain.workloads.data.dali_gpu")
    return gpu.GpuFolder(images, views, options)


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


class SampleReader:
    """Reads files, draws their views, and has Pillow decode what DALI does not."""

    def __init__(self, images: ImageFolder, views: Views, options: ImageOptions) -> None:
        self.images, self.views = images, views
        self.size, self.seed = options.image_size, options.seed

    def read(self, index: int, epoch: int | None, reduced: float) -> Jpeg | Pixels:
        """Return a sample, encoded, or decoded by Pillow.

        Args:
            index: index of the sample.
            epoch: epoch to augment for; None: not augmented.
            reduced: permitted reduction factor of decoding from which Pillow decodes.

        Raises:
            UsageError: naming a broken file.
        """
        if epoch is not None:
            # The augmentation depends only on (seed, epoch, sample), not on the worker.
            torch.default_generator.manual_seed(seed_of(self.seed, epoch, index))
        with opened(self.images.files, index) as image:
            view = self.views(image, self.size)
            data = plain_jpeg(image) if view.spare < reduced else None
            return np.asarray(cut(image, view)) if data is None else Jpeg(index, data, view)

    def by_pillow(self, jpeg: Jpeg) -> Pixels:
        """Decode a JPEG that DALI could not decode.

        Raises:
            UsageError: naming the broken file.
        """
        name = self.images.files.name(jpeg.index)
        with decoding_errors(name):
            image = Image.open(io.BytesIO(jpeg.data.tobytes()))
        image.filename = name  # for ``decoded``
        return np.asarray(cut(image, jpeg.view))

    def labels(self, indices: Sequence[int]) -> torch.Tensor:
        """Return the labels of these samples."""
        return torch.from_numpy(self.images.labels[list(indices)])


def resize(region: Pixels, view: View, square: torch.Tensor) -> None:
    """Write the square of ``view``, uint8 of shape (3, size, size), of its decoded region."""
    pixels = torch.from_numpy(region)[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        pixels, size=view.resized[::-1], mode="bilinear", antialias=True
    )
    left, top = view.corner
    part = resized[0, :, top : top + view.size, left : left + view.size]
    square.copy_(part.flip(2) if view.flip else part)


class DaliImages:
    """Decoded images, see ``torch_images.Images``."""

    def __init__(self, samples: SampleReader) -> None:
        self.source = samples
        self.samples, self.digest = len(samples.images.files), samples.images.digest
        self._decoder = JpegDecoder(AT_ONCE)

    def batch(self, indices: list[int], epoch: int | None) -> Batch:
        """Read, decode and crop these images."""
        self.source.images.files.will_need(indices)
        size = self.source.size
        pixels = np.empty((len(indices), size, size, 3), np.uint8)
        squares = torch.from_numpy(pixels).permute(0, 3, 1, 2)
        jpegs: list[tuple[int, Jpeg]] = []
        for row, index in enumerate(indices):
            sample = self.source.read(index, epoch, REDUCED)
            if isinstance(sample, Jpeg):
                jpegs.append((row, sample))
            else:
                pixels[row] = sample
        for first in range(0, len(jpegs), AT_ONCE):
            chunk = jpegs[first : first + AT_ONCE]
            regions = self._regions([jpeg for _, jpeg in chunk])
            for (row, jpeg), region in zip(chunk, regions, strict=True):
                if region is None:
                    pixels[row] = self.source.by_pillow(jpeg)
                else:
                    resize(region, jpeg.view, squares[row])
        return Batch(squares, self.source.labels(indices))

    def _regions(self, jpegs: list[Jpeg]) -> list[Pixels | None]:
        """Return the pixels of the regions; None if DALI cannot decode one.

        They are valid until the next call.
        """
        try:
            self._decoder.start(jpegs)
            decoded = self._decoder.finish()
            return [np.asarray(decoded[number]) for number in range(len(jpegs))]
        except RuntimeError:
            if len(jpegs) == 1:
                return [None]
        # The others must not depend on it. Copied, as each is valid until the next one.
        singly = [self._regions([jpeg])[0] for jpeg in jpegs]
        return [None if region is None else region.copy() for region in singly]
