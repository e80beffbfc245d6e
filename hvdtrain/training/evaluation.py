"""An evaluation on the whole test set, over all ranks; each sample counts once."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.collectives.base import Communicator
from hvdtrain.steps.sharding import bounds, evaluation_parts
from hvdtrain.steps.world import World
from hvdtrain.workloads.columns import Columns
from hvdtrain.workloads.data.dataset import Batch
from hvdtrain.workloads.metrics import Array, Consumer
from hvdtrain.workloads.task import Task

EVALUATION_BATCH = 4  # times the training batch of a rank: no gradients need memory
PIECE = 2**20  # bytes of other ranks' lines that a rank holds at once


def evaluate(
    adapter: CommonAdapter,
    task: Task,
    global_batch: int,
    *,
    stops: Callable[[], bool] = lambda: False,
    moved: Callable[[int, int], None] = lambda done, total: None,
    also: Sequence[Consumer] = (),
) -> dict[str, Any] | None:
    """Evaluate the model, with the mean of the ranks' running statistics; all ranks call it.

    A rank has one slice of the set, in its order; slices differ by at most one sample.

    Args:
        adapter: of this rank.
        task: whose model, metrics and test samples they are.
        global_batch: of the training, by which the batches are measured.
        stops: asked after each batch; one rank that says yes ends the evaluation on all.
        moved: called before the first batch and after each, with the samples that are done on all
            ranks, by what is done on this one, and all samples.
        also: what takes in the outputs besides the metrics.

    Returns:
        ``loss``, the metrics and ``samples``, by name, on every rank; None where it was stopped.
    """
    test, world, metrics = task.test, adapter.world, copy.deepcopy(list(task.metrics))
    assert test is not None
    batch = max(1, EVALUATION_BATCH * global_batch // world.data_size)
    loss, count = 0.0, 0
    alike = adapter.evaluates_together
    place = world.data_rank, world.data_size
    parts = evaluation_parts(test.samples, batch, *place, alike=alike)
    moved(0, test.samples)
    with adapter.averaged_buffers(task.model):
        for loaded in test.evaluation(parts):
            loss += task.evaluate(loaded, [*metrics, *also])
            count += loaded.count
            moved(min(test.samples, count * world.data_size), test.samples)
            if _anyone(adapter, stops()):
                break
    means, seen = adapter.average_metrics(count, loss=loss)
    if seen < test.samples:
        return None
    for metric in metrics:
        metric.gather(adapter.data_communicator)
        means |= metric.result()
    return {**means, "samples": seen}


def _anyone(adapter: CommonAdapter, stops: bool) -> bool:
    """Return whether this rank stops; where all make the same passes, whether any does."""
    alike = adapter.evaluates_together
    return bool(adapter.communicator.sum(np.array([float(stops)]))[0]) if alike else stops


class Lines:
    """The lines of ``--predict``: each rank holds those of its slice, until they are written.

    Args:
        columns: of the task.
        samples: of the test set.
        world: of this rank.
    """

    def __init__(self, columns: Columns, samples: int, world: World) -> None:
        self.columns, self._rank = columns, world.data_rank
        self._next, _ = bounds(samples, world.data_rank, world.data_size)
        self._own = io.BytesIO()

    def update(self, batch: Batch, output: Array) -> None:
        """Take in a batch of this rank's slice; the batches come in order."""
        self._own.write(self.columns.lines(self._next, batch.y, output).encode())
        self._next += batch.count

    def pieces(self, collectives: Communicator) -> Iterator[bytes]:
        """Yield the file in pieces, header first, in dataset order; all ranks iterate together."""
        yield self.columns.header.encode()
        own = self._own.getvalue()
        lengths = collectives.gather(len(own).to_bytes(8, "big"))
        for rank, length in enumerate(int.from_bytes(one, "big") for one in lengths):
            for start in range(0, length, PIECE):
                piece = own[start : start + PIECE] if rank == self._rank else b""
                yield collectives.gather(piece)[rank]
