"""Check the training: learning rate (4), gradients (5), broadcast (6), checkpoint (7)."""

from __future__ import annotations

import copy
import math
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.commands.verify.hooks import watch_writes
from hvdtrain.commands.verify.probe import Array, Facts, Probe, largest
from hvdtrain.commands.verify.rows import StepRow, by_rank, number, row
from hvdtrain.steps.learning_rate import LearningRate, scale_factor
from hvdtrain.steps.sharding import Part, Position, Shards
from hvdtrain.system.output.text import plural, rank_list

EXACT, SINGLE = 1e-12, 1e-6  # relative; Keras stores its learning rate in float32
ROUNDING = 1e-9  # of the largest value; far above what the order of a float64 sum changes

BASE = 0.1  # learning rate of one rank
SCHEDULE: dict[str, Any] = {"epochs": 8.0, "warmup_epochs": 2.0, "schedule": "cosine"}
POSITIONS = (0.0, 0.5, 1.75, 2.0, 3.5, 4.0, 5.0, 7.25)  # epochs


def measure_rate(probe: Probe) -> Facts:
    """Compute learning rates, and make an update of the trainer's task at each of them."""
    rate = probe.adapter.scale_learning_rate(BASE, scaling="linear", **SCHEDULE)
    returned = [float(rate(position)) for position in POSITIONS]
    start = copy.deepcopy(probe.adapter.export_state(probe.plain.model, None))
    changes = []
    for value in (1.0, *returned):
        probe.adapter.import_state(probe.plain.model, None, start)
        changes.append(probe.update(probe.plain, np.arange(5), value))
    gradient = changes.pop(0)
    applied = [float(change @ gradient / (gradient @ gradient)) for change in changes]
    return {"returned": returned, "applied": applied}


def expected_rates(size: int) -> list[float]:
    """Return the rates of the trainer's rule (``steps/learning_rate.py``) on ``size`` ranks."""
    rate = LearningRate(BASE, scale_factor("linear", size), **SCHEDULE)
    return [rate(position) for position in POSITIONS]


def judge_rate(all_ranks: list[Facts]) -> StepRow:
    """Judge step 4: on all ranks, the rates returned and applied are those for their number."""
    size = len(all_ranks)
    rates = expected_rates(size)
    difference = max(_max_difference(facts["returned"], rates) for facts in all_ranks)
    in_updates = max(_max_difference(facts["applied"], rates) for facts in all_ranks)
    evidence = (
        f"max difference to the rule {number(difference)} over {len(rates)} rates on "
        f"{plural(size, 'rank')}, {number(in_updates)} in {len(rates)} updates; peak "
        f"{BASE} x {size} = {BASE * size:g}"
    )
    if difference > EXACT:
        peaks = by_rank([round(max(facts["returned"]), 6) for facts in all_ranks], ", ")
        evidence = f"after the warm-up {peaks} by rank; {evidence}"
    holds = difference <= EXACT and in_updates <= SINGLE
    return row(4, holds, evidence, difference=difference, difference_in_updates=in_updates)


def _max_difference(actual: list[float], expected: list[float]) -> float:
    """Return the largest difference relative to ``BASE``; infinite if any value is nan."""
    differences = [abs(a - b) / BASE for a, b in zip(actual, expected, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def shares(size: int) -> list[list[int]]:
    """Return the number of samples per rank in three uneven steps, with none on a rank in two."""
    if size == 1:
        return [[3], [1], [2]]
    rising = [2 * rank + 1 for rank in range(size)]
    return [rising, [0, *rising[1:]], [*rising[:-1], 0]]


def measure_gradient(probe: Probe) -> Facts:
    """Make updates of a distributed task, and of a plain one with the whole global batch.

    At rate 1 an update subtracts the gradient applied.
    """
    adapter, plain = probe.adapter, probe.plain
    task = probe.task(plain.train.samples, seed=0)
    task.no_sync, task.sum_shards = adapter.strategy.no_sync, adapter.strategy.sum_shards
    task.model, task.optimizer = adapter.distribute_optimizer(task.model, task.optimizer)
    shards = Shards(1, 1, on_begin=adapter.begin_part)  # step 3 is verified separately
    applied, whole = [], []
    for counts in shares(probe.size):
        begin, count = sum(counts[: probe.rank]), counts[probe.rank]
        local = np.arange(begin, begin + max(1, count))  # of none, a stand-in
        part = Part(local, sum(counts), Position(), Position(), stand_in=not count)
        adapter.import_state(plain.model, None, adapter.export_state(task.model, None))
        whole.append(probe.update(plain, np.arange(sum(counts))).tolist())
        with shards.step(part):
            applied.append(probe.update(task, local).tolist())
    tensors = len(adapter.export_state(plain.model, None).model)
    return {"applied": applied, "whole": whole, "tensors": tensors}


def judge_gradient(all_ranks: list[Facts]) -> StepRow:
    """Judge step 5: all ranks applied the same gradient, that of the global batch."""
    applied = np.array([facts["applied"] for facts in all_ranks])  # (ranks, steps, parameters)
    whole = np.array(all_ranks[0]["whole"])
    scale = largest(whole)
    between, to_whole = largest(applied - applied[0]), largest(applied - whole)
    holds = between <= ROUNDING * scale and to_whole <= ROUNDING * scale
    counts = ", ".join(by_rank(step, "+") for step in shares(len(all_ranks)))
    evidence = (
        f"max difference: between ranks {number(between)}, to the gradient of the global batch "
        f"{number(to_whole)} ({plural(len(all_ranks), 'rank')}, {all_ranks[0]['tensors']} tensors; "
        f"samples per rank {counts})"
    )
    to_root = [largest(gradients - applied[0]) for gradients in applied]
    different = [rank for rank, value in enumerate(to_root) if not value <= ROUNDING * scale]
    if different:
        evidence = f"{rank_list(different)} applied different gradients than rank 0; {evidence}"
    return row(5, holds, evidence, between_ranks=between, to_whole_batch=to_whole)


def measure_broadcast(probe: Probe) -> Facts:
    """Train the ranks on different data for some updates, then broadcast."""
    updates = 1 + probe.rank
    task = probe.task(5 + updates, seed=100 + probe.rank, optimizer="adam", buffers=True)
    for update in range(updates):
        probe.update(task, np.arange(5 + update), rate=0.01)
    before = probe.state(task)
    probe.adapter.broadcast_state(task.model, task.optimizer)
    after = probe.state(task)
    return {"tensors": len(after), "before": _flat(before), "after": _flat(after)}


def judge_broadcast(all_ranks: list[Facts]) -> StepRow:
    """Judge step 6: all ranks hold rank 0's state from before the broadcast, bit for bit."""
    root = np.array(all_ranks[0]["before"])
    before = [largest(np.array(facts["before"]) - root) for facts in all_ranks]
    after = [
        largest(np.array(facts["after"]) - root) if len(facts["after"]) == len(root) else np.inf
        for facts in all_ranks
    ]
    different = [rank for rank, value in enumerate(after) if value != 0]
    evidence = (
        f"max difference to rank 0: before {max(before):.1f}, after {number(max(after))}; "
        f"{plural(len(all_ranks), 'rank')}, {all_ranks[0]['tensors']} tensors, optimizer state "
        "included"
    )
    if different:
        evidence = f"not equal on {rank_list(different)}: {evidence}"
    return row(6, not different, evidence, before=max(before), after=float(max(after)))


def _flat(tensors: list[Array]) -> list[float]:
    return [float(value) for tensor in tensors for value in np.ravel(tensor)]


def measure_checkpoint(probe: Probe) -> Facts:
    """Save, note which ranks wrote files, and load into a network with other weights."""
    communicator = probe.adapter.communicator
    name = tempfile.mkdtemp(prefix="hvdtrain-verify-") if probe.rank == 0 else ""
    directory = Path(communicator.gather(name.encode())[0].decode())
    try:
        return _save_and_load(probe, directory)
    finally:
        communicator.gather(b"")  # no rank reads or writes there any more
        shutil.rmtree(directory, ignore_errors=True)


def _save_and_load(probe: Probe, directory: Path) -> Facts:
    adapter = probe.adapter
    task, second = (probe.task(5, seed=seed, optimizer="adam") for seed in (200, 300))
    probe.update(task, np.arange(5), rate=0.01)
    saved = probe.state(task)
    failure = ""
    with watch_writes() as written:
        try:
            adapter.save_checkpoint(directory, task.model, task.optimizer, state={"step": 1})
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    # All ranks finish writing before any of them reads the directory.
    adapter.communicator.gather(b"")
    entries = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    state = adapter.load_checkpoint(directory, second.model, second.optimizer, origin={})
    loaded = probe.state(second)
    difference = math.inf
    if [a.shape for a in saved] == [b.shape for b in loaded]:
        difference = max(largest(a - b) for a, b in zip(saved, loaded, strict=True))
    return {
        "failure": failure,
        "written": sum(Path(path).is_relative_to(directory) for path in written),
        "entries": entries,
        "bytes": size,
        "tensors": len(saved),
        "loaded": state is not None,
        "difference": difference,
    }


def judge_checkpoint(all_ranks: list[Facts]) -> StepRow:
    """Judge step 7: one complete checkpoint, written by one rank, restores the state."""
    root = all_ranks[0]
    writers = [rank for rank, facts in enumerate(all_ranks) if facts["written"]]
    wrong = []
    if len(writers) != 1:
        wrong.append(f"{rank_list(writers)} wrote" if writers else "no rank wrote")
    if len(root["entries"]) != 1:
        wrong.append(f"expected one checkpoint: {', '.join(root['entries']) or 'none was written'}")
    failed = [rank for rank, facts in enumerate(all_ranks) if facts["failure"]]
    wrong += [f"rank {rank}: {all_ranks[rank]['failure']}" for rank in failed[:1]]
    if not root["loaded"]:
        wrong.append("no checkpoint could be loaded")
    elif root["difference"] != 0:
        wrong.append(f"loaded values differ by {number(root['difference'])}")
    evidence = "; ".join(wrong) or (
        f"rank {writers[0]} of {len(all_ranks)} wrote "
        f"{plural(all_ranks[writers[0]]['written'], 'file')}, {root['bytes']:,} bytes; loaded: "
        f"max difference {number(root['difference'])}, {root['tensors']} tensors"
    )
    return row(7, not wrong, evidence, writers=writers, found=root["entries"])
