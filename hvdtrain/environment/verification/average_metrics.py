"""Step 8, metrics: over uneven shards they equal those over the whole set."""

from __future__ import annotations

import math

from hvdtrain.environment.verification.bench import Bench, Facts
from hvdtrain.environment.verification.rows import Row, by_rank, number, row, several
from hvdtrain.steps.sharding import evaluation_parts

STEP = 8
EXACT = 1e-12  # relative


def loss_of(sample: int) -> float:
    """A value that no rank's average shares with another's."""
    return (sample + 0.5) ** 2 / 7


def is_correct(sample: int) -> int:
    """One sample in three."""
    return int(sample % 3 == 0)


def slices(size: int) -> list[list[int]]:
    """By hand, the last sample of each rank's slice plus one: the first rank has none."""
    ends = [2 * rank if size > 1 else 5 for rank in range(size)]
    return [list(range(sum(ends[:rank]), sum(ends[: rank + 1]))) for rank in range(size)]


def measure(bench: Bench) -> Facts:
    """Average over an evaluation set as the trainer cuts it, and over one with an empty slice."""
    total = 3 * bench.size + 1
    cut = [int(i) for p in evaluation_parts(total, 2, bench.rank, bench.size) for i in p]
    rounds = []
    for mine in (cut, slices(bench.size)[bench.rank]):
        means, count = bench.adapter.average_metrics(
            len(mine),
            loss=math.fsum(map(loss_of, mine)),
            accuracy=sum(map(is_correct, mine)),
        )
        told = {name: float(value) for name, value in means.items()}
        rounds.append({**told, "count": count, "mine": len(mine)})
    return {"rounds": rounds}


def judge(everyone: list[Facts]) -> Row:
    """Every rank has the means over all samples, and their number."""
    size = len(everyone)
    totals = (3 * size + 1, sum(map(len, slices(size))))
    off, wrong = 0.0, []
    for number_of, total in enumerate(totals):
        loss = math.fsum(map(loss_of, range(total))) / total
        accuracy = sum(map(is_correct, range(total))) / total
        for rank, facts in enumerate(everyone):
            found = facts["rounds"][number_of]
            difference = max(abs(found["loss"] / loss - 1), abs(found["accuracy"] - accuracy))
            off = max(off, math.inf if math.isnan(difference) else difference)
            if not difference <= EXACT:
                wrong.append(f"rank {rank}: loss {found['loss']:.6g}, not {loss:.6g}")
            elif found["count"] != total:
                wrong.append(f"rank {rank}: over {found['count']} samples, not {total}")
    cuts = ", ".join(
        by_rank([facts["rounds"][number_of]["mine"] for facts in everyone], "+")
        for number_of in range(len(totals))
    )
    evidence = (
        f"max difference to the whole set {number(off)}; {several(size, 'rank')}, "
        f"{totals[0]} and {totals[1]} samples ({cuts})"
    )
    if wrong:
        evidence = f"{wrong[0]}; {evidence}"
    return row(STEP, not wrong, evidence, difference=off, samples=list(totals))
