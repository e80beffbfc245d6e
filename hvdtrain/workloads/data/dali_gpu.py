"""Images decoded by the JPEG engine of a GPU, through NVIDIA DALI.

Worker processes read the files and draw the views; the rank has its GPU decode and resize a batch
while it trains on the previous one. An engine's pixels differ slightly from those of a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from typing_extensions import override

from hvdtrain.system.machine import accelerator
from hvdtrain.tasks.dataset import Batch
from hvdtrain.workloads.data.dali_decoder import Jpeg, JpegDecoder, Pixels
from hvdtrain.workloads.data.dali_images import SampleReader, Views, gpu_number
from hvdtrain.workloads.data.image_folder import ImageFolder, ImageOptions
from hvdtrain.workloads.data.torch_images import ReadAhead, View, Wanted


@dataclass(frozen=True)
class Encoded:
    """A batch whose JPEGs are not decoded yet; its tensors are sent through shared memory.

    Attributes:
        data: their bytes, one after the other, uint8.
        ends: end of each in ``data``.
        rows: row of each in the batch.
        indices: index of each in the dataset.
        views: view of each.
        others: the other rows, which Pillow has decoded, uint8, shape (n, size, size, 3).
        y: labels of the batch.
    """

    data: torch.Tensor
    ends: list[int]
    rows: list[int]
    indices: list[int]
    views: list[View]
    others: torch.Tensor
    y: torch.Tensor

    @property
    def jpegs(self) -> list[Jpeg]:
        """Its JPEGs."""
        parts = np.split(self.data.numpy(), self.ends[:-1])
        triples = zip(self.indices, parts, self.views, strict=True)
        return [Jpeg(index, data, view) for index, data, view in triples] if self.rows else []


class EncodedImages:
    """Reads batches as ``Encoded``, see ``torch_images.Reader``."""

    def __init__(self, samples: SampleReader) -> None:
        self.source = samples
        self.samples, self.digest = len(samples.images.files), samples.images.digest

    def batch(self, indices: list[int], epoch: int | None) -> Encoded:
        """Read these files, and draw their views."""
        self.source.images.files.will_need(indices)
        jpegs: list[Jpeg] = []
        rows: list[int] = []
        others: list[Pixels] = []
        for row, index in enumerate(indices):
            sample = self.source.read(index, epoch, np.inf)
            if isinstance(sample, Jpeg):
                jpegs.append(sample)
                rows.append(row)
            else:
                others.append(sample)
        size = self.source.size
        stacked = np.stack(others) if others else np.empty((0, size, size, 3), np.uint8)
        return Encoded(
            data=torch.from_numpy(
                np.concatenate([np.empty(0, np.uint8), *(j.data for j in jpegs)])
            ),
            ends=np.cumsum([len(jpeg.data) for jpeg in jpegs]).tolist(),
            rows=rows,
            indices=[jpeg.index for jpeg in jpegs],
            views=[jpeg.view for jpeg in jpegs],
            others=torch.from_numpy(stacked),
            y=self.source.labels(indices),
        )


class GpuFolder(ReadAhead):
    """The images of a folder, or packed, decoded on the device of the training.

    With a CPU as this device, DALI's own code for CPUs decodes and resizes: for tests.
    """

    def __init__(self, images: ImageFolder, views: Views, options: ImageOptions) -> None:
        self.source = SampleReader(images, views, options)
        super().__init__(EncodedImages(self.source), options)
        self.device, self.gpu = torch.device(options.device), gpu_number(options)
        self.threads = max(1, options.workers or 0)
        self._decoder = JpegDecoder(0)

    @override
    def _read(self, batches: list[Wanted]) -> Iterator[Batch]:
        self._decoder = self._new_decoder(max((len(indices) for indices, _ in batches), default=0))
        started: Encoded | None = None
        for encoded in self._loaded(batches):
            done = None if started is None else self._finish(started)
            self._start(encoded)
            started = encoded
            if done is not None:
                yield done
        if started is not None:
            yield self._finish(started)

    def _new_decoder(self, most: int) -> JpegDecoder:
        # The previous one, unless it is too small or has been left with a batch.
        size, before = self.source.size, self._decoder
        if most <= before.most and not before.busy:
            return before
        return JpegDecoder(most, gpu=self.gpu, size=size, threads=self.threads)

    def _start(self, encoded: Encoded) -> None:
        if encoded.rows:
            self._decoder.start(encoded.jpegs)

    def _finish(self, encoded: Encoded) -> Batch:
        """Return the batch that was started."""
        size = self.source.size
        x = torch.empty((len(encoded.y), size, size, 3), dtype=torch.uint8, device=self.device)
        if encoded.rows:
            try:
                decoded = self._decoded()
            except RuntimeError:  # one is broken, and the others must not depend on it
                decoded = torch.stack([self._single(jpeg) for jpeg in encoded.jpegs])
            if len(encoded.rows) == len(x):
                x.copy_(decoded)
            else:
                x[encoded.rows] = decoded
        others = np.setdiff1d(np.arange(len(x)), encoded.rows)
        if len(others):
            x[others] = encoded.others.to(self.device)
        y = encoded.y if self.device.type == accelerator.CPU else encoded.y.pin_memory()
        return Batch(x.permute(0, 3, 1, 2), y)

    def _decoded(self) -> torch.Tensor:
        """Return the pixels that DALI has decoded, valid on the current stream."""
        stream = None if self.gpu is None else torch.cuda.current_stream(self.gpu)
        return torch.utils.dlpack.from_dlpack(self._decoder.finish(stream).as_tensor())

    def _single(self, jpeg: Jpeg) -> torch.Tensor:
        try:
            self._decoder.start([jpeg])
            return self._decoded()[0].clone()
        except RuntimeError:
            return torch.from_numpy(self.source.by_pillow(jpeg).copy()).to(self.device)
