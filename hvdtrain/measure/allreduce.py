"""How long an allreduce takes, by message size and by who does it, on the ranks that run this.

    mpirun -n 4 python -m hvdtrain.measure.allreduce

Rank 0 prints one JSON object:

    {"ranks": 4, "hosts": 1, "backends": {
        "mpi4py":  {"state": "ok", "rows": [ROW, ...]},
        "horovod": {"state": "ok", "rows": [...]},
        "gloo":    {"state": "error", "reason": "..."},
        "nccl":    {"state": "absent", "reason": "..."}}}

A ROW holds ``bytes`` (of the float32 message on each rank), ``repeats``, ``seconds`` (the median
over the repeats, each the slowest rank's), ``seconds_min``, ``seconds_max``, and two bandwidths in
GB/s (1e9 bytes), ``algorithm_gb_per_second`` and ``bus_gb_per_second``: see ``bandwidths``.
``horovod`` is Horovod with PyTorch, as the trainers use it: its ``HOROVOD_CYCLE_TIME`` is part of
the latency.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

from hvdtrain.launch.detect import detect
from hvdtrain.launch.tuning import runtime_variables, set_defaults
from hvdtrain.measure.backends import BACKENDS, Backend, missing

SIZES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)  # bytes
SECONDS = 0.3  # for each size and backend
FEWEST, MOST = 5, 200  # repeats
WARM_UP = 2
ELEMENT = 4  # bytes of a float32


def bandwidths(size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Algorithm and bus bandwidth in GB/s of an allreduce of ``size`` bytes.

    Algorithm bandwidth is size / time. Whatever the algorithm, each rank has to send and receive
    2 (n - 1) / n times the message, so the algorithm bandwidth times that factor compares to the
    speed of the links at any number of ranks.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md ("AllReduce").
    """
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * 2 * (ranks - 1) / ranks


def repeats_for(seconds: float, budget: float) -> int:
    """How often to repeat what takes ``seconds`` once."""
    return max(FEWEST, min(MOST, int(budget / seconds) if seconds > 0 else MOST))


def measure(world: Any, name: str, sizes: Sequence[int], budget: float) -> dict[str, Any]:
    """Measure one backend; all ranks together, and where one cannot, none does.

    Args:
        world: mpi4py's communicator.
        name: of the backend.
        sizes: bytes.
        budget: seconds for each size.
    """
    reason = _first(world, missing(name))
    if reason:
        return {"state": "absent", "reason": reason}
    backend, reason = None, ""
    try:
        backend = BACKENDS[name](world)
    except Exception as error:  # each library has errors of its own
        reason = " ".join(str(error).split()) or repr(error)
    reason = _first(world, reason)
    if reason or backend is None:
        return {"state": "error", "reason": reason}
    wrong = _first(world, _wrong_sum(backend, world))
    rows = [] if wrong else [_row(world, backend, size, budget) for size in sizes]
    backend.close()
    return {"state": "error", "reason": wrong} if wrong else {"state": "ok", "rows": rows}


def _first(world: Any, reason: str) -> str:
    """The first reason that a rank has, on all ranks; its rank is named unless all say the same."""
    told = world.allgather(reason)
    if len(set(told)) == 1:
        return reason
    return next((f"rank {rank}: {text}" for rank, text in enumerate(told) if text), "")


def _wrong_sum(backend: Backend, world: Any) -> str:
    """Whether rank + 1, summed over n ranks, is not n (n + 1) / 2: then no time counts."""
    vector, expected = backend.vector(1000, world.rank + 1.0), world.size * (world.size + 1) / 2
    backend.reduce(vector)
    got = sorted(set(vector.tolist()))
    return "" if got == [expected] else f"the sum is {got[:3]}, not {expected}"


def _row(world: Any, backend: Backend, size: int, budget: float) -> dict[str, Any]:
    vector = backend.vector(size // ELEMENT, 0.0)
    for _ in range(WARM_UP):
        backend.reduce(vector)
    estimate = _once(backend, vector)
    repeats = world.bcast(repeats_for(estimate, budget))
    world.barrier()
    mine = [_once(backend, vector) for _ in range(repeats)]
    slowest = [max(times) for times in zip(*world.allgather(mine), strict=True)]
    median = statistics.median(slowest)
    algorithm, bus = bandwidths(size, median, world.size)
    return {
        "bytes": size,
        "repeats": repeats,
        "seconds": median,
        "seconds_min": min(slowest),
        "seconds_max": max(slowest),
        "algorithm_gb_per_second": algorithm,
        "bus_gb_per_second": bus,
    }


def _once(backend: Backend, vector: Any) -> float:
    start = time.perf_counter()
    backend.reduce(vector)
    return time.perf_counter() - start


def main(arguments: Sequence[str]) -> int:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description="Time allreduce on these ranks; JSON on rank 0.")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="separated by commas")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, likewise")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each of them")
    options = parser.parse_args(arguments)
    set_defaults(runtime_variables(detect(os.environ), short_steps=False))
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    hosts = len(set(world.allgather(socket.gethostname())))
    sizes = [int(size) for size in options.sizes.split(",")]
    report = {
        "ranks": world.size,
        "hosts": hosts,
        "backends": {
            name: measure(world, name, sizes, options.seconds)
            for name in options.backends.split(",")
        },
    }
    if world.rank == 0:
        sys.stdout.write(json.dumps(report) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
