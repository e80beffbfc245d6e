"""``mpirun -n 4 python -m hvdtrain.pi``: estimate pi by Monte Carlo, as a first MPI program.

Points are uniform in the unit square; the expected fraction inside the quarter circle is pi/4.
Each rank draws its part of the points from an independent stream; one Allreduce sums the hits.
"""

from __future__ import annotations

import json
import logging
import math
import random
import sys
import time
from dataclasses import dataclass
from typing import Any

from hvdtrain.system.runtime import terminal

if __name__ == "__main__" and not {"-h", "--help"} & set(sys.argv):
    terminal.begin("pi")

import numpy as np

from hvdtrain.config.command_line import Parser
from hvdtrain.config.declare import add_options, from_namespace, option, switch
from hvdtrain.config.values import count, positive
from hvdtrain.steps.sharding import bounds
from hvdtrain.system.machine import mpi_library
from hvdtrain.system.output.text import about, percent, plural
from hvdtrain.system.runtime.exit import run_and_exit
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

log = logging.getLogger(__name__)

BLOCK = 32_768  # points per block: their coordinates stay in the second-level cache
PIECE = 1024 * BLOCK  # points between two progress updates: a tenth of a second
NAIVE_PIECE = 2**18  # the same for the scalar loop
MAX_POINTS = 2**63 - 1  # points; their sum is an int64
SIDE = 2**16  # points are centers of SIDE x SIDE cells

EXAMPLE = """\
examples:
  mpirun -n 2 python -m hvdtrain.pi --samples 5e9 --seed 7
  python -m hvdtrain.pi --naive --samples 5e6
"""


@dataclass(frozen=True)
class PiEstimate:
    """The result, the same on all ranks."""

    hits: int  # number of points inside the quarter circle, over all ranks
    samples: int  # number of points, over all ranks

    @property
    def pi(self) -> float:
        """Return the estimate, 4 hits / samples."""
        return 4 * self.hits / self.samples

    @property
    def error(self) -> float:
        """Return the standard error, 4 sqrt(p (1 - p) / n): hits are binomial."""
        share = self.hits / self.samples
        return 4 * math.sqrt(share * (1 - share) / self.samples)


def count_hits(samples: int, stream: np.random.SeedSequence) -> int:
    """Draw ``samples`` points and count the hits; the same stream gives the same count.

    A random number of 64 bits gives two points of two 16-bit coordinates. The point in cell (k, l)
    is a hit if (k + 1/2)^2 + (l + 1/2)^2 < 2^32, that is k (k + 1) + l (l + 1) < 2^32 - 1/2: the
    sum does not overflow 32 bits. The grid makes pi 4.7e-8 too large (a test counts the cells), a
    five-hundredth of the standard error of 5e9 points.
    """
    draw = np.random.SFC64(stream).random_raw
    squares = np.empty(2 * BLOCK, np.uint32)
    next_up = np.empty(2 * BLOCK, np.uint32)
    inside = np.empty(BLOCK, np.bool_)
    x, y, total = squares[:BLOCK], squares[BLOCK:], next_up[:BLOCK]
    hits, began = 0, time.monotonic()
    for start in range(0, samples, BLOCK):
        if start % PIECE == 0:
            _show(start, samples, began)
        np.copyto(squares, draw(BLOCK // 2).view(np.uint16))
        np.add(squares, 1, out=next_up)
        np.multiply(squares, next_up, out=squares)
        np.add(x, y, out=total)
        np.greater_equal(total, x, out=inside)
        hits += int(np.count_nonzero(inside[: samples - start]))
    return hits


def count_hits_naive(samples: int, stream: np.random.SeedSequence) -> int:
    """Count hits in a plain loop over scalars, for comparison."""
    draw = random.Random(int(stream.generate_state(1, np.uint64)[0])).random
    hits, began = 0, time.monotonic()
    for start in range(0, samples, NAIVE_PIECE):
        _show(start, samples, began)
        for _ in range(min(NAIVE_PIECE, samples - start)):
            x, y = draw(), draw()
            if x * x + y * y < 1.0:
                hits += 1
    return hits


def _show(done: int, samples: int, began: float) -> None:
    """Show the progress of this rank since ``began`` if standard error is a terminal."""
    if done:
        left = (time.monotonic() - began) * (samples - done) / done
        terminal.status(f"{percent(done / samples)} of the samples, {about(left)} to go")


def estimate(communicator: Any, samples: int, seed: int, *, naive: bool = False) -> PiEstimate:
    """Estimate pi on all ranks of an mpi4py communicator together; all return the same result.

    The seed and the number of ranks determine every digit.
    """
    rank, size = communicator.Get_rank(), communicator.Get_size()
    low, high = bounds(samples, rank, size)
    # Spawned seeds give independent streams (NumPy: parallel random number generation).
    stream = np.random.SeedSequence(seed).spawn(size)[rank]
    hits = (count_hits_naive if naive else count_hits)(high - low, stream)
    total = np.empty(1, np.int64)
    communicator.Allreduce(np.array([hits], np.int64), total)
    return PiEstimate(int(total[0]), samples)


def points(value: str) -> int:
    """Read a number of samples."""
    number = positive(value)
    if number > MAX_POINTS:
        raise ValueError(f"{value} is larger than 2^63 - 1, the most that the ranks can add up")
    return number


@dataclass(frozen=True)
class PiOptions:
    """The options of the program."""

    samples: int = option(
        10**9, "number of points over all ranks (default: 1e9)", points, metavar="SAMPLES"
    )
    seed: int = option(0, "random seed", count, metavar="SEED")
    naive: bool = switch("use a scalar loop, for comparison")
    json: bool = switch("print the result as JSON")


def build_parser() -> Parser:
    """Return the parser of the command line."""
    purpose = "Estimate pi with random points, on all ranks of an MPI job."
    parser = Parser(prog="python -m hvdtrain.pi", description=purpose, epilog=EXAMPLE)
    add_options(parser, PiOptions)
    return parser


def main() -> int:
    """Estimate pi, print it on rank 0, and return the exit code."""
    options = from_namespace(PiOptions, build_parser().read(sys.argv[1:]))
    set_defaults(MPI_VARIABLES)
    with mpi_library.required():
        from mpi4py import MPI
    world = MPI.COMM_WORLD
    terminal.status("drawing points")
    world.Barrier()
    started = time.perf_counter()
    result = estimate(world, options.samples, options.seed, naive=options.naive)
    seconds = time.perf_counter() - started
    terminal.clear()
    if world.Get_rank() == 0:
        sys.stdout.write(report(result, seconds, world.Get_size(), as_json=options.json))
    return 0


def report(result: PiEstimate, seconds: float, ranks: int, *, as_json: bool) -> str:
    """Return the result as text or as one line of JSON."""
    rate = result.samples / seconds
    if as_json:
        values = {
            "pi": result.pi,
            "standard_error": result.error,
            "samples": result.samples,
            "ranks": ranks,
            "seconds": seconds,
            "samples_per_second": rate,
        }
        return json.dumps(values) + "\n"
    digits = max(2, math.ceil(-math.log10(result.error)) + 1) if result.error else 2
    return (
        f"pi = {result.pi:.{digits}f} ± {result.error:.{digits}f}  "
        f"(off by {result.pi - math.pi:+.{digits}f})\n"
        f"{result.samples:,} samples on {plural(ranks, 'rank')} "
        f"in {seconds:.2f} s: {rate / 1e6:,.1f} million samples/s\n"
    )


if __name__ == "__main__":
    run_and_exit(main)
