"""Evaluations over all ranks, and the file of ``--predict`` that they write."""

from __future__ import annotations

import json
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import evaluation_parts
from hvdtrain.steps.world import World
from hvdtrain.tasks.columns import Columns
from hvdtrain.tasks.dataset import Batch
from hvdtrain.tasks.metrics import Metric, WholeSet
from hvdtrain.training import evaluation
from hvdtrain.training.evaluation import Lines, evaluate


class NumbersTask:
    """A task whose test samples, losses and outputs are the numbers from 0."""

    def __init__(self, samples: int, accumulate_steps: int = 1, metrics: Any = ()) -> None:
        self.options, self.metrics = Options(accumulate_steps=accumulate_steps), metrics
        self.test, self.samples, self.model = self, samples, None
        self.sizes: list[int] = []
        self.averaged_weights = nullcontext

    def evaluation(self, batches: Any) -> Any:
        """Yield the batches of the test set."""
        return (Batch(indices, indices) for indices in batches)

    def evaluate(self, batch: Batch, metrics: Any) -> tuple[float, float]:
        """Note the size of the batch, and return the sums of its losses and weights."""
        self.sizes.append(batch.count)
        for metric in metrics:
            metric.update(batch, batch.x.astype(np.float64))
        return float(batch.x.sum()), float(batch.count)


def evaluated(task: Any, communicator: Communicator, global_batch: int) -> dict[str, float] | None:
    rank, size = communicator.rank, communicator.size

    def total(**numbers: float) -> dict[str, float]:
        sums = communicator.sum(np.array([*numbers.values()]))
        return dict(zip(numbers, sums.tolist(), strict=True))

    adapter: Any = SimpleNamespace(
        world=World(rank, size, rank, size, "h", 1),
        strategy=SimpleNamespace(evaluates_together=False),
        averaged_buffers=nullcontext,
        total=total,
        communicator=communicator,
    )
    return evaluate(adapter, task, global_batch)


@pytest.mark.parametrize("passes", [1, 2, 16])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_it_needs_no_more_memory_if_the_gradients_are_accumulated(
    on_ranks: Any, size: int, passes: int
) -> None:
    def act(communicator: Communicator) -> Any:
        task = NumbersTask(100, accumulate_steps=passes)
        return evaluated(task, communicator, size * passes * 5), task.sizes

    for result, sizes in on_ranks(size, act):
        assert result == {"loss": 49.5, "samples": 100}
        assert max(sizes) == 20


class Returned(Metric):
    """A metric whose result is ``value``."""

    names = ("mine",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def update(self, batch: Batch, output: Any) -> None:
        """Ignore the batch."""

    def gather(self, collectives: Communicator) -> None:
        """Exchange nothing."""

    def result(self) -> dict[str, float]:
        """Return the value."""
        return {"mine": self.value}


@pytest.mark.parametrize("value", [np.float32(0.5), np.array(0.5), np.int64(2), 0.5, True])
def test_a_metric_may_be_any_number(value: Any) -> None:
    task = NumbersTask(4, metrics=[Returned(value), WholeSet("whole", lambda y, output: value)])
    result = evaluated(task, SingleRank(), 4)
    expected = {"loss": 1.5, "mine": float(value), "whole": float(value), "samples": 4}
    assert json.loads(json.dumps(result)) == expected


@pytest.mark.parametrize("value", [None, "high", [0.5], np.zeros(2), 1j])
def test_a_metric_that_is_no_number_is_named(value: Any) -> None:
    for metric in (Returned(value), WholeSet("mine", lambda y, output: value)):
        with pytest.raises(UsageError, match="the metric mine must be a number, not ") as raised:
            evaluated(NumbersTask(4, metrics=[metric]), SingleRank(), 4)
        assert raised.value.agreed


SQUARES = Columns(("number", "square"), lambda y, output: (y, output))


@pytest.mark.parametrize("piece", [7, 2**20])
@pytest.mark.parametrize("samples", [0, 2, 7, 100])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_file_is_in_order_at_any_number_of_ranks(
    on_ranks: Any, monkeypatch: pytest.MonkeyPatch, size: int, samples: int, piece: int
) -> None:
    monkeypatch.setattr(evaluation, "PIECE", piece)

    def act(communicator: Communicator) -> list[bytes]:
        rank = communicator.rank
        lines = Lines(SQUARES, samples, World(rank, size, rank, size, "h", 1))
        for indices in evaluation_parts(samples, 4, rank, size):
            lines.update(Batch(None, indices), (indices**2).astype(np.float64))
        return list(lines.pieces(communicator))

    expected = "sample,number,square\n" + "".join(
        f"{number},{number},{number**2:#.9g}\n" for number in range(samples)
    )
    for pieces in on_ranks(size, act):
        assert b"".join(pieces).decode() == expected
        assert max(map(len, pieces[1:]), default=0) <= piece
