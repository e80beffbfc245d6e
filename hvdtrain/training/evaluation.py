"""Evaluation on the whole test set, over all ranks; each sample counts once."""

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
from hvdtrain.tasks.columns import Columns
from hvdtrain.tasks.dataset import Batch
from hvdtrain.tasks.metrics import Array, Consumer
from hvdtrain.tasks.task import Task

EVALUATION_BATCH = 4  # times a rank's training batch: no memory is needed for gradients
PIECE = 2**20  # bytes of other ranks' lines that a rank holds at a time


def evaluate(
    adapter: CommonAdapter,
    task: Task,
    global_batch: int,
    *,
    stops: Callable[[], bool] = lambda: False,
    moved: Callable[[int, int], None] = lambda done, total: None,
    also: Sequence[Consumer] = (),
) -> dict[str, Any] | None:
    """Evaluate the model with the ranks' mean running statistics; all ranks must call it.

    Each rank evaluates one contiguous slice of the set; slices differ by at most one sample.

    Args:
        adapter: adapter of this rank.
        task: task with the model, metrics and test samples.
        global_batch: global batch of the training, from which the batch size is derived.
        stops: called after each batch; if True on any rank, the evaluation ends on all.
        moved: called before the first batch and after each, with the number of samples done on all
            ranks (estimated from this rank's) and their total.
        also: further consumers of the outputs.

    Returns:
        ``loss``, the metrics and ``samples``, by name, on every rank; None if it was stopped.
    """
    test, world, metrics = task.test, adapter.world, copy.deepcopy(list(task.metrics))
    assert test is not None
    batch = max(1, EVALUATION_BATCH * global_batch // world.data_size)
    loss, count = 0.0, 0
    alike = adapter.evaluates_together
    shard = world.data_rank, world.data_size
    parts = evaluation_parts(test.samples, batch, *shard, alike=alike)
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
    """Return whether this rank stops; if all make the same passes, whether any rank does."""
    alike = adapter.evaluates_together
    return bool(adapter.communicator.sum(np.array([float(stops)]))[0]) if alike else stops


class Lines:
    """The lines of ``--predict``: each rank buffers those of its slice until they are written.

    Args:
        columns: columns of the task.
        samples: number of samples of the test set.
        world: world of this rank.
    """

    def __init__(self, columns: Columns, samples: int, world: World) -> None:
        self.columns, self._rank = columns, world.data_rank
        self._next, _ = bounds(samples, world.data_rank, world.data_size)
        self._buffer = io.BytesIO()

    def update(self, batch: Batch, output: Array) -> None:
        """Add a batch of this rank's slice; batches must be added in order."""
        self._buffer.write(self.columns.lines(self._next, batch.y, output).encode())
        self._next += batch.count

    def pieces(self, collectives: Communicator) -> Iterator[bytes]:
        """Yield the file in pieces, header first, in dataset order; all ranks iterate together."""
        yield self.columns.header.encode()
        local = self._buffer.getvalue()
        lengths = collectives.gather(len(local).to_bytes(8, "big"))
        for rank, length in enumerate(int.from_bytes(data, "big") for data in lengths):
            for start in range(0, length, PIECE):
                piece = local[start : start + PIECE] if rank == self._rank else b""
                yield collectives.gather(piece)[rank]
