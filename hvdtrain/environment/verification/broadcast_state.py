"""Step 6, the broadcast: ranks that start different hold rank 0's state afterwards, bit for bit."""

from __future__ import annotations

import numpy as np

from hvdtrain.environment.verification.bench import Array, Bench, Facts, largest, samples
from hvdtrain.environment.verification.rows import Row, listed, number, row, several

STEP = 6


def measure(bench: Bench) -> Facts:
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


def judge(everyone: list[Facts]) -> Row:
    """All hold what rank 0 held before, which the others did not."""
    root = np.array(everyone[0]["before"])
    before = [largest(np.array(facts["before"]) - root) for facts in everyone]
    after = [
        largest(np.array(facts["after"]) - root) if len(facts["after"]) == len(root) else np.inf
        for facts in everyone
    ]
    different = [rank for rank, value in enumerate(after) if value != 0]
    evidence = (
        f"max difference to rank 0: before {max(before):.1f}, after {number(max(after))}; "
        f"{several(len(everyone), 'rank')}, {everyone[0]['tensors']} tensors, optimizer state "
        "included"
    )
    if different:
        evidence = f"not so on {listed(different)}: {evidence}"
    return row(STEP, not different, evidence, before=max(before), after=float(max(after)))


def _flat(tensors: list[Array]) -> list[float]:
    return np.concatenate([np.ravel(tensor).astype(np.float64) for tensor in tensors]).tolist()
