"""Time collectives by message size and library on the ranks of this job.

``horovod`` is Horovod with PyTorch as used by the trainers: its ``HOROVOD_CYCLE_TIME`` is part of
the latency.

The libraries are timed one after the other, without the others running: threads of an idle library
would use cores of the next.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TypeVar

from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.cost import bandwidths, fit
from hvdtrain.errors import HvdtrainError

Result = TypeVar("Result")

SIZES = (4, 4 * 2**10, 64 * 2**10, 2**20, 16 * 2**20, 64 * 2**20)  # bytes
SECONDS = 0.1  # per size, collective and back end
MIN_REPEATS, MAX_REPEATS = 5, 200  # repeats
MAX_SECONDS = 5.0  # maximum seconds of the fewest repeats: on loaded cores 64 MiB take long
WARM_UP = 2
ELEMENT = 4  # bytes of a float32
# Timeout of torch.distributed for rendezvous and collectives: on two loaded cores a rank was late
# by more than 15 s.
CONNECT_TIMEOUT = timedelta(seconds=60)
BACKENDS = {  # with their names in reports
    "mpi4py": "MPI (mpi4py)",
    "horovod": "Horovod",
    "gloo": "torch.distributed, Gloo",
    "nccl": "torch.distributed, NCCL",
}


@dataclass(frozen=True)
class TimeRow:
    """Times of a collective at one message size: of the slowest rank, over the repeats."""

    collective: str
    bytes: int  # of the float32 message on each rank; the larger buffer if each rank has a part
    repeats: int
    seconds: float  # median
    seconds_min: float
    seconds_max: float


@dataclass(frozen=True)
class AllreduceRow(TimeRow):
    """Times of an allreduce, and its bandwidths in GB/s (1e9 bytes): see ``cost.bandwidths``."""

    algorithm_gb_per_second: float
    bus_gb_per_second: float


@dataclass(frozen=True)
class TimeFit:
    """Latency and bandwidth of a collective; None if time does not depend on size."""

    collective: str
    latency_seconds: float
    bytes_per_second: float | None


@dataclass(frozen=True)
class LibraryFailure:
    """A library that is ``absent``, or failed: ``error``."""

    state: str
    reason: str


@dataclass(frozen=True)
class LibraryTimes:
    """Times of a library; ``left_out``: reasons by collective that failed."""

    state: str = field(default="ok", init=False)
    rows: list[TimeRow]
    fits: list[TimeFit]
    left_out: dict[str, str]

    def rows_of(self, collective: str) -> list[TimeRow]:
        """Return the rows of a collective, by size."""
        return [row for row in self.rows if row.collective == collective]

    def fit_of(self, collective: str) -> TimeFit:
        """Return the fit to the rows of a collective."""
        return next(fit for fit in self.fits if fit.collective == collective)


@dataclass(frozen=True)
class JobTimes:
    """Times of each library in a job."""

    ranks: int
    hosts: int
    backends: dict[str, LibraryTimes | LibraryFailure]

    @property
    def measured(self) -> dict[str, LibraryTimes]:
        """The libraries that could be measured."""
        return {n: entry for n, entry in self.backends.items() if isinstance(entry, LibraryTimes)}

    @property
    def collectives(self) -> list[str]:
        """The collectives that some library could perform."""
        rows = [row for entry in self.measured.values() for row in entry.rows]
        return list(dict.fromkeys(row.collective for row in rows))

    @property
    def left_out(self) -> list[str]:
        """A line for each library and collective that could not be measured."""
        lines = []
        for name, entry in self.backends.items():
            title = BACKENDS[name]
            if isinstance(entry, LibraryTimes):
                lines += [f"{title}, {kind}: {reason}" for kind, reason in entry.left_out.items()]
            else:
                lines.append(f"{title}: {entry.reason}")
        return lines

    def check(self) -> None:
        """Check that at least one measurement succeeded.

        Raises:
            HvdtrainError: no library could be measured.
        """
        if not self.collectives:
            raise HvdtrainError(f"all measurements failed. {'; '.join(self.left_out)}")


def missing(name: str) -> str:
    """Return the reason why back end ``name`` is not available; empty if it is."""
    if name == "mpi4py":
        return ""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch is not installed: {error}"
    if name == "horovod":
        try:
            import horovod.torch  # noqa: F401
        except ImportError as error:
            return f"Horovod for PyTorch is not installed: {error}"
    if name == "gloo" and not torch.distributed.is_gloo_available():
        return "this PyTorch has no Gloo"
    if name == "nccl":
        from hvdtrain.system.machine import accelerator

        return "" if accelerator.backend() == name else "no GPU, or no NCCL in this PyTorch"
    return ""


def start(name: str, mpi: Communicator) -> Communicator:
    """Start back end ``name``; all ranks together.

    Raises:
        Exception: of any type: it does not start, or its world differs from MPI's.
    """
    if name == "mpi4py":
        return mpi
    started: Communicator
    if name == "horovod":
        from hvdtrain.collectives.horovod_torch import HorovodTorch

        started = HorovodTorch()
    else:
        from hvdtrain.collectives.torch_distributed import TorchDistributed

        started = TorchDistributed(gpu=name == "nccl", timeout=CONNECT_TIMEOUT)
    if started.size != mpi.size:
        raise RuntimeError(f"its world is {started.size}, MPI's is {mpi.size}")
    return started


def repeats_for(seconds: float, budget: float) -> int:
    """Return the number of repeats of an operation that takes ``seconds``.

    Args:
        seconds: seconds of the operation.
        budget: seconds for all repeats, unless these would be too few.
    """
    if seconds <= 0:
        return MAX_REPEATS
    fewest = max(1, min(MIN_REPEATS, int(MAX_SECONDS / seconds)))
    return max(fewest, min(MAX_REPEATS, int(budget / seconds)))


def measure(
    mpi: Communicator, name: str, collectives: Sequence[str], sizes: Sequence[int], budget: float
) -> LibraryTimes | LibraryFailure:
    """Measure a back end; all ranks together, or none if it fails on one.

    Args:
        mpi: communicator of MPI.
        name: name of the back end.
        collectives: names of its ``operations`` to measure.
        sizes: message sizes in bytes.
        budget: seconds per size and collective.
    """
    reason = _first(mpi, missing(name))
    if reason:
        return LibraryFailure("absent", reason)
    started: list[Communicator] = []  # to be closed also if it failed to start on other ranks
    try:
        _together(mpi, lambda: started.append(start(name, mpi)))
        _together(mpi, lambda: _check_sum(started[0]))
        return _measure_all(mpi, started[0], collectives, sizes, budget)
    except _FailedError as failure:
        return LibraryFailure("error", str(failure))
    finally:
        for backend in started:
            with contextlib.suppress(Exception):  # it may have failed
                backend.close()


def _measure_all(
    mpi: Communicator,
    backend: Communicator,
    collectives: Sequence[str],
    sizes: Sequence[int],
    budget: float,
) -> LibraryTimes:
    rows: list[TimeRow] = []
    left_out: dict[str, str] = {}
    for size in sizes:
        count = max(1, size // ELEMENT)
        # Allocating buffers may take longer on a rank than the library's timeout.
        operations = _together(mpi, partial(backend.operations, count))
        for name in (key for key in collectives if key in operations and key not in left_out):
            if reason := _first(mpi, _failure(backend, operations[name])):
                left_out[name] = reason
                continue
            rows.append(_row(mpi, backend, name, operations[name], size, budget))
    rows = [row for row in rows if row.collective not in left_out]
    if left_out and not rows:
        raise _FailedError(next(iter(left_out.values())))
    fits = [_fit(name, rows) for name in dict.fromkeys(row.collective for row in rows)]
    return LibraryTimes(rows, fits, left_out)


def _fit(name: str, rows: Sequence[TimeRow]) -> TimeFit:
    link = fit([(row.bytes, row.seconds) for row in rows if row.collective == name])
    speed = link.bandwidth if math.isfinite(link.bandwidth) else None
    return TimeFit(name, link.latency, speed)


class _FailedError(Exception):
    """A back end has failed on at least one rank; all ranks raise it together."""


def _together(mpi: Communicator, action: Callable[[], Result]) -> Result:
    """Return the result of ``action`` on a back end; all ranks raise if it fails on one.

    Raises:
        _FailedError: with the reason.
    """
    result: list[Result] = []
    reason = ""
    try:
        result.append(action())
    except Exception as error:  # each library has its own error types
        reason = _line(error)
    if first := _first(mpi, reason):
        raise _FailedError(first)
    return result[0]


def _first(mpi: Communicator, reason: str) -> str:
    """Return the first non-empty reason on all ranks, with its rank unless all are the same."""
    mpi.wait_for_all()  # a rank may still wait for the back end
    reasons = [data.decode() for data in mpi.gather(reason.encode())]
    if len(set(reasons)) == 1:
        return reason
    return next((f"rank {rank}: {text}" for rank, text in enumerate(reasons) if text), "")


def _line(error: Exception) -> str:
    return " ".join(str(error).split()) or repr(error)


def _check_sum(backend: Communicator) -> None:
    """Raise if rank + 1, summed over n ranks, is not n (n + 1) / 2."""
    expected = backend.size * (backend.size + 1) / 2
    total = backend.sum_tensor(backend.tensor(1000, backend.rank + 1.0), "timing.check")
    got = sorted(set(total.tolist()))
    if got != [expected]:
        raise RuntimeError(f"the sum is {got[:3]}, not {expected}")


def _failure(backend: Communicator, operation: Callable[[], object]) -> str:
    """Try ``operation`` and return the reason of a failure; empty if it works."""
    try:
        for _ in range(WARM_UP):
            operation()
        backend.synchronize()
    except Exception as error:  # not supported by the library or its build
        return _line(error)
    return ""


def _row(
    mpi: Communicator,
    backend: Communicator,
    collective: str,
    operation: Callable[[], object],
    size: int,
    budget: float,
) -> TimeRow:
    """Return the row of ``operation``, which has been warmed up."""
    estimate = _together(mpi, lambda: _once(backend, operation))
    # The same number on all ranks.
    repeats = mpi.gather_json(repeats_for(estimate, budget))[0]
    # Synchronize before each repeat, as otherwise the root of a broadcast would run ahead.
    mine = [_together(mpi, lambda: _once(backend, operation)) for _ in range(repeats)]
    slowest = [max(times) for times in zip(*mpi.gather_json(mine), strict=True)]
    median = statistics.median(slowest)
    row = TimeRow(collective, size, repeats, median, min(slowest), max(slowest))
    if collective != "allreduce":
        return row
    algorithm, bus = bandwidths(size, median, backend.size)
    return AllreduceRow(**vars(row), algorithm_gb_per_second=algorithm, bus_gb_per_second=bus)


def _once(backend: Communicator, operation: Callable[[], object]) -> float:
    began = time.perf_counter()
    operation()
    backend.synchronize()
    return time.perf_counter() - began
