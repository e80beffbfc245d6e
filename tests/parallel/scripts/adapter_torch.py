"""A script with hvdtrain's eight methods: STRATEGY, and how it reads: own, loader or sampler."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain import adapter

BATCH, PASSES = 14, 2
hvd = adapter("pytorch", sys.argv[1])
world = hvd.initialize()
hvd.pin_device()
generator = torch.Generator().manual_seed(1)
x = torch.randn(98, 10, generator=generator)
data = TensorDataset(x, torch.randint(0, 3, (98,), generator=generator))
torch.manual_seed(world.rank)
model = torch.nn.Sequential(
    torch.nn.Linear(10, 16),
    torch.nn.LayerNorm(16),
    torch.nn.ReLU(),
    torch.nn.Dropout(0.2),
    torch.nn.Linear(16, 3),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
shards = hvd.shard_data(len(data), global_batch=BATCH)
rate = hvd.scale_learning_rate(0.01)
model, optimizer = hvd.distribute_optimizer(model, optimizer)
hvd.broadcast_state(model, optimizer)
loader = shards.loader(data)
for epoch in range(2):
    if sys.argv[2] == "own":
        batches = ((part, data[part.indices]) for part in shards.epoch(epoch))
    elif sys.argv[2] == "loader":
        batches = loader.batches(epoch)
    else:
        drawn = DataLoader(data, batch_sampler=shards.batch_sampler(epoch))
        batches = shards.batches(epoch, drawn)
    for number, (part, (inputs, labels)) in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = rate(epoch + part.start.consumed / len(data))
        loss = cross_entropy(model(inputs), labels) / PASSES
        loss.backward()
        if number % PASSES:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    correct = (model(x[world.rank :: world.size]).argmax(1) == 0).sum().item()
    hvd.average_metrics(len(x[world.rank :: world.size]), accuracy=correct)
    hvd.save_checkpoint("checkpoints", model, optimizer, state={"step": epoch + 1})
