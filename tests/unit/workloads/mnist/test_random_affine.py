"""The augmentation of the embedded digits: by seed, epoch and sample alone, and what it does."""

from __future__ import annotations

import numpy as np
import pytest

from hvdtrain.steps.sharding import Shards
from hvdtrain.workloads.mnist.data import U8, RandomAffine, Samples, warped

CHANGE = RandomAffine(rotation=0.3, shear=0.3, scale=0.2, shift=3.0)
NONE = RandomAffine(rotation=0.0, shear=0.0, scale=0.0, shift=0.0)
IMAGES: U8 = np.random.default_rng(1).integers(0, 256, (30, 28, 28), np.uint8)
ALL = np.arange(len(IMAGES))


def turned(*rows: tuple[float, float, float]) -> U8:
    return warped(IMAGES, np.tile(np.array(rows, np.float32), (len(IMAGES), 1, 1)))


@pytest.mark.parametrize("size", [1, 2, 8])
def test_the_ranks_together_see_what_one_rank_sees(size: int) -> None:
    """Whatever the batch: each sample has its pixels of this epoch, and others in the next one."""
    samples = Samples(IMAGES, np.zeros(len(IMAGES), np.int64), CHANGE)
    augment = samples.augment(seed=5, channel=1)
    assert augment
    for epoch in (0, 1):
        expected = CHANGE(IMAGES, ALL, seed=5, epoch=epoch)
        seen = np.zeros_like(IMAGES)
        for rank in range(size):
            shards = Shards(len(IMAGES), 12, seed=5, rank=rank, size=size)
            for part in shards.parts(epoch):
                augmented = augment(part)
                assert augmented.shape == (len(part.indices), 1, 28, 28)
                seen[part.indices] = augmented[:, 0]
        assert np.array_equal(seen, expected)
    assert not np.array_equal(expected, CHANGE(IMAGES, ALL, seed=5, epoch=0))
    assert not np.array_equal(expected, CHANGE(IMAGES, ALL, seed=6, epoch=1))


def test_samples_of_equal_images_are_changed_each_by_itself() -> None:
    same = np.repeat(IMAGES[:1], 30, axis=0)
    changed = CHANGE(same, ALL, seed=0, epoch=0)
    assert len(np.unique(changed, axis=0)) == 30


def test_maxima_of_zero_change_nothing() -> None:
    assert np.array_equal(NONE(IMAGES, ALL[::-1], seed=0, epoch=0), IMAGES[::-1])
    assert Samples(IMAGES, ALL).augment(seed=0, channel=1) is None


def test_a_quarter_turn_a_mirror_and_a_shift_are_exact() -> None:
    assert np.array_equal(turned((0, 1, 0), (-1, 0, 0)), np.rot90(IMAGES, -1, axes=(1, 2)))
    assert np.array_equal(turned((-1, 0, 0), (0, 1, 0)), IMAGES[:, :, ::-1])
    shifted = turned((1, 0, 2), (0, 1, -3))  # a pixel's source is 2 to the right and 3 above
    assert np.array_equal(shifted[:, 3:, :-2], IMAGES[:, :-3, 2:])
    assert not shifted[:, :3].any() and not shifted[:, :, -2:].any()  # from outside
    assert not turned((1, 0, 100), (0, 1, 0)).any()


def test_half_a_pixel_is_the_mean_of_two() -> None:
    pairs = IMAGES.astype(np.float64)
    means = np.rint((pairs[:, :, :-1] + pairs[:, :, 1:]) / 2)
    assert np.array_equal(turned((1, 0, 0.5), (0, 1, 0))[:, :, :-1], means)


def test_shifts_reach_their_bounds_and_no_further() -> None:
    """The position of a spot shows its shift."""
    spots = np.zeros((500, 28, 28), np.uint8)
    spots[:, 12:16, 12:16] = 255
    change = RandomAffine(rotation=0.0, shear=0.0, scale=0.0, shift=2.0)
    moved = change(spots, np.arange(500), seed=1, epoch=0).astype(np.float64)
    for axis in (1, 2):
        positions = (moved.sum(3 - axis) @ np.arange(28)) / moved.sum((1, 2)) - 13.5
        assert 1.9 < np.abs(positions).max() < 2.02
        assert abs(positions.mean()) < 0.2
