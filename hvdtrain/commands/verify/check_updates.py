"""Check what the ranks train: learning rate (4), gradients (5), broadcast (6), checkpoint (7)."""

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
    Bench,
    Facts,
    largest,
    samples,
)
from hvdtrain.commands.verify.hooks import watch_writes
from hvdtrain.commands.verify.rows import Row, by_rank, number, row
from hvdtrain.steps.sharding import Part, Position, Shards
from hvdtrain.system.output.text import plural, rank_list

EXACT, SINGLE = 1e-12, 1e-6  # relative; Keras keeps its learning rate in float32


BASE, EPOCHS, WARMUP, MILESTONES, DECAY = 0.1, 8.0, 2.0, (4.0, 6.0), 0.5
FACTORS = {"linear": lambda size: size, "sqrt": math.sqrt, "none": lambda size: 1}
SCHEDULES = ("constant", "linear", "cosine", "multistep")
PLACES = (0.0, 0.5, 1.75, 2.0, 3.5, 4.0, 5.0, 7.25)  # epochs
APPLIED = (0.0, 1.0, 2.0, 5.0)  # where an update is really made


def rule(scaling: str, schedule: str, place: float, size: int) -> float:
    """Return the learning rate of the documentation: climb from one rank's, then the schedule."""
    peak = BASE * FACTORS[scaling](size)
    if place < WARMUP:
        foot = BASE if peak > BASE else 0.0
        return foot * (1 - place / WARMUP) + peak * (place / WARMUP)
    done = (place - WARMUP) / (EPOCHS - WARMUP)
    left = {
        "constant": 1.0,
        "linear": 1 - done,
        "cosine": math.cos(math.pi * done / 2) ** 2,
        "multistep": DECAY ** sum(place >= milestone for milestone in MILESTONES),
    }
    return peak * left[schedule]


def measure_rate(bench: Bench) -> Facts:
    """Ask for rates of every kind, and make updates at some of them."""
    given: Facts = {"epochs": EPOCHS, "warmup_epochs": WARMUP}
    given |= {"milestones": MILESTONES, "decay": DECAY}
    rates = {
        (scaling, schedule): bench.adapter.scale_learning_rate(
            BASE, scaling=scaling, schedule=schedule, **given
        )
        for scaling, schedule in product(FACTORS, SCHEDULES)
    }
    told = [rate(place) for rate, place in product(rates.values(), PLACES)]
    wanted = [float(rates["linear", "cosine"](place)) for place in APPLIED]
    return {"told": [float(rate) for rate in told], "applied": bench.kit.applied_rates(wanted)}


def judge_rate(everyone: list[Facts]) -> Row:
    """Judge step 4: all ranks' rates are the rule's, worked out anew, and so are the updates'."""
    size = len(everyone)
    told = expected_rates(size)
    applied = [rule("linear", "cosine", place, size) for place in APPLIED]
    off = max(_off(facts["told"], told) for facts in everyone)
    off_applied = max(_off(facts["applied"], applied) for facts in everyone)
    peak = BASE * size
    place = PLACES.index(WARMUP)
    evidence = (
        f"max difference to the rule {number(off)} over {len(told)} rates on "
        f"{plural(size, 'rank')}, {number(off_applied)} in {len(applied)} updates; peak "
        f"{BASE} x {size} = {peak:g}"
    )
    if off > EXACT:
        peaks = by_rank([round(facts["told"][place], 6) for facts in everyone], ", ")
        evidence = f"after the warm-up {peaks} by rank; {evidence}"
    holds = off <= EXACT and off_applied <= SINGLE
    return row(4, holds, evidence, difference=off, difference_in_updates=off_applied)


def expected_rates(size: int) -> list[float]:
    """Return the rates of all kinds and places that ``measure_rate`` asks for."""
    kinds = product(FACTORS, SCHEDULES, PLACES)
    return [rule(scaling, schedule, place, size) for scaling, schedule, place in kinds]


def _off(found: list[float], expected: list[float]) -> float:
    """Return the largest difference relative to ``BASE``; infinite where there is a nan."""
    differences = [abs(a - b) / BASE for a, b in zip(found, expected, strict=True)]
    return math.inf if any(map(math.isnan, differences)) else max(differences)


def shares(size: int) -> list[list[int]]:
    """Return the samples per rank in three steps: uneven, none on the first, none on the last."""
    if size == 1:
        return [[3], [1], [2]]
    rising = [2 * rank + 1 for rank in range(size)]
    return [rising, [0, *rising[1:]], [*rising[:-1], 0]]


def measure_gradient(bench: Bench) -> Facts:
    """Make updates with the distributed optimizer, and compute one rank's gradient by hand.

    At rate 1 an update takes away the gradient that was applied. By hand it is computed on a model
    of the same weights that is not distributed.
    """
    plain, model = bench.kit.network(seed=1), bench.kit.network(seed=1)
    model, optimizer = bench.adapter.distribute_optimizer(model, bench.kit.sgd(model))
    shards = Shards(1, 1, on_begin=bench.adapter.begin_part)  # step 3 has a row of its own
    applied, whole = [], []
    for step, counts in enumerate(shares(bench.size)):
        x, y = samples(step, sum(counts))
        low = sum(counts[: bench.rank])
        mine = np.arange(low, low + counts[bench.rank])
        before = bench.kit.parameters(model)
        bench.kit.set_parameters(plain, before)
        whole.append(bench.kit.gradient(plain, x, y).tolist())
        with shards.step(Part(mine, sum(counts), Position(), Position())):
            bench.kit.update(model, optimizer, x[mine], y[mine])
        applied.append((before - bench.kit.parameters(model)).tolist())
    return {"applied": applied, "whole": whole, "tensors": TENSORS}


def judge_gradient(everyone: list[Facts]) -> Row:
    """Judge step 5: all ranks applied the same, the gradient of the global batch."""
    applied = np.array([facts["applied"] for facts in everyone])  # (ranks, steps, parameters)
    whole = np.array(everyone[0]["whole"])
    scale = largest(whole)
    between, to_whole = largest(applied - applied[0]), largest(applied - whole)
    holds = between <= ROUNDING * scale and to_whole <= ROUNDING * scale
    counts = ", ".join(by_rank(step, "+") for step in shares(len(everyone)))
    evidence = (
        f"max difference between ranks {number(between)}, to one rank's {number(to_whole)}; "
        f"{plural(len(everyone), 'rank')}, {everyone[0]['tensors']} tensors, samples {counts}"
    )
    off = [largest(gradients - applied[0]) for gradients in applied]
    different = [rank for rank, value in enumerate(off) if not value <= ROUNDING * scale]
    if different:
        evidence = f"{rank_list(different)} applied other gradients than rank 0; {evidence}"
    return row(5, holds, evidence, between_ranks=between, to_whole_batch=to_whole)


def measure_broadcast(bench: Bench) -> Facts:
    """Let every rank go its own way for some updates, then broadcast."""
    model = bench.kit.network(seed=100 + bench.rank, buffers=True)
    optimizer = bench.kit.adam(model)
    for update in range(1 + bench.rank):
        bench.kit.update(model, optimizer, *samples(100 + bench.rank, 5 + update))
    before = bench.kit.state(model, optimizer)
    try:
        bench.adapter.broadcast_state(model, optimizer)
    finally:
        after = bench.kit.state(model, optimizer)
    return {"tensors": len(after), "before": _flat(before), "after": _flat(after)}


def judge_broadcast(everyone: list[Facts]) -> Row:
    """Judge step 6: all hold what rank 0 held before, bit for bit, which the others did not."""
    root = np.array(everyone[0]["before"])
    before = [largest(np.array(facts["before"]) - root) for facts in everyone]
    after = [
        largest(np.array(facts["after"]) - root) if len(facts["after"]) == len(root) else np.inf
        for facts in everyone
    ]
    different = [rank for rank, value in enumerate(after) if value != 0]
    evidence = (
        f"max difference to rank 0: before {max(before):.1f}, after {number(max(after))}; "
        f"{plural(len(everyone), 'rank')}, {everyone[0]['tensors']} tensors, optimizer state "
        "included"
    )
    if different:
        evidence = f"not so on {rank_list(different)}: {evidence}"
    return row(6, not different, evidence, before=max(before), after=float(max(after)))


def _flat(tensors: list[Array]) -> list[float]:
    return [float(value) for tensor in tensors for value in np.ravel(tensor)]


def measure_checkpoint(bench: Bench) -> Facts:
    """Save, see who wrote what, and load into a network with other weights."""
    exchange = bench.adapter.communicator
    made = tempfile.mkdtemp(prefix="hvdtrain-verify-") if bench.rank == 0 else ""
    directory = Path(exchange.gather(made.encode())[0].decode())
    try:
        return _save_and_load(bench, directory)
    finally:
        exchange.gather(b"")  # nobody reads or writes there any more
        shutil.rmtree(directory, ignore_errors=True)


def _save_and_load(bench: Bench, directory: Path) -> Facts:
    model = bench.kit.network(seed=200)
    optimizer = bench.kit.adam(model)
    bench.kit.update(model, optimizer, *samples(200, 5))
    kept = bench.kit.state(model, optimizer)
    failure = ""
    with watch_writes() as written:
        try:
            bench.adapter.save_checkpoint(directory, model, optimizer, state={"step": 1})
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
    # Every rank has written what it will before one looks at it.
    bench.adapter.communicator.gather(b"")
    found = sorted(entry.name for entry in directory.iterdir()) if directory.is_dir() else []
    size = sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())
    other = bench.kit.network(seed=300)
    fresh = bench.kit.adam(other)
    state = bench.adapter.load_checkpoint(directory, other, fresh, origin={})
    read = bench.kit.state(other, fresh)
    return {
        "failure": failure,
        "written": sum(1 for path in written if Path(path).is_relative_to(directory)),
        "found": found,
        "bytes": size,
        "tensors": len(kept),
        "loaded": state is not None,
        "difference": (
            max(largest(a - b) for a, b in zip(kept, read, strict=True))
            if [a.shape for a in kept] == [b.shape for b in read]
            else float(np.inf)
        ),
    }


def judge_checkpoint(everyone: list[Facts]) -> Row:
    """Judge step 7: one checkpoint, whole, written by one rank; what was read was saved."""
    root = everyone[0]
    writers = [rank for rank, facts in enumerate(everyone) if facts["written"]]
    wrong = []
    if len(writers) != 1:
        wrong.append(f"{rank_list(writers)} wrote" if writers else "no rank wrote")
    if len(root["found"]) != 1:
        wrong.append(f"{', '.join(root['found']) or 'nothing'} where one checkpoint was due")
    failed = [rank for rank, facts in enumerate(everyone) if facts["failure"]]
    wrong += [f"rank {rank}: {everyone[rank]['failure']}" for rank in failed[:1]]
    if not root["loaded"]:
        wrong.append("no checkpoint could be read")
    elif root["difference"] != 0:
        wrong.append(f"read back with a difference of {number(root['difference'])}")
    evidence = "; ".join(wrong) or (
        f"rank {writers[0]} of {len(everyone)} wrote "
        f"{plural(everyone[writers[0]]['written'], 'file')}, {root['bytes']:,} bytes; read back: "
        f"max difference {number(root['difference'])}, {root['tensors']} tensors"
    )
    return row(7, not wrong, evidence, writers=writers, found=root["found"])
