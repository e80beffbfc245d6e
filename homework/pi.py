"""Pi from random points: the first MPI program. Throw darts at a square, count those in the circle.

mpirun -n 4 python pi.py --samples 1e9 --seed 7

A scalar loop does some millions of darts a second and rank. Here NumPy throws a block of them at
once. Each block has its own stream of random numbers, so that the darts, and every digit of the
answer, are the same on any number of ranks; the ranks deal the blocks out among them.
"""

import argparse
import math
import time

import numpy as np
from mpi4py import MPI

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
option = parser.add_argument
option("--samples", type=float, default=1e8, help="darts over all ranks, 5e9 for one")
option("--seed", type=int, default=0)
args = parser.parse_args()
samples = int(args.samples)
if samples < 1:
    parser.error("--samples: at least 1")

world = MPI.COMM_WORLD
BLOCK = 2**16  # both coordinates, 1 MiB, stay in a core's cache
blocks = math.ceil(samples / BLOCK)

world.Barrier()
started = time.perf_counter()
hits = 0
for block in range(world.rank, blocks, world.size):
    stream = np.random.SeedSequence(args.seed, spawn_key=(block,))
    x, y = np.random.Generator(np.random.SFC64(stream)).random((2, BLOCK))
    inside = x * x + y * y < 1
    hits += np.count_nonzero(inside[: samples - block * BLOCK])  # the last block is cut

total = np.zeros(1, np.int64)
world.Allreduce(np.array([hits], np.int64), total)  # the sum of the hits, on every rank
seconds = time.perf_counter() - started

# Each dart hits with probability p = pi/4, so the hits are binomial with variance n p (1 - p).
share = total[0] / samples
pi = 4 * share
error = 4 * math.sqrt(share * (1 - share) / samples)
if world.rank == 0:
    print(f"pi = {pi:.8f} +- {error:.8f}, off by {pi - math.pi:+.8f}")
    print(f"{samples:,} darts, {world.size} rank(s), {seconds:.2f} s: {samples / seconds:.3g}/s")
