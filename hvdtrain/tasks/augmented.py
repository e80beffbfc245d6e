"""Mixtures of samples and erased parts of images, as functions of (seed, epoch, sample).

So the augmentation is the same on any number of ranks, and after a resume. The training step
applies it on its device.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices, Part, seed_of
from hvdtrain.tasks.dataset import Batch, Dataset

F64 = NDArray[np.float64]
AREA = (0.02, 0.4)  # of an erased part, as fractions of the image
ASPECT = (0.3, 1 / 0.3)  # its height by its width, relative to those of the image


class Augmented(Dataset):
    """Another dataset whose training batches have ``shares`` and ``boxes``.

    mixup: Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2018). A sample is mixed with
    the next one in the order of the epoch, so that a rank reads only one sample more per step; its
    share is drawn from Beta(alpha, alpha).

    Random erasing: Zhong et al., "Random Erasing Data Augmentation" (2020). A part of an image
    becomes 0 after the normalization, i.e. the mean.

    Args:
        data: the dataset.
        seed: seed of the draws.
        mixup: alpha; 0: samples are not mixed.
        erase: probability that a part of an image is erased.
    """

    def __init__(self, data: Dataset, *, seed: int, mixup: float, erase: float) -> None:
        self.data, self.seed, self.mixup, self.erase = data, seed, mixup, erase
        self.samples, self.digest = data.samples, data.digest
        self._epoch = -1

    def _begin(self, epoch: int) -> None:
        """Draw the shares and the boxes of all samples of an epoch."""
        if epoch == self._epoch:
            return
        self._epoch = epoch
        if self.mixup:
            self._shares = self._generator(2).beta(self.mixup, self.mixup, self.samples)
        if self.erase:
            drawn = self._generator(3).random((self.samples, 5))
            self._boxes = np.where(drawn[:, :1] < self.erase, boxes(drawn[:, 1:]), 0)

    def _generator(self, purpose: int) -> np.random.Generator:
        key = seed_of(self.seed, self._epoch, purpose)  # 1 is that of MNIST's augmentation
        return np.random.Generator(np.random.Philox(key=key))

    @override
    def training(self, parts: Iterable[Part]) -> Iterator[tuple[Part, Batch]]:
        wanted = list(parts)
        extended = [self._extended(part) for part in wanted]
        for part, (extended_part, batch) in zip(wanted, self.data.training(extended), strict=True):
            self._begin(part.start.epoch)
            yield (
                part,
                dataclasses.replace(
                    batch,
                    shares=self._shares[part.indices] if self.mixup else None,
                    boxes=self._boxes[extended_part.indices] if self.erase else None,
                ),
            )

    def _extended(self, part: Part) -> Part:
        """Return ``part`` with the sample with which its last one is mixed."""
        if not self.mixup:
            return part
        return dataclasses.replace(part, indices=np.append(part.indices, part.successor))

    @override
    def evaluation(self, batches: Iterable[Indices]) -> Iterator[Batch]:
        return self.data.evaluation(batches)

    @override
    def close(self) -> None:
        self.data.close()


def boxes(drawn: F64) -> F64:
    """Return boxes, shape (n, 4), as in ``Batch``, from uniform numbers of the same shape.

    A side that would be longer than the image's is cut to it.
    """
    area = AREA[0] + drawn[:, 0] * (AREA[1] - AREA[0])
    low, high = np.log(ASPECT)
    aspect = np.exp(low + drawn[:, 1] * (high - low))
    height, width = (np.minimum(np.sqrt(side), 1) for side in (area * aspect, area / aspect))
    top, left = drawn[:, 2] * (1 - height), drawn[:, 3] * (1 - width)
    return np.stack([top, top + height, left, left + width], 1)


def edges(boxes: F64, sides: Sequence[int]) -> NDArray[np.int64]:
    """Return boxes in pixels, shape (n, 4), of images with these ``sides``: height and width.

    Raises:
        UsageError: the samples are no images.
    """
    if len(sides) != 2:
        raise UsageError("--random-erase is for images: omit it, this task has other samples")
    return np.rint(boxes * np.repeat(sides, 2)).astype(np.int64)


def augmented(data: Dataset, options: Options, *, classifies: bool) -> Dataset:
    """Return ``data`` with the augmentation of the options.

    Raises:
        UsageError: an option for classifiers, and the task is none.
    """
    for name in ("mixup", "label_smoothing"):
        if getattr(options, name) and not classifies:
            flag = name.replace("_", "-")
            raise UsageError(f"--{flag} is for classifiers: omit it, this task has another loss")
    if not (options.mixup or options.random_erase):
        return data
    return Augmented(data, seed=options.seed, mixup=options.mixup, erase=options.random_erase)
