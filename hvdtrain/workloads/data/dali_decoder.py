"""NVIDIA DALI's pipeline: regions of JPEGs to pixels, on a CPU or a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.workloads.data.torch_images import View

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Jpeg:
    """A sample that DALI decodes."""

    index: int
    data: Pixels  # the bytes of the file
    view: View


class JpegDecoder:
    """Decodes regions of JPEGs by DALI.

    Args:
        most: maximum number of JPEGs at once.
        gpu: number of the GPU that decodes; None: the CPU.
        size: side in pixels of the squares to which DALI resizes; None: it does not resize.
        threads: number of threads of DALI.
    """

    def __init__(
        self, most: int, *, gpu: int | None = None, size: int | None = None, threads: int = 1
    ) -> None:
        self.most, self.gpu, self.size, self.threads = most, gpu, size, threads
        self.busy = False  # whether something was started and not finished
        self._pipeline: Any = None  # built where it is used: a reader is sent to its workers

    def start(self, jpegs: Sequence[Jpeg]) -> None:
        """Start decoding; then call ``finish``."""
        pipeline, self._pipeline = self._pipeline or self._build(), None  # of no use after an error
        self.busy = True
        views = [jpeg.view for jpeg in jpegs]
        start = np.array([(view.top, view.left) for view in views], np.int32)
        shape = np.array([(view.height, view.width) for view in views], np.int32)
        pipeline.feed_input("data", [jpeg.data for jpeg in jpegs])
        pipeline.feed_input("start", start)
        pipeline.feed_input("shape", shape)
        if self.size is not None:
            low, high = _bounds(views)
            pipeline.feed_input("low", low)
            pipeline.feed_input("high", high)
        pipeline.schedule_run()
        self._pipeline = pipeline

    def finish(self, stream: Any = None) -> Any:
        """Return DALI's list of the pixels, which is valid until the next ``finish``.

        Args:
            stream: CUDA stream on which they are valid; None: on all, at once.

        Raises:
            RuntimeError: some cannot be decoded.
        """
        pipeline, self._pipeline = self._pipeline, None
        decoded = pipeline.outputs(stream)[0]
        self._pipeline, self.busy = pipeline, False
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
                # No image depends on the others of its batch: all are decoded by the same engine.
                hw_decoder_load=1.0,
                jpeg_fancy_upsampling=True,  # as libjpeg does, and so Pillow
                affine=False,  # the threads of several ranks would share the first cores
            )
            if self.size is None:
                return pixels
            return fn.resize(
                pixels,
                size=(self.size, self.size),
                antialias=True,
                roi_start=source("low", types.FLOAT),
                roi_end=source("high", types.FLOAT),
            )

        pipeline = pipeline_def(
            batch_size=self.most,
            num_threads=self.threads,
            device_id=self.gpu,
            prefetch_queue_depth=1,
        )(graph)()
        pipeline.build()
        return pipeline


def _bounds(views: Sequence[View]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return top left and bottom right corner of each square in its region, before resizing.

    In a square that is mirrored, left and right are exchanged.
    """
    low, high = [], []
    for view in views:
        scales = view.height / view.resized[1], view.width / view.resized[0]
        edges = [(start, start + view.size) for start in reversed(view.corner)]
        if view.flip:
            edges[1] = edges[1][::-1]
        low.append([edge[0] * scale for edge, scale in zip(edges, scales, strict=True)])
        high.append([edge[1] * scale for edge, scale in zip(edges, scales, strict=True)])
    return np.array(low, np.float32), np.array(high, np.float32)
