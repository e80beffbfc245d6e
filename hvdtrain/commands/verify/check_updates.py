"""Check the training: learning rate (4), gradients (5), broadcast (6), checkpoint (7)."""

from __future__ import annotations

import math
import shutil
import tempfile
from itertools import product
from pathlib import Path

import numpy as np

from hvdtrain.commands.verify.harness import (
    ROUNDING,
    TENSORS,
    Array,
    Facts,
    Probe,
    largest,
    samples,
)
from hvdtrain.commands.verify.hooks import watch_writes
from hvdtrain.commands.verify.rows import Row, by_rank, number, row
from hvdtrain.steps.sharding import Part, Position, Shards
from hvdtrain.system.output.text import plural, rank_list

EXACT, SINGLE = 1e-12, 1e-6  # relative; Keras stores its learning rate in float32

BASE, EPOCHS, WARMUP, MILESTONES, DECAY = 0.1, 8.0, 2.0, (4.0, 6.0), 0.5
FACTORS = {"linear": lambda size: size, "sqrt": math.sqrt, "none": lambda size: 1}
SCHEDULES = ("constant", "linear", "cosine", "multistep")
POSITIONS = (0.0, 0.5, 1.75, 2.0, 3.5, 4.0, 5.0, 7.25)  # epochs
APPLIED = (0.0, 1.0, 2.0, 5.0)  # epochs at which an update is made


def rule(scaling: str, schedule: str, position: float, size: int) -> float:
    """Return the documented learning rate at ``position``, in epochs: warm-up, then schedule."""
    peak = BASE * FACTORS[scaling](size)
    if position < WARMUP:
        start = BASE if peak > BASE else 0.0
        return start * (1 - position / WARMUP) + peak * (position / WARMUP)
    progress = (position - WARMUP) / (EPOCHS - WARMUP)
    factors = {
        "constant": 1.0,
        "linear": 1 - progress,
        "cosine": math.cos(math.pi * progress / 2) ** 2,
        "multistep": DECAY ** sum(position >= milestone for milestone in MILESTONES),
    }
    return peak * factors[schedule]


def measure_rate(probe: Probe) -> Facts:
    """Compute the rates of all scalings and schedules, and make updates at some of them."""
    settings: Facts = {"epochs": EPOCHS, "warmup_epochs": WARMUP}
    settings |= {"milestones": MILESTONES, "decay": DECAY}
    rates = {
        (scaling, schedule): probe.adapter.scale_learning_rate(
            BASE, scaling=scaling, schedule=schedule, **settings
        )
        for scaling, schedule in product(FACTORS, SCHEDULES)
    }
    returned = [float(rate(position)) for rate, position in product(rates.values(), POSITIONS)]
    requested = [float(rates["linear", "cosine"](position)) for position in APPLIED]
    return {"returned": returned, "applied": probe.framework.applied_rates(requested)}


def judge_rate(all_ranks: list[Facts]) -> Row:
    """Judge step 4: on all ranks, the rates returned and those applied follow ``rule``."""
    size = len(all_ranks)
    rates = expected_rates(size)
    applied = [rule("linear", "cosine", position, size) for position in APPLIED]
    difference = max(_max_difference(facts["returned"], rates) for facts in all_ranks)
    in_updates = max(_max_difference(facts["applied"], applied) for facts in all_ranks)
    peak = BASE * size
    index = POSITIONS.index(WARMUP)
    evidence = (
        f"max difference to the rule {number(difference)} over {len(rates)} rates on "
        f"{plural(size, 'rank')}, {number(in_updates)} in {len(applied)} updates; peak "
        f"{BASE} x {size} = {peak:g}"
    )
    if difference > EXACT:
        peaks = by_rank([round(facts["returned"][index], 6) for facts in all_ranks], ", ")
        evidence = f"after the warm-up {peaks} by rank; {evidence}"
    holds = difference <= EXACT and in_updates <= SINGLE
    return row(4, holds, evidence, difference=difference, difference_in_updates=in_updates)


def expected_rates(size: int) -> list[float]:
    """Return the rates that ``measure_rate`` should compute, in the same order."""
    settings = product(FACTORS, SCHEDULES, POSITIONS)
    return [rule(scaling, schedule, position, size) for scaling, schedule, position in settings]


def _max_difference(actual: list[float], expected: list[float]) -> float:
    """Return the largest difference relative to ``BASE``; infinite if any value is nan."""
    differences = [abs(a - b) / BASE for a, b in zip(actual, expected, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def shares(size: int) -> list[list[int]]:
    """Return the number of samples per rank in three uneven steps, with empty parts in two."""
    if size == 1:
        return [[3], [1], [2]]
    rising = [2 * rank + 1 for rank in range(size)]
    return [rising, [0, *rising[1:]], [*rising[:-1], 0]]


def measure_gradient(probe: Probe) -> Facts:
    """Make updates with the distributed optimizer, and compute the gradient of the global batch.

    At rate 1 an update subtracts the gradient applied. The gradient of the global batch is that of
    a model with the same weights that is not distributed.
    """
    plain, model = probe.framework.network(seed=1), probe.framework.network(seed=1)
    model, optimizer = probe.adapter.distribute_optimizer(model, probe.framework.sgd(model))
    shards = Shards(1, 1, on_begin=probe.adapter.begin_part)  # step 3 is verified separately
    applied, whole = [], []
    for step, counts in enumerate(shares(probe.size)):
        x, y = samples(step, sum(counts))
        begin = sum(counts[: probe.rank])
        local = np.arange(begin, begin + counts[probe.rank])
        before = probe.framework.parameters(model)
        probe.framework.set_parameters(plain, before)
        whole.append(probe.framework.gradient(plain, x, y).tolist())
        with shards.step(Part(local, sum(counts), Position(), Position())):
            probe.framework.update(model, optimizer, x[local], y[local])
        applied.append((before - probe.framework.parameters(model)).tolist())
    return {"applied": applied, "whole": whole, "tensors": TENSORS}


def judge_gradient(all_ranks: list[Facts]) -> Row:
    """Judge step 5: all ranks applied the same gradient, that of the global batch."""
    applied = np.array([facts["applied"] for facts in all_ranks])  # (ranks, steps, parameters)
    whole = np.array(all_ranks[0]["whole"])
    scale = largest(whole)
    between, to_whole = largest(applied - applied[0]), largest(applied - whole)
    holds = between <= ROUNDING * scale and to_whole <= ROUNDING * scale
    counts = ", ".join(by_rank(step, "+") for step in shares(len(all_ranks)))
    evidence = (
        f"max difference between ranks {number(between)}, to the global batch {number(to_whole)}; "
        f"{plural(len(all_ranks), 'rank')}, {all_ranks[0]['tensors']} tensors, samples {counts}"
    )
    to_root = [largest(gradients - applied[0]) for gradients in applied]
    different = [rank for rank, value in enumerate(to_root) if not value <= ROUNDING * scale]
    if different:
        evidence = f"{rank_list(different)} applied different gradients than rank 0; {evidence}"
    return row(5, holds, evidence, between_ranks=between, to_whole_batch=to_whole)


def measure_broadcast(probe: Probe) -> Facts:
    """Train the ranks on different data for some updates, then broadcast."""
    model = probe.framework.network(seed=100 + probe.rank, buffers=True)
    optimizer = probe.framework.adam(model)
    for update in range(1 + probe.rank):
        probe.framework.update(model, optimizer, *samples(100 + probe.rank, 5 + update))
    before = probe.framework.state(model, optimizer)
    try:
        probe.adapter.broadcast_state(model, optimizer)
    finally:
        after = probe.framework.state(model, optimizer)
    return {"tensors": len(after), "before": _flat(before), "after": _flat(after)}


def judge_broadcast(all_ranks: list[Facts]) -> Row:
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
    model = probe.framework.network(seed=200)
    optimizer = probe.framework.adam(model)
    probe.framework.update(model, optimizer, *samples(200, 5))
    saved = probe.framework.state(model, optimizer)
    failure = ""
    with watch_writes() as written:
        try:
            probe.adapter.save_checkpoint(directory, model, optimizer, state={"step": 1})
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    # All ranks finish writing before any of them reads the directory.
    probe.adapter.communicator.gather(b"")
    entries = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    model = probe.framework.network(seed=300)
    optimizer = probe.framework.adam(model)
    state = probe.adapter.load_checkpoint(directory, model, optimizer, origin={})
    loaded = probe.framework.state(model, optimizer)
    return {
        "failure": failure,
        "written": sum(1 for path in written if Path(path).is_relative_to(directory)),
        "entries": entries,
        "bytes": size,
        "tensors": len(saved),
        "loaded": state is not None,
        "difference": (
            max(largest(a - b) for a, b in zip(saved, loaded, strict=True))
            if [a.shape for a in saved] == [b.shape for b in loaded]
            else float(np.inf)
        ),
    }


def judge_checkpoint(all_ranks: list[Facts]) -> Row:
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
