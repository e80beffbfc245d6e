"""Gloo on two ranks, of which one loses its connections in the middle of the measurement."""

import json
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from hvdtrain.collectives.mpi4py import Mpi4py
from hvdtrain.collectives.torch_distributed import TorchDistributed
from hvdtrain.commands.collectives import timing

BREAKS = 6  # calls: the sum that is checked, two to warm up, one to estimate, and repeats


class Breaking(TorchDistributed):
    calls = 0

    def sum_tensor(self, tensor, name):
        self.calls += 1
        if self.calls == BREAKS and self.rank == 1:
            dist.destroy_process_group()
        return super().sum_tensor(tensor, name)


mpi = Mpi4py()
timing.start = lambda *_: Breaking(gpu=False, timeout=timedelta(seconds=5))
found = timing.measure(mpi, "gloo", ["allreduce"], [4], 0.1)
after = timing._first(mpi, "")  # the ranks are still together
mpi.on_root(lambda: print(json.dumps([asdict(found), after])))
