"""The loader of a rank's parts: its batches are those of the shards, in every kind of loop."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset, default_collate

from hvdtrain.adapters.pytorch.loader import TorchShards
from hvdtrain.errors import UsageError

SAMPLES, BATCH = 11, 4


class Drawn(Dataset[Any]):
    """The index, the epoch and three random numbers."""

    epoch = -1

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        draws = [random.random(), np.random.rand(), torch.rand(1, dtype=torch.float64).item()]
        return torch.tensor([index, self.epoch, *draws], dtype=torch.float64)


class Worker:
    """Record the workers that begin."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __call__(self, worker: int) -> None:
        with self.file.open("a") as file:
            print(worker, file=file)


def shards(rank: int = 0, size: int = 1) -> TorchShards:
    return TorchShards(SAMPLES, BATCH, 5, rank, size)


def read(shards: TorchShards, *epochs: int, **options: Any) -> dict[tuple[int, int], list[float]]:
    """Return what was drawn, by (index, epoch)."""
    loader = shards.loader(Drawn(), **options)
    batches = [batch for epoch in epochs for _, batch in loader.batches(epoch)]
    return {(int(row[0]), int(row[1])): row[2:] for row in torch.cat(batches).tolist()}


def test_a_sample_draws_the_same_whoever_reads_it(tmp_path: Path) -> None:
    expected = read(shards(), 0, 1)
    assert len(expected) == 2 * SAMPLES
    assert len({number for row in expected.values() for number in row}) == 6 * SAMPLES
    begun = Worker(tmp_path / "workers")
    found = [read(shards(rank, 3), 0, 1, num_workers=2, worker_init_fn=begun) for rank in range(3)]
    assert {key: row for rows in found for key, row in rows.items()} == expected
    assert sorted(begun.file.read_text().split()) == ["0"] * 3 + ["1"] * 3  # once for all epochs
    assert read(TorchShards(SAMPLES, BATCH, 6), 0) != read(shards(), 0)


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_may_be_left_and_continued(workers: int) -> None:
    parts = shards()
    loader = parts.loader(TensorDataset(torch.arange(SAMPLES)), num_workers=workers)
    first, (read,) = next(iter(loader.batches(1)))
    rest = [(part, batch) for part, (batch,) in loader.batches(1, first.end.consumed)]
    assert [part.start.consumed for part, _ in rest] == [4, 8]
    order = [part.indices.tolist() for part in parts.parts(1)]
    assert [batch.tolist() for batch in (read, *(batch for _, batch in rest))] == order


def test_the_generators_of_the_model_are_left_as_they_are() -> None:
    def draws() -> list[float]:
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    def reset() -> None:
        random.seed(1)
        np.random.seed(1)
        torch.manual_seed(1)

    reset()
    expected = [draws() for _ in range(3)]
    for data in (Drawn(), TensorDataset(torch.arange(SAMPLES))):
        reset()
        assert [draws() for _ in shards().loader(data).batches(0)] == expected


def test_tensors_and_their_samples_give_equal_batches() -> None:
    rows = TensorDataset(torch.arange(3 * SAMPLES).view(-1, 3), torch.arange(SAMPLES))
    loaders = (
        shards().loader(data, **options)
        for data, options in (
            (rows, {}),
            (Subset(rows, range(SAMPLES)), {}),
            (rows, {"collate_fn": default_collate}),
        )
    )
    for batches in zip(*(loader.batches(0) for loader in loaders), strict=True):
        (_, first), *others = batches
        for _, other in others:
            assert isinstance(other, list) and isinstance(first, list)
            assert all(torch.equal(*pair) for pair in zip(first, other, strict=True))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


@pytest.mark.parametrize(
    ("data", "options", "message"),
    [
        (Drawn(), {"batch_size": 2}, "batch_size is determined by the shards: omit it"),
        (Drawn(), {"shuffle": False}, "shuffle is determined by the shards"),
        (Stream(), {}, "Stream cannot be read by index"),
        (Subset(Drawn(), range(3)), {}, "has 3 samples, but shard_data was called with 11"),
    ],
)
def test_what_cannot_be_loaded_is_one_line(data: Any, options: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        shards().loader(data, **options)
