"""A user's script with Horovod's functions, without hvdtrain. --wrong makes common mistakes."""

from __future__ import annotations

import argparse

import horovod.torch as hvd
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--wrong", action="store_true")
parser.add_argument("--checkpoint", default="model.pt")
options = parser.parse_args()

hvd.init()
torch.manual_seed(hvd.rank())  # replicas differ before the broadcast
torch.set_num_threads(64 if options.wrong else 1)
generator = torch.Generator().manual_seed(1)
x = torch.randn(400, 10, generator=generator)
data = TensorDataset(x, torch.randint(0, 3, (400,), generator=generator))
if options.wrong:
    loader = DataLoader(data, batch_size=16)
else:
    sampler = DistributedSampler(data, hvd.size(), hvd.rank())
    loader = DataLoader(data, 16, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
rate = 0.01 if options.wrong else 0.01 * hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
if not options.wrong:
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

for epoch in range(2):
    total = 0.0
    if not options.wrong:
        sampler.set_epoch(epoch)
    for inputs, labels in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
    mean = total / len(loader)
    if not options.wrong:
        mean = hvd.allreduce(torch.tensor(mean), name="loss").item()
    if options.wrong or hvd.rank() == 0:
        torch.save(model.state_dict(), options.checkpoint)
print(f"rank {hvd.rank()}: loss {mean:.3f}")
