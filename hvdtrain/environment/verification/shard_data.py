"""Step 3, shards: over all ranks every sample exactly once an epoch, in equally many steps."""

from __future__ import annotations

from collections import Counter

from hvdtrain.environment.verification.bench import Bench, Facts
from hvdtrain.environment.verification.rows import Row, row, several

STEP = 3
EPOCHS = 2


def measure(bench: Bench) -> Facts:
    """Draw two epochs of a dataset that neither the batch nor the ranks divide."""
    size = bench.size
    batch = 3 * size + 1
    samples = 2 * batch + max(1, size - 1)  # the last step leaves a rank without any
    shards = bench.adapter.shard_data(samples, global_batch=batch, seed=7)
    epochs, told = [], True
    for epoch in range(EPOCHS):
        steps = []
        for part in shards.epoch(epoch):
            steps.append(part.indices.tolist())
            told = told and bench.adapter.current_part is part
        epochs.append(steps)
    return {"samples": samples, "epochs": epochs, "told": told}


def judge(everyone: list[Facts]) -> Row:
    """Count how often each sample was drawn."""
    samples, size = everyone[0]["samples"], len(everyone)
    wrong = []
    for epoch in range(EPOCHS):
        drawn = [facts["epochs"][epoch] for facts in everyone]
        counts = Counter(index for steps in drawn for part in steps for index in part)
        twice = sum(1 for count in counts.values() if count > 1)
        missing = sum(1 for index in range(samples) if index not in counts)
        foreign = len(counts) + missing - samples
        if twice or missing or foreign:
            wrong.append(
                f"epoch {epoch}: {missing} of {several(samples, 'sample')} on no rank, {twice} "
                f"more than once, {foreign} that do not exist"
            )
        if len({len(steps) for steps in drawn}) > 1:
            wrong.append(f"steps by rank: {', '.join(str(len(steps)) for steps in drawn)}")
    if not all(facts["told"] for facts in everyone):
        wrong.append("the adapter is not told which part is in hand, so it cannot weigh it")
    parts = [len(part) for facts in everyone for steps in facts["epochs"] for part in steps]
    evidence = "; ".join(wrong) or (
        f"each of {several(samples, 'sample')} once in each of {EPOCHS} epochs; "
        f"{several(size, 'rank')}, {len(everyone[0]['epochs'][0])} steps, parts of {min(parts)} to "
        f"{max(parts)}"
    )
    return row(STEP, not wrong, evidence, samples=samples, ranks=size)
