"""Run on 4 ranks by test_collectives.py: Horovod and MPI sum in the order that MPI was told."""

from __future__ import annotations

from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.horovod_torch import HorovodTorch
from hvdtrain.collectives.mpi4py import Mpi4py

PARTS = (1.0, 1e8, 1.0, -1e8)  # in float32 1e8 swallows a 1

found = []
for kind in (Mpi4py, HorovodTorch):
    ranks: Communicator = kind()
    total = ranks.sum_tensor(ranks.tensor(64, PARTS[ranks.rank]), "parts")
    found.append(sorted(set(total.tolist())))
ranks.on_root(lambda: print(found))
