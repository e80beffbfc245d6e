"""A correct script of Lightning Fabric: accumulation, clipping, a metric, a checkpoint."""

from __future__ import annotations

import os

import torch
from lightning.fabric import Fabric
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

fabric = Fabric(accelerator="cpu", strategy="ddp", devices=int(os.environ["WORLD_SIZE"]))
fabric.launch()
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(120, 10, generator=generator), torch.randint(0, 3, (120,), generator=generator)
loader = fabric.setup_dataloaders(DataLoader(TensorDataset(x, y), batch_size=8, shuffle=True))
network = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
model, optimizer = fabric.setup(network, optimizer)

for epoch in range(2):
    loader.sampler.set_epoch(epoch)
    sums = torch.zeros(2)
    for step, (inputs, labels) in enumerate(loader, 1):
        last = step % 2 == 0 or step == len(loader)
        with fabric.no_backward_sync(model, enabled=not last):
            loss = cross_entropy(model(inputs), labels)
            fabric.backward(loss / 2)
        sums += torch.tensor([loss.item() * len(labels), len(labels)])
        if last:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
    sums = fabric.all_reduce(sums, reduce_op="sum")
    fabric.print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")
fabric.save("model.pt", {"model": model})
