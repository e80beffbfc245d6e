"""Run on every rank by test_collectives.py: allreduce algorithms against closed forms."""

from __future__ import annotations

import numpy as np

from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

set_defaults(MPI_VARIABLES)

from hvdtrain.collectives.mpi4py import Mpi4py  # noqa: E402
from hvdtrain.commands.collectives import algorithms, study  # noqa: E402

ranks = Mpi4py()
everyone = ranks.world
LENGTHS = (0, 1, 2, 3, 4, 5, 7, 16, 1001)


def check(world: object, size: int, rank: int, run: algorithms.Algorithm) -> None:
    for length in LENGTHS:
        data = np.arange(length, dtype=np.float64) * (rank + 1) + rank
        run(world, data)
        expected = np.arange(length) * (size * (size + 1) / 2) + size * (size - 1) / 2
        assert data.tolist() == expected.tolist(), (length, data, expected)
    # Rounded sums: not exact, but the same bits on all ranks.
    noise = np.random.default_rng(rank).standard_normal(1001).astype(np.float32)
    run(world, noise)
    assert len(set(world.allgather(noise.tobytes()))) == 1


for size in range(1, everyone.size + 1):
    world = everyone.Split(int(ranks.rank < size), ranks.rank)
    if ranks.rank >= size:
        continue
    for run in (algorithms.ring, algorithms.recursive_doubling, algorithms.rabenseifner):
        check(world, size, world.rank, run)
    for host in (0, world.rank, world.rank // 2, world.rank % 2, int(world.rank > 0)):
        check(world, size, world.rank, algorithms.Hierarchical(world, host))

# What Open MPI is told to do shows in the order of summation: 1e8 swallows a 1 in float32.
everyone = everyone.Split(int(ranks.rank < 4), ranks.rank)
if ranks.rank < 4:
    parts = np.array([1, 1e8, 1, -1e8], np.float32)
    sums = {}
    for number in study.OPEN_MPI_ALGORITHMS:
        data = np.full(64, parts[everyone.rank], np.float32)
        study.with_algorithm(everyone, number).Allreduce(study.MPI.IN_PLACE, data)
        sums[number] = set(data.tolist())
    a, b, c, d = parts
    assert sums[1] == {float(((d + c) + b) + a)} == {1.0}, sums
    assert sums[3] == {float((a + b) + (c + d))} == {0.0}, sums
    assert len(sums[4]) > 1, "in a ring each part begins at another rank"
print(f"rank {ranks.rank} is right")
