"""Ranks that do not do the same: the last one, or rank 0, leaves the common path.

unequal.py STRATEGY HOW FOLDER
"""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hvdtrain import adapter
from hvdtrain.system.runtime import waits

strategy, how, folder = sys.argv[1:]
hvd = adapter("pytorch", strategy)
world = hvd.initialize()
hvd.pin_device()
model: Any = torch.nn.Linear(2, 1)
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
shards = hvd.shard_data(5 * world.size, global_batch=world.size)
model, optimizer = hvd.distribute_optimizer(model, optimizer)
hvd.broadcast_state(model, optimizer)
is_last = world.rank == world.size - 1


def step(x: torch.Tensor) -> None:
    optimizer.zero_grad()
    model(x).mean().backward()
    optimizer.step()


class Stream(IterableDataset[torch.Tensor]):
    """Ends early on the last rank."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter([torch.ones(2)] * (3 if is_last else 5))


def leave() -> None:
    """What the last rank does in the third step."""
    if how == "thread":
        raising = threading.Thread(target=lambda: 1 // 0)
        raising.start()
        raising.join()
    elif how == "exit":
        sys.exit(3)
    elif how == "interrupt":
        raise KeyboardInterrupt
    elif how == "hook":
        sys.excepthook = print  # replaces that of step 1
        raise ValueError("a bad sample")
    elif how == "weight":
        hvd.weight_loss(3)
    elif how == "blocked":
        threading.Thread(target=threading.Event().wait).start()  # Python waits for it at the end
    if how in ("raise", "all", "blocked"):
        raise ValueError("a bad sample")


if how == "loader":
    for _, batch in shards.batches(0, DataLoader(Stream(), batch_size=1)):
        step(batch)
elif how == "pauses":  # no rank is ever ended because another one is slow
    waits.REPORT_DELAY, waits.POLL_INTERVAL, waits.LATE_TIMEOUT = 0.02, 0.01, 0.15
    dice = random.Random(world.rank)

    def pause() -> None:
        time.sleep(dice.choice([0, 0, 0.2]))

    if is_last:  # what does not communicate need not be done by all ranks
        hvd.shard_data(8, global_batch=4)
        with hvd.averaged_buffers(model):  # there are none
            pause()
    for epoch in range(10):
        for part in shards.epoch(epoch):
            pause()
            step(torch.ones(len(part.indices), 2))
        pause()
        hvd.average_metrics(1, loss=0.0)
        pause()
        hvd.save_checkpoint(folder, model, optimizer, state={"step": epoch})
    pause()
else:
    for number, part in enumerate(shards.epoch(0)):
        if number == 2 and (is_last or how == "all"):
            leave()
        if number == 2 and how == "buffers" and world.is_writer:
            break
        step(torch.ones(len(part.indices), 2))
if how == "buffers":
    with hvd.averaged_buffers(model):  # communicates nothing
        pass
    hvd.average_metrics(1, loss=0.0)
if how == "save" and world.is_writer:
    hvd.save_checkpoint(folder, model, optimizer, state={"step": 5})
Path(folder, f"{world.rank}-of-{world.size}").touch()
