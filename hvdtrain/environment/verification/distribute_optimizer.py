"""Step 5, gradients: equal on all ranks after the reduction, and those of the global batch."""

from __future__ import annotations

import numpy as np

from hvdtrain.environment.verification.bench import (
    ROUNDING,
    TENSORS,
    Bench,
    Facts,
    largest,
    samples,
)
from hvdtrain.environment.verification.rows import Row, by_rank, listed, number, row, several
from hvdtrain.steps.sharding import Part, Position, Shards

STEP = 5


def shares(size: int) -> list[list[int]]:
    """Samples of each rank in three steps: uneven, none on the first rank, none on the last."""
    if size == 1:
        return [[3], [1], [2]]
    rising = [2 * rank + 1 for rank in range(size)]
    return [rising, [0, *rising[1:]], [*rising[:-1], 0]]


def measure(bench: Bench) -> Facts:
    """Make updates with the distributed optimizer, and compute one rank's gradient by hand.

    At rate 1 an update takes away the gradient that was applied; each starts from equal weights.
    """
    model = bench.kit.network(seed=1)
    start = bench.kit.parameters(model)
    model, optimizer = bench.adapter.distribute_optimizer(model, bench.kit.sgd(model))
    shards = Shards(1, 1, on_begin=bench.adapter.begin_part)  # step 3 has a row of its own
    applied, whole = [], []
    for step, counts in enumerate(shares(bench.size)):
        x, y = samples(step, sum(counts))
        low = sum(counts[: bench.rank])
        mine = np.arange(low, low + counts[bench.rank])
        bench.kit.set_parameters(model, start)
        whole.append(bench.kit.gradient(model, x, y).tolist())
        with shards.step(Part(mine, sum(counts), Position(), Position())):
            bench.kit.update(model, optimizer, x[mine], y[mine])
        applied.append((start - bench.kit.parameters(model)).tolist())
    return {"applied": applied, "whole": whole, "tensors": TENSORS}


def judge(everyone: list[Facts]) -> Row:
    """What the ranks applied against each other, and against the gradient of the global batch."""
    applied = np.array([facts["applied"] for facts in everyone])  # (ranks, steps, parameters)
    whole = np.array(everyone[0]["whole"])
    scale = largest(whole)
    between, to_whole = largest(applied - applied[0]), largest(applied - whole)
    holds = between <= ROUNDING * scale and to_whole <= ROUNDING * scale
    counts = ", ".join(by_rank(step, "+") for step in shares(len(everyone)))
    evidence = (
        f"max difference between ranks {number(between)}, to one rank's {number(to_whole)}; "
        f"{several(len(everyone), 'rank')}, {everyone[0]['tensors']} tensors, samples {counts}"
    )
    different = [
        rank
        for rank, gradients in enumerate(applied)
        if not largest(gradients - applied[0]) <= ROUNDING * scale
    ]
    if different:
        evidence = f"{listed(different)} applied other gradients than rank 0; {evidence}"
    return row(STEP, holds, evidence, between_ranks=between, to_whole_batch=to_whole)
