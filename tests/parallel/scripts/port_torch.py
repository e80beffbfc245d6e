"""A typical correct port to Horovod: loader with workers, clipping, accumulation, bf16.

Also transforms that are modules, a scheduler with warm-up, and an evaluation.
"""

from __future__ import annotations

import horovod.torch as hvd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, PASSES, RATE = 2, 2, 0.01


class Normalize(nn.Module):
    """A transform as in torchvision: a module without parameters."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """Center the image at zero."""
        return (image - 0.5) / 0.5


class Images(Dataset):
    """Small images with one constant channel."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.rand(count, 3, 6, 6, generator=generator)
        self.images[:, 0] = 0.25  # the same in all images
        self.labels = torch.randint(0, 3, (count,), generator=generator)
        self.transform = nn.Sequential(Normalize())

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.transform(self.images[index]), self.labels[index]


hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
train, test = Images(96, 1), Images(30, 2)
sampler = DistributedSampler(train, hvd.size(), hvd.rank())
loader = DataLoader(train, 4, sampler=sampler, num_workers=2)
test_sampler = DistributedSampler(test, hvd.size(), hvd.rank())
test_loader = DataLoader(test, 10, sampler=test_sampler)
model = nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.ReLU(), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=RATE * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(
    optimizer, model.named_parameters(), backward_passes_per_step=PASSES
)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / hvd.size(), total_iters=1)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def loss_of(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, computed in bf16."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(images)
    return nn.functional.cross_entropy(logits.float(), labels)


for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    model.train()
    for number, (images, labels) in enumerate(loader):
        (loss_of(images, labels) / PASSES).backward()
        if (number + 1) % PASSES == 0:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with optimizer.skip_synchronize():
                optimizer.step()
            optimizer.zero_grad()
    scheduler.step()
    model.eval()
    with torch.no_grad():
        sums = torch.tensor([0.0, 0.0])
        for images, labels in test_loader:
            sums += torch.stack([loss_of(images, labels) * len(labels), torch.tensor(len(labels))])
    sums = hvd.allreduce(sums, op=hvd.Sum, name="loss and count")
    if hvd.rank() == 0:
        torch.save(model.state_dict(), "model.pt")
        print(f"epoch {epoch}: loss {sums[0] / sums[1]:.4f}")
