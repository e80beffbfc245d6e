"""A correct script of DistributedDataParallel, as in PyTorch's tutorials."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, RATE = 2, 0.05

dist.init_process_group("gloo")
torch.set_num_threads(1)
rank = int(os.environ["RANK"])
torch.manual_seed(rank)
generator = torch.Generator().manual_seed(1)
x = torch.randn(120, 10, generator=generator)
train = TensorDataset(x, torch.randint(0, 3, (120,), generator=generator))
sampler = DistributedSampler(train)
loader = DataLoader(train, batch_size=8, sampler=sampler)
network = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
model = DistributedDataParallel(network)
optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)

for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    sums = torch.zeros(2)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        sums += torch.tensor([loss.item() * len(labels), len(labels)])
    dist.all_reduce(sums)
    if rank == 0:
        torch.save(network.state_dict(), "model.pt")
        print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")
dist.destroy_process_group()
