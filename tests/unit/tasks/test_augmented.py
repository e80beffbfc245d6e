"""Mixtures and erased parts: functions of seed, epoch and sample, whatever the parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from typing_extensions import override

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices, Shards, permutation
from hvdtrain.tasks.augmented import AREA, Augmented, augmented, boxes, edges
from hvdtrain.tasks.dataset import Batch, Indexed

SAMPLES = 23


class Numbers(Indexed):
    """Samples whose input and target are their index."""

    samples = SAMPLES
    digest = "numbers"

    @override
    def fetch(self, indices: Indices) -> Batch:
        return Batch(indices, indices)


def drawn(
    size: int = 1, *, epoch: int = 0, consumed: int = 0, batch: int = 9, seed: int = 5
) -> dict[int, tuple[int, float, tuple[float, ...]]]:
    """Return partner, share and box by sample, of all ranks of an epoch."""
    data, samples = Augmented(Numbers(), seed=seed, mixup=0.4, erase=0.5), {}
    for rank in range(size):
        shards = Shards(SAMPLES, batch, seed=seed, rank=rank, size=size)
        for part, loaded in data.training(shards.parts(epoch, consumed)):
            assert len(loaded.shares) == len(part.indices) == max(1, part.count)
            assert len(loaded.x) == len(loaded.boxes) == len(part.indices) + 1
            for row, index in enumerate(loaded.x[: part.count].tolist()):
                share, box = float(loaded.shares[row]), tuple(loaded.boxes[row].tolist())
                samples[index] = int(loaded.x[row + 1]), share, box
    return samples


def test_the_augmentation_is_the_same_on_any_number_of_ranks_and_in_any_batches() -> None:
    whole = drawn()
    assert len(whole) == SAMPLES
    for size, batch in ((2, 9), (3, 9), (3, 4), (9, 10)):
        assert drawn(size, batch=batch) == whole
    rest = drawn(2, consumed=9)
    assert rest == {index: whole[index] for index in rest}
    order = permutation(SAMPLES, 5, 0).tolist()
    following = dict(zip(order, [*order[1:], order[0]], strict=True))
    assert {index: partner for index, (partner, _, _) in whole.items()} == following


@pytest.mark.parametrize("change", [{"epoch": 1}, {"seed": 6}])
def test_another_epoch_or_seed_draws_anew(change: dict[str, int]) -> None:
    first, second = drawn(), drawn(**change)
    assert all(first[index][1:] != second[index][1:] for index in first)


def test_the_part_of_the_erased_and_their_areas() -> None:
    random = np.random.default_rng(0).random((20_000, 4))
    erased = boxes(random)
    assert erased.min() >= 0
    assert erased.max() <= 1
    areas = (erased[:, 1] - erased[:, 0]) * (erased[:, 3] - erased[:, 2])
    whole = np.isclose(areas, AREA[0] + random[:, 0] * (AREA[1] - AREA[0]))
    assert areas.max() <= AREA[1]
    assert whole.mean() > 0.95  # of the others a side was cut to the image
    data = Augmented(Numbers(), seed=1, mixup=0, erase=0.25)
    data.samples = 20_000
    data._begin(0)
    share = (data._boxes[:, 1] > 0).mean()
    assert share == pytest.approx(0.25, abs=5 * (0.25 * 0.75 / 20_000) ** 0.5)


def test_boxes_in_pixels() -> None:
    assert edges(np.array([[0, 0.5, 0.25, 1.0], [0, 0, 0, 0]]), (10, 8)).tolist() == [
        [0, 5, 2, 8],
        [0, 0, 0, 0],
    ]
    with pytest.raises(UsageError, match="--random-erase is for images"):
        edges(np.zeros((1, 4)), (10,))


def test_pieces_of_a_mixed_batch_overlap_by_one() -> None:
    batch = Batch(np.arange(6), np.arange(6), np.linspace(0, 1, 5), np.zeros((6, 4)))
    assert batch.count == 5
    pieces = [batch[slice(0, 3)], batch[slice(3, 5)]]
    assert [piece.x.tolist() for piece in pieces] == [[0, 1, 2, 3], [3, 4, 5]]
    assert [piece.count for piece in pieces] == [3, 2]
    assert [len(piece.boxes) for piece in pieces] == [4, 3]


@pytest.mark.parametrize("option", [{"mixup": 0.2}, {"label_smoothing": 0.1}])
def test_an_option_for_classifiers(option: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="is for classifiers: omit it, this task has another loss"):
        augmented(Numbers(), Options(**option), classifies=False)
    augmented(Numbers(), Options(**option), classifies=True)


def test_without_an_option_the_data_is_the_data() -> None:
    data = Numbers()
    assert augmented(data, Options(), classifies=False) is data


def test_it_is_closed_with_its_data_and_evaluates_as_its_data() -> None:
    closed = []

    class Closing(Numbers):
        def close(self) -> None:
            closed.append(self)

        def evaluation(self, batches: Any) -> Iterator[Batch]:
            return super().evaluation(batches)

    data = Augmented(Closing(), seed=1, mixup=1.0, erase=0.5)
    (batch,) = data.evaluation([np.arange(3)])
    assert (batch.shares, batch.boxes, data.digest) == (None, None, "numbers")
    data.close()
    assert closed == [data.data]
