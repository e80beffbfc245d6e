"""A correct script whose model (fsdp) or optimizer state (zero) is sharded over the ranks."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

dist.init_process_group("gloo")
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 10, generator=generator)
data = TensorDataset(x, torch.randint(0, 3, (96,), generator=generator))
sampler = DistributedSampler(data)
loader = DataLoader(data, 8, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
if sys.argv[1] == "fsdp":
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
else:
    model = DistributedDataParallel(model)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01
    )
for inputs, labels in loader:
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
