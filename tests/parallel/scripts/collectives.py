"""Run on every rank by test_collectives.py: ``collectives.py CHECK WORDS...``, a function below."""

from __future__ import annotations

import importlib
import json
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.collectives import base
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import CheckpointError
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults
from tests.parallel.expect import expect_error

set_defaults(MPI_VARIABLES)

MOST = {"broadcast", "allreduce", "allgather", "reduce-scatter", "alltoall"}
ALL = {*MOST, "scatter", "gather", "reduce", "send and receive"}
LIBRARIES = {  # class, and the collectives that it has
    "mpi4py": ("Mpi4py", ALL),
    "torch_distributed": ("TorchDistributed", ALL),
    "horovod_torch": ("HorovodTorch", MOST),
    "horovod_tf": ("HorovodTensorFlow", {"allreduce"}),
}
PARTS = np.array([1, 1e8, 1, -1e8], np.float32)  # 1e8 swallows a 1: the order of a sum shows


def start(name: str) -> Communicator:
    kind = getattr(importlib.import_module(f"hvdtrain.collectives.{name}"), LIBRARIES[name][0])
    communicator: Communicator = kind(gpu=False) if name == "torch_distributed" else kind()
    return communicator


def numbers(tensor: Any) -> list[float]:
    return [float(value) for value in np.asarray(tensor)]


def each(library: str, folder: str) -> None:
    """Check each collective of a library against closed forms."""
    ranks = start(library)
    rank, size = ranks.rank, ranks.size
    pieces = [b"x" * (3 * number) for number in range(size)]
    assert ranks.gather(pieces[rank]) == pieces
    assert ranks.gather(b"") == [b""] * size
    mine = np.full(5, rank + 7, np.uint8)
    assert ranks.broadcast(mine).tolist() == [7] * 5
    assert mine.tolist() == [rank + 7] * 5, "the rank's own data are overwritten"
    values = np.array([rank + 0.5, -1.0])
    assert ranks.sum(values).tolist() == [size * size / 2, -size]
    assert values.tolist() == [rank + 0.5, -1.0], "the rank's own values are overwritten"
    total = ranks.sum_tensor(ranks.tensor(4, rank + 1.0), "numbers")
    ranks.synchronize()
    assert numbers(total) == [size * (size + 1) / 2] * 4
    for count in (1, 5, 6):
        for _ in range(2):
            for operation in ranks.operations(count).values():
                operation()
    ranks.synchronize()
    assert LIBRARIES[library][1] == set(ranks.operations(4))
    assert ranks.broadcast_bytes(b"of rank 0" if rank == 0 else b"else") == b"of rank 0"
    base.CHUNK = 2 * size  # bytes of a message, two of each rank
    assert ranks.gather_large(pieces[rank]) == pieces

    def fail() -> None:
        if rank == size - 1:
            raise CheckpointError("no space")

    expect_error(lambda: ranks.together(fail), "no space", kind=CheckpointError)
    Path(folder, f"{rank}-of-{size}").touch()
    ranks.gather(b"")
    ranks.close()


def breaking() -> None:
    """Measure Gloo on two ranks, of which one loses its connections in the middle."""
    import torch.distributed as dist

    from hvdtrain.collectives.torch_distributed import TorchDistributed
    from hvdtrain.commands.collectives import timing

    calls = 6  # the sum that is checked, two to warm up, one to estimate, and repeats

    class Breaking(TorchDistributed):
        left = calls

        def sum_tensor(self, tensor: Any, name: str) -> Any:
            self.left -= 1
            if self.left == 0 and self.rank == 1:
                dist.destroy_process_group()
            return super().sum_tensor(tensor, name)

    mpi: Any = start("mpi4py")
    timing.start = lambda *_: Breaking(gpu=False, timeout=timedelta(seconds=5))
    result = timing.measure(mpi, "gloo", ["allreduce"], [4], 0.1)
    after = timing._first(mpi, "")  # the ranks are still together
    mpi.on_root(lambda: print(json.dumps([asdict(result), after])))


def order() -> None:
    """Sum on 4 ranks by Horovod and by MPI, in the order that MPI was told."""
    result = []
    for name in ("mpi4py", "horovod_torch"):
        ranks = start(name)
        total = ranks.sum_tensor(ranks.tensor(64, float(PARTS[ranks.rank])), "parts")
        result.append(sorted(set(numbers(total))))
    ranks.on_root(lambda: print(result))


CHECKS = (each, breaking, order)
{check.__name__: check for check in CHECKS}[sys.argv[1]](*sys.argv[2:])
