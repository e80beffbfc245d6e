"""The file of ``--predict``, put together from the lines of all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hvdtrain.collectives.base import Communicator
from hvdtrain.steps.sharding import evaluation_parts
from hvdtrain.steps.world import World
from hvdtrain.tasks.columns import Columns
from hvdtrain.tasks.dataset import Batch
from hvdtrain.training import evaluation
from hvdtrain.training.evaluation import Lines

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
