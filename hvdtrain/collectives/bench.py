"""How long an allreduce takes, by message size and by library, on the ranks that run this.

    mpirun -n 4 python -m hvdtrain.collectives.bench

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
import socket
import statistics
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from hvdtrain.collectives.base import Communicator
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.system.runtime.tuning import set_defaults

SIZES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)  # bytes
SECONDS = 0.3  # for each size and backend
FEWEST, MOST = 5, 200  # repeats
WARM_UP = 2
ELEMENT = 4  # bytes of a float32
RENDEZVOUS = timedelta(seconds=15)  # for torch.distributed to find its ranks
BACKENDS = ("mpi4py", "horovod", "gloo", "nccl")


def missing(name: str) -> str:
    """Return why back end ``name`` cannot be measured here at all; empty where it can."""
    if name == "mpi4py":
        return ""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch is not there: {error}"
    if name == "horovod":
        try:
            import horovod.torch  # noqa: F401
        except ImportError as error:
            return f"Horovod for PyTorch is not there: {error}"
    if name == "gloo" and not torch.distributed.is_gloo_available():
        return "this PyTorch has no Gloo"
    if name == "nccl" and not (torch.cuda.device_count() and torch.distributed.is_nccl_available()):
        return "no GPU, or no NCCL in this PyTorch"
    return ""


def start(name: str, mpi: Communicator) -> Communicator:
    """Start back end ``name``; all ranks together.

    Raises:
        Exception: of the library's own: it does not start, or connects other ranks than MPI.
    """
    if name == "mpi4py":
        return mpi
    started: Communicator
    if name == "horovod":
        from hvdtrain.collectives.horovod_torch import HorovodTorch

        started = HorovodTorch()
    else:
        from hvdtrain.collectives.torch_distributed import TorchDistributed

        started = TorchDistributed(gpu=name == "nccl", timeout=RENDEZVOUS)
    if started.size != mpi.size:
        raise RuntimeError(f"its world is {started.size}, MPI's is {mpi.size}")
    return started


def bandwidths(size: int, seconds: float, ranks: int) -> tuple[float, float]:
    """Return algorithm and bus bandwidth in GB/s of an allreduce of ``size`` bytes.

    Algorithm bandwidth is size / time. Whatever the algorithm, each rank has to send and receive
    2 (n - 1) / n times the message, so the algorithm bandwidth times that factor compares to the
    speed of the links at any number of ranks.

    Source: NVIDIA nccl-tests, doc/PERFORMANCE.md ("AllReduce").
    """
    algorithm = size / seconds / 1e9
    return algorithm, algorithm * 2 * (ranks - 1) / ranks


def repeats_for(seconds: float, budget: float) -> int:
    """Return how often to repeat what takes ``seconds`` once."""
    return max(FEWEST, min(MOST, int(budget / seconds) if seconds > 0 else MOST))


def measure(mpi: Communicator, name: str, sizes: Sequence[int], budget: float) -> dict[str, Any]:
    """Measure one back end; all ranks together, and where one cannot, none does.

    Args:
        mpi: connects the ranks while none of the others does.
        name: of the back end.
        sizes: bytes.
        budget: seconds for each size.
    """
    reason = _first(mpi, missing(name))
    if reason:
        return {"state": "absent", "reason": reason}
    backend, reason = None, ""
    try:
        backend = start(name, mpi)
    except Exception as error:  # each library has errors of its own
        reason = " ".join(str(error).split()) or repr(error)
    reason = _first(mpi, reason)
    if reason or backend is None:
        return {"state": "error", "reason": reason}
    wrong = _first(mpi, _wrong_sum(backend))
    rows = [] if wrong else [_row(mpi, backend, size, budget) for size in sizes]
    backend.close()
    return {"state": "error", "reason": wrong} if wrong else {"state": "ok", "rows": rows}


def _first(mpi: Communicator, reason: str) -> str:
    """Return the first reason of a rank, on all; its rank is named unless all say the same."""
    reasons = [one.decode() for one in mpi.gather(reason.encode())]
    if len(set(reasons)) == 1:
        return reason
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")


def _wrong_sum(backend: Communicator) -> str:
    """Say so where rank + 1, summed over n ranks, is not n (n + 1) / 2: then no time counts."""
    expected = backend.size * (backend.size + 1) / 2
    total = backend.sum_tensor(backend.tensor(1000, backend.rank + 1.0), "bench.check")
    got = sorted(set(total.tolist()))
    return "" if got == [expected] else f"the sum is {got[:3]}, not {expected}"


def _row(mpi: Communicator, backend: Communicator, size: int, budget: float) -> dict[str, Any]:
    tensor = backend.tensor(size // ELEMENT, 0.0)
    for _ in range(WARM_UP):
        backend.sum_tensor(tensor, f"bench.{size}")
    estimate = _once(backend, tensor, size)
    # As often on all ranks; this also lets them begin together.
    repeats = int(mpi.gather(str(repeats_for(estimate, budget)).encode())[0])
    mine = [_once(backend, tensor, size) for _ in range(repeats)]
    everyone = [json.loads(times) for times in mpi.gather(json.dumps(mine).encode())]
    slowest = [max(times) for times in zip(*everyone, strict=True)]
    median = statistics.median(slowest)
    algorithm, bus = bandwidths(size, median, backend.size)
    return {
        "bytes": size,
        "repeats": repeats,
        "seconds": median,
        "seconds_min": min(slowest),
        "seconds_max": max(slowest),
        "algorithm_gb_per_second": algorithm,
        "bus_gb_per_second": bus,
    }


def _once(backend: Communicator, tensor: Any, size: int) -> float:
    began = time.perf_counter()
    backend.sum_tensor(tensor, f"bench.{size}")
    backend.synchronize()
    return time.perf_counter() - began


def main(arguments: Sequence[str]) -> int:
    """Measure, and print on rank 0."""
    parser = argparse.ArgumentParser(description="Time allreduce on these ranks; JSON on rank 0.")
    parser.add_argument("--backends", default=",".join(BACKENDS), help="separated by commas")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="bytes, likewise")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each of them")
    options = parser.parse_args(arguments)
    for strategy in STRATEGIES.values():
        set_defaults(strategy.environment)
    from hvdtrain.collectives.mpi4py import Mpi4py

    mpi = Mpi4py()
    hosts = len(set(mpi.gather(socket.gethostname().encode())))
    sizes = [int(size) for size in options.sizes.split(",")]
    report = {
        "ranks": mpi.size,
        "hosts": hosts,
        "backends": {
            name: measure(mpi, name, sizes, options.seconds) for name in options.backends.split(",")
        },
    }
    mpi.on_root(lambda: sys.stdout.write(json.dumps(report) + "\n"))
    sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
