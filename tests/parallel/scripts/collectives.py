"""Run on every rank by test_collectives.py: each collective of a library against closed forms."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import CheckpointError
from hvdtrain.system.runtime.tuning import MPI_VARIABLES, set_defaults

MOST = {"broadcast", "allreduce", "allgather", "reduce-scatter", "alltoall"}
ALL = {*MOST, "scatter", "gather", "reduce", "send and receive"}
HAS = {
    "mpi4py": ALL,
    "torch_distributed": ALL,
    "horovod_torch": MOST,
    "horovod_tf": {"allreduce"},
}


def start(name: str) -> Communicator:
    set_defaults(MPI_VARIABLES)
    if name == "mpi4py":
        from hvdtrain.collectives.mpi4py import Mpi4py

        return Mpi4py()
    if name == "horovod_torch":
        from hvdtrain.collectives.horovod_torch import HorovodTorch

        return HorovodTorch()
    if name == "horovod_tf":
        from hvdtrain.collectives.horovod_tf import HorovodTensorFlow

        return HorovodTensorFlow()
    from hvdtrain.collectives.torch_distributed import TorchDistributed

    return TorchDistributed(gpu=False)


def numbers(tensor: Any) -> list[float]:
    return [float(value) for value in np.asarray(tensor)]


library, folder = sys.argv[1], Path(sys.argv[2])
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
assert HAS[library] == set(ranks.operations(4))
assert ranks.broadcast_bytes(b"of rank 0" if rank == 0 else b"else") == b"of rank 0"


def fail() -> None:
    if rank == size - 1:
        raise CheckpointError("no space")


try:
    ranks.together(fail)
except CheckpointError as error:
    assert "no space" in str(error)
else:
    raise AssertionError("the failure of one rank has not reached this one")
(folder / f"{rank}-of-{size}").touch()
ranks.gather(b"")
ranks.close()
