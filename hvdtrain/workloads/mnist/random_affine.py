"""Random affine augmentation of images of digits, a function of (seed, epoch, sample).

The embedded digits are by few writers, those of the test by others: slant, width, position and
weight of a stroke vary more between them than within the training images. Source: Simard et al.,
"Best Practices for Convolutional Neural Networks Applied to Visual Document Analysis" (2003).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.steps.sharding import Indices, seed_of

U8 = NDArray[np.uint8]
F32 = NDArray[np.float32]


@dataclass(frozen=True)
class RandomAffine:
    """Maximum changes of an image; each change is drawn uniformly from [-maximum, maximum].

    Attributes:
        rotation: rotation, in radians.
        shear: horizontal shear, as a fraction of the height.
        scale: scaling of width and height, independently, as a fraction.
        shift: horizontal and vertical shift, in pixels.
    """

    rotation: float
    shear: float
    scale: float
    shift: float

    def __call__(self, images: U8, samples: Indices, *, seed: int, epoch: int) -> U8:
        """Return ``images[samples]``, augmented: uint8 of shape (len(samples), height, width).

        Args:
            images: all images, uint8 of shape (n, height, width); pixels outside are 0.
            samples: indices of the images; each result is independent of the others.
            seed: seed of the training.
            epoch: number of the epoch.
        """
        key = seed_of(seed, epoch, 1)  # differs from that of the epoch's order
        drawn = np.random.Generator(np.random.Philox(key=key)).random((len(images), 6))
        return warped(images[samples], self._inverse(2 * drawn - 1)[samples])

    def _inverse(self, drawn: NDArray[np.float64]) -> F32:
        """Return, for each sample, the map from a pixel's position to its source's (centred)."""
        turn, shear = drawn[:, 0] * self.rotation, drawn[:, 1] * self.shear
        wide, high = 1 + drawn[:, 2] * self.scale, 1 + drawn[:, 3] * self.scale
        cos, sin = np.cos(turn), np.sin(turn)
        rows = [
            [wide * cos, wide * (shear * cos - sin), drawn[:, 4] * self.shift],
            [high * sin, high * (shear * sin + cos), drawn[:, 5] * self.shift],
        ]
        return np.moveaxis(np.array(rows, np.float32), 2, 0)


def warped(images: U8, inverse: F32) -> U8:
    """Return images whose pixels are interpolated between the four around their source.

    Args:
        images: uint8 of shape (n, height, width).
        inverse: shape (n, 2, 3): x and y of the source by x, y and 1 of the pixel, from the centre.
    """
    number, height, width = images.shape
    padded = np.pad(images, ((0, 0), (2, 2), (2, 2))).reshape(-1)  # pixels outside are 0
    x = np.arange(width, dtype=np.float32) - np.float32((width - 1) / 2)
    y = np.arange(height, dtype=np.float32) - np.float32((height - 1) / 2)

    def source(row: F32, size: int) -> F32:
        across, down = row[:, :1] * x, row[:, 1:2] * y + row[:, 2:]
        coordinates = down[:, :, None] + across[:, None, :] + np.float32((size - 1) / 2 + 2)
        return np.clip(coordinates, 0.5, size + 2.5, out=coordinates)

    from_x, from_y = source(inverse[:, 0], width), source(inverse[:, 1], height)
    left, top = from_x.astype(np.int32), from_y.astype(np.int32)
    from_x -= left
    from_y -= top
    stride = width + 4
    first = top * stride + left
    first += (np.arange(number, dtype=np.int32) * (stride * (height + 4)))[:, None, None]

    def row_of(offset: int) -> F32:
        left_value = padded.take(first + offset).astype(np.float32)
        return left_value + from_x * (padded.take(first + (offset + 1)) - left_value)

    upper = row_of(0)
    upper += from_y * (row_of(stride) - upper)
    return np.rint(upper).astype(np.uint8)
