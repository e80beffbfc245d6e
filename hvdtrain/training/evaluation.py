"""Evaluation on the whole test set, over all ranks; each sample counts once.

``evaluate_only`` evaluates a checkpoint, without training or saving: ``--evaluate-only`` and
``--predict``.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import EXIT_OK, UsageError
from hvdtrain.steps.checkpoint_files import State
from hvdtrain.steps.sharding import bounds, evaluation_parts
from hvdtrain.steps.summary import Stopped
from hvdtrain.steps.world import World
from hvdtrain.system.runtime.exit import agreed, process_status
from hvdtrain.system.runtime.tuning import release_freed_memory
from hvdtrain.tasks.columns import Columns
from hvdtrain.tasks.dataset import Batch
from hvdtrain.tasks.metrics import Array, Consumer
from hvdtrain.tasks.task import Task
from hvdtrain.training.plan import Session, has_average, origin_of
from hvdtrain.training.progress import progress_of
from hvdtrain.training.summary import (
    evaluation_rows,
    headline,
    measured,
    with_evaluation,
    with_session,
)
from hvdtrain.training.throughput import Clock

EVALUATION_BATCH = 4  # times the batch of a training pass: no memory is needed for gradients
PIECE = 2**20  # bytes of other ranks' lines that a rank holds at a time


def evaluate(
    adapter: CommonAdapter,
    task: Task,
    global_batch: int,
    *,
    stops: Callable[[], bool] = lambda: False,
    moved: Callable[[int, int], None] = lambda done, total: None,
    also: Sequence[Consumer] = (),
) -> dict[str, float] | None:
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
    passes = world.size * task.options.accumulate_steps
    batch = max(1, EVALUATION_BATCH * global_batch // passes)
    loss, weight, count = 0.0, 0.0, 0
    alike = adapter.strategy.evaluates_together
    parts = evaluation_parts(test.samples, batch, world.rank, world.size, alike=alike)
    moved(0, test.samples)
    with task.averaged_weights(), adapter.averaged_buffers(task.model):
        for loaded in test.evaluation(parts):
            losses, weights = task.evaluate(loaded, [*metrics, *also])
            loss, weight = loss + losses, weight + weights
            count += loaded.count
            moved(min(test.samples, count * world.size), test.samples)
            stopped = float(stops())
            if alike:  # all make the same passes: whether any rank stops
                stopped = adapter.communicator.sum(np.array([stopped]))[0]
            if stopped:
                break
    release_freed_memory()
    sums = adapter.total(samples=count, loss=loss, weight=weight)
    seen = round(sums["samples"])
    if seen < test.samples:
        return None
    means = {"loss": sums["loss"] / sums["weight"] if sums["weight"] else math.nan}
    for metric in metrics:
        metric.gather(adapter.communicator)
        means |= {name: _number(name, value) for name, value in metric.result().items()}
    return {**means, "samples": seen}


def _number(name: str, value: Any) -> float:
    """Return the value of a metric, which may be a number of NumPy or of a framework."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        kind = type(value).__name__
        raise agreed(UsageError(f"the metric {name} must be a number, not {kind}")) from error


class Lines:
    """The lines of ``--predict``: each rank buffers those of its slice until they are written."""

    def __init__(self, columns: Columns, samples: int, world: World) -> None:
        self.columns, self._rank = columns, world.rank
        self._next, _ = bounds(samples, world.rank, world.size)
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


def evaluate_only(session: Session, device: str) -> int:
    """Evaluate a checkpoint, write predictions and summary; return the exit code.

    All ranks must call it; ``device`` describes that of this rank.

    Raises:
        UsageError: on every rank: there is nothing to evaluate on, or no such checkpoint.
    """
    options, task, adapter = session.options, session.task, session.adapter
    test = task.test
    if test is None or not test.samples:
        remedy = "use --data DIR that contains val/, or a task with test samples"
        raise agreed(UsageError(f"there are no samples to evaluate on: {remedy}"))
    state = _load_weights(session)
    show = progress_of(session)
    weights = f"{state['path'] or 'new weights'}, step {state['step']}"
    line = f"evaluating {weights}, on {test.samples:,} {session.workload.unit}"
    show.begin([headline(session, device), line, *task.notes], total=0, done=0)
    process_status.stage = "evaluation"
    lines = Lines(task.columns, test.samples, adapter.world)
    also = [lines] if options.predict else []
    started = time.perf_counter()
    metrics = evaluate(adapter, task, session.plan.global_batch, moved=show.evaluating, also=also)
    assert metrics is not None
    rate = test.samples / (time.perf_counter() - started)
    if options.predict:
        show.predictions(lines.pieces(adapter.communicator))
    test.close()
    summary = dataclasses.replace(
        with_evaluation(with_session(Clock().figures(), session), metrics),
        epochs_completed=state.get("position", {}).get("epoch"),
        steps_completed=state["step"],
        samples_trained=state.get("samples"),
        parameter_norm=task.parameter_norm(),
        stopped=Stopped.FINISHED,
        checkpoint=state["path"],
        images_per_second_mean=rate if options.benchmark else None,
    )
    table = evaluation_rows(summary, measured(task.metrics, metrics), options.predict)
    show.end(f"hvdtrain {session.workload.name}", table, summary)
    return EXIT_OK


def _load_weights(session: Session) -> State:
    """Load the checkpoint's weights on all ranks; return its other values.

    Without a checkpoint, in a benchmark, all ranks receive the weights of rank 0.
    """
    options, task, adapter = session.options, session.task, session.adapter
    task.model, task.optimizer = adapter.distribute_optimizer(task.model, task.optimizer)
    path = options.checkpoint or options.checkpoint_dir
    state: State = {"path": None, "step": 0}
    average = None
    if path is not None:
        origin = origin_of(session.workload, options, session.plan)
        average = task.optimizer if options.ema else None  # which is in its state
        state = adapter.load_weights(path, task.model, average, origin=origin)
        if has_average(state) and not options.ema:
            note = "these are the weights, not their moving average: use --ema to evaluate that"
            task.notes = (*task.notes, note)
    adapter.broadcast_state(task.model, average)
    return state
