"""JPEGs decoded by NVIDIA DALI, only the region of the sample; on a GPU by its JPEG engine."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from hvdtrain.errors import UsageError
from hvdtrain.system.machine.frameworks import is_installed
from hvdtrain.workloads.data.files import Files
from hvdtrain.workloads.data.image_folder import AUTO, DALI, PILLOW, ImageOptions
from hvdtrain.workloads.data.torch_images import View, cut, opened

log = logging.getLogger(__name__)

Pixels = NDArray[np.uint8]
# Pixels that are decoded at once, in all regions together: about 6 MB on a CPU, 800 MB on a GPU.
MAX_ON_CPU, MAX_ON_GPU = 2**21, 2**28
# What DALI reports of an image; its other errors, e.g. that memory ran out, are not hidden.
UNDECODABLE = ("nvImageCodec failure", "Failed to decode", "cropping window")


def choose_decoder(options: ImageOptions) -> str:
    """Return ``pillow`` or ``dali``, according to ``--decoder``, device and installed packages.

    Raises:
        UsageError: DALI was requested and does not work.
    """
    if options.decoder == PILLOW:
        return PILLOW
    gpu, automatic = gpu_number(options), options.decoder == AUTO
    if automatic and (gpu is None or not is_installed("nvidia.dali")):
        return PILLOW
    try:
        JpegDecoder(size=4, gpu=gpu).try_out()
    except Exception as error:  # of many kinds, from a missing package to a missing library
        text = str(error)  # DALI's own begins with where it was called
        lines = (text.partition("encountered:")[2] or text).strip().splitlines()
        reason = lines[0] if lines else type(error).__name__
        if automatic:
            log.warning("DALI does not work here (%s): images are decoded by pillow", reason)
            return PILLOW
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


@dataclass(frozen=True)
class Jpeg:
    """A sample that DALI decodes."""

    index: int  # in the dataset
    data: Pixels  # the bytes of the file
    view: View


class JpegDecoder:
    """Decodes and resizes the views of JPEGs; those on which DALI fails are decoded by Pillow.

    A sample does not depend on the others of its batch.

    Args:
        size: side of the squares of the views in pixels.
        gpu: number of the GPU that decodes; None: the CPU.
        threads: number of threads of DALI.
        files: the files of the dataset, to read again if DALI fails.
        dali_resizes: whether DALI resizes; if not, torch does so like torchvision. Default: on a
            GPU, as on a CPU torch is faster.
    """

    def __init__(
        self,
        size: int,
        *,
        gpu: int | None = None,
        threads: int = 1,
        files: Files | None = None,
        dali_resizes: bool | None = None,
    ) -> None:
        self.size, self.gpu, self.threads, self.files = size, gpu, threads, files
        self.dali_resizes = gpu is not None if dali_resizes is None else dali_resizes
        self.device = torch.device("cpu" if gpu is None else f"cuda:{gpu}")
        self._parts: list[Sequence[Jpeg]] = []  # those of the batch that was started
        self._pipeline: Any = None  # built where it is used: a reader is sent to its workers
        self._most = 0  # number of JPEGs for which the pipeline was built
        self._running = False

    def start(self, jpegs: Sequence[Jpeg]) -> None:
        """Start decoding a batch; then call ``finish``."""
        self._parts = list(_parts(jpegs, MAX_ON_CPU if self.gpu is None else MAX_ON_GPU))
        if self._parts:
            self._run(self._parts[0])

    def finish(self) -> torch.Tensor:
        """Return the squares of the batch, uint8, shape (n, size, size, 3), on the device.

        Raises:
            UsageError: naming a broken file.
        """
        parts, self._parts = self._parts, []
        shape = (sum(map(len, parts)), self.size, self.size, 3)
        squares = torch.empty(shape, dtype=torch.uint8, device=self.device)
        done = 0
        for number, part in enumerate(parts):
            if number:
                self._run(part)
            self._collect(part, squares[done : done + len(part)])
            done += len(part)
        return squares

    def try_out(self) -> None:
        """Decode an image.

        Raises:
            Exception: of many kinds, DALI does not work here.
        """
        file = io.BytesIO()
        Image.new("RGB", (16, 16)).save(file, "JPEG")
        view = View(0, 0, 8, 8, (self.size, self.size), self.size)
        self._run([Jpeg(0, np.frombuffer(file.getvalue(), np.uint8), view)])
        self._outputs()

    def _collect(self, jpegs: Sequence[Jpeg], squares: torch.Tensor) -> None:
        """Write the squares of ``jpegs``, which DALI is decoding."""
        try:
            decoded = self._outputs()
        except RuntimeError as error:
            if not any(words in str(error) for words in UNDECODABLE):
                raise
            for jpeg, square in zip(jpegs, squares, strict=True):
                if len(jpegs) > 1:  # the others must not depend on the one that failed
                    self._run([jpeg])
                    self._collect([jpeg], square[None])
                else:
                    square.copy_(torch.from_numpy(self._by_pillow(jpeg)))
            return
        if self.dali_resizes:
            squares.copy_(torch.utils.dlpack.from_dlpack(decoded.as_tensor()))
        else:
            for number, (jpeg, square) in enumerate(zip(jpegs, squares, strict=True)):
                _resize(np.asarray(decoded[number]), jpeg.view, square)

    def _by_pillow(self, jpeg: Jpeg) -> Pixels:
        assert self.files is not None
        with opened(self.files, jpeg.index) as image:
            return np.array(cut(image, jpeg.view))

    def _run(self, jpegs: Sequence[Jpeg]) -> None:
        # A pipeline that failed is of no use, nor is one that was left with a batch.
        if self._running or len(jpegs) > self._most:
            self._pipeline = None
            self._most = max(self._most, 1 << (len(jpegs) - 1).bit_length())
        if self._pipeline is None:
            self._pipeline = self._build()
        self._running = True
        views = [jpeg.view for jpeg in jpegs]
        inputs: dict[str, Any] = {
            "data": [jpeg.data for jpeg in jpegs],
            "start": np.array([(view.top, view.left) for view in views], np.int32),
            "shape": np.array([(view.height, view.width) for view in views], np.int32),
        }
        if self.dali_resizes:
            inputs["low"], inputs["high"] = _bounds(views)
        for name, values in inputs.items():
            self._pipeline.feed_input(name, values)
        self._pipeline.schedule_run()

    def _outputs(self) -> Any:
        """Return DALI's list of what is decoded, valid until the next call, on this stream.

        Raises:
            RuntimeError: some cannot be decoded.
        """
        stream = None if self.gpu is None else torch.cuda.current_stream(self.gpu)
        decoded = self._pipeline.outputs(stream)[0]
        self._running = False
        return decoded

    def _build(self) -> Any:
        from nvidia.dali import fn, pipeline_def, types

        def source(name: str, dtype: Any) -> Any:
            return fn.external_source(name=name, dtype=dtype, ndim=1)

        def graph() -> Any:
            pixels = fn.decoders.image_slice(
                source("data", types.UINT8),
                start=source("start", types.INT32),
                shape=source("shape", types.INT32),
                axes=(0, 1),
                device="cpu" if self.gpu is None else "mixed",
                adjust_orientation=False,  # like Pillow
                # All by the same engine: otherwise the result depended on the rest of the batch.
                hw_decoder_load=1.0,
                jpeg_fancy_upsampling=True,  # as libjpeg does, and so Pillow
                affine=False,  # the threads of several ranks would share the first cores
            )
            if not self.dali_resizes:
                return pixels
            return fn.resize(
                pixels,
                size=(self.size, self.size),
                antialias=True,
                roi_start=source("low", types.FLOAT),
                roi_end=source("high", types.FLOAT),
            )

        pipeline = pipeline_def(
            batch_size=self._most,
            num_threads=self.threads,
            device_id=self.gpu,
            prefetch_queue_depth=1,
        )(graph)()
        pipeline.build()
        return pipeline


def _parts(jpegs: Sequence[Jpeg], most: int) -> Iterator[Sequence[Jpeg]]:
    """Yield ``jpegs`` in parts whose regions have up to ``most`` pixels, or one region has more."""
    first, pixels = 0, 0
    for number, jpeg in enumerate(jpegs):
        region = jpeg.view.width * jpeg.view.height
        if number > first and pixels + region > most:
            yield jpegs[first:number]
            first, pixels = number, 0
        pixels += region
    if jpegs:
        yield jpegs[first:]


def _bounds(views: Sequence[View]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return top left and bottom right corner of each square in its region, before resizing.

    In a square that is mirrored, left and right are exchanged.
    """
    corners = np.array([view.corner[::-1] for view in views], np.float32)
    sides = np.array([(view.size, view.size) for view in views], np.float32)
    scales = np.array(
        [(view.height / view.resized[1], view.width / view.resized[0]) for view in views],
        np.float32,
    )
    low, high = corners * scales, (corners + sides) * scales
    flip = [view.flip for view in views]
    low[flip, 1], high[flip, 1] = high[flip, 1], low[flip, 1]
    return low, high


def _resize(region: Pixels, view: View, square: torch.Tensor) -> None:
    """Write the square of ``view``, of its decoded region, by torch."""
    pixels = torch.from_numpy(region)[None].permute(0, 3, 1, 2)
    resized = torch.nn.functional.interpolate(
        pixels, size=view.resized[::-1], mode="bilinear", antialias=True
    )
    left, top = view.corner
    part = resized[0, :, top : top + view.size, left : left + view.size]
    square.copy_((part.flip(2) if view.flip else part).permute(1, 2, 0))
