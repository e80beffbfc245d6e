"""A correct script of DistributedDataParallel that accumulates gradients of several passes."""

from __future__ import annotations

import contextlib

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, PASSES = 2, 2


def main() -> None:
    """Train a network with BatchNorm in two epochs."""
    distributed.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(3)
    images = torch.rand(96, 3, 6, 6, generator=generator)
    data = TensorDataset(images, torch.randint(0, 3, (96,), generator=generator))
    sampler = DistributedSampler(data, num_replicas=size, rank=rank, shuffle=True)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=1)
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 3))
    model = DDP(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        model.train()
        for number, (inputs, labels) in enumerate(loader):
            last = (number + 1) % PASSES == 0
            with contextlib.nullcontext() if last else model.no_sync():
                loss = nn.functional.cross_entropy(model(inputs), labels)
                (loss / PASSES).backward()
            if last:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        scheduler.step()
        mean = loss.detach().clone()
        distributed.reduce(mean, dst=0)
        if rank == 0:
            print(f"epoch {epoch}: last loss {mean.item() / size:.4f}")
            torch.save(network.state_dict(), "model.pt")
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
