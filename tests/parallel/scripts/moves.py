"""Run on every rank by test_checkpoints.py: a training goes on from any strategy's checkpoint.

    moves.py STRATEGY save FOLDER        three updates, then a checkpoint
    moves.py STRATEGY load FOLDER ...    from each of these, two more

What one process computes by hand, without hvdtrain, is what each of them must have.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch

from hvdtrain.adapters.select import adapter
from hvdtrain.steps.sharding import Shards
from tests.parallel.expect import expect_model

SAMPLES, BATCH, SAVED, END = 60, 11, 3, 5  # parts that are not even, at 2 and at 3 ranks
strategy, action, *folders = sys.argv[1:]
hvd = adapter("pytorch", strategy)
hvd.initialize()
hvd.pin_device()
torch.manual_seed(0)
x, y = torch.randn(SAMPLES, 5).double(), torch.randn(SAMPLES, 1).double()


def network() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Rows that no number of ranks divides, fewer than ranks, a frozen layer and an unused one."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(
        torch.nn.Linear(5, 7),
        torch.nn.Tanh(),
        torch.nn.Linear(7, 7),
        torch.nn.Tanh(),
        torch.nn.Linear(7, 1),
    ).double()
    net[2].requires_grad_(False)
    net[1].register_parameter("unused", torch.nn.Parameter(torch.ones(2).double()))
    net[1].register_buffer("count", torch.tensor(4))
    net[4].register_buffer("statistic", torch.ones(2).double())
    trained = [value for value in net.parameters() if value.requires_grad]
    return net, torch.optim.AdamW(trained, lr=0.05, weight_decay=0.1)


def clip(net: Any) -> None:
    """Clip, by the way that a model has of which this rank holds a stage alone."""
    method = getattr(net, "clip_grad_norm_", None)
    method(0.5) if method else torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)


def train(net: Any, optimizer: Any, shards: Shards, first: int, end: int) -> None:
    """Make the updates from ``first`` to before ``end``."""
    for part in list(shards.parts(0, 0))[first:end]:
        with shards.step(part):
            optimizer.zero_grad()
            (net(x[part.indices]) - y[part.indices]).square().mean().backward()
            clip(net)
            optimizer.step()


@functools.cache
def expected(steps: int) -> torch.nn.Module:
    net, optimizer = network()
    train(net, optimizer, Shards(SAMPLES, BATCH), 0, steps)
    return net


def distributed() -> tuple[Any, Any, Shards]:
    net, optimizer = network()
    if hvd.world.rank:  # what rank 0 has counts
        with torch.no_grad():
            net[0].weight.zero_()
    net, optimizer = hvd.distribute_optimizer(net, optimizer)
    return net, optimizer, hvd.shard_data(SAMPLES, global_batch=BATCH)


if action == "save":
    net, optimizer, shards = distributed()
    hvd.broadcast_state(net, optimizer)
    train(net, optimizer, shards, 0, SAVED)
    expect_model(hvd, net, expected(SAVED), SAVED)
    hvd.save_checkpoint(folders[0], net, optimizer, state={"step": SAVED})
else:
    for folder in folders:
        net, optimizer, shards = distributed()
        state = hvd.resume(folder, net, optimizer)
        assert state and state["step"] == SAVED
        expect_model(hvd, net, expected(SAVED), SAVED)
        train(net, optimizer, shards, SAVED, END)
        expect_model(hvd, net, expected(END), END)
        if hvd.world.is_writer:
            Path(folder, f"{strategy}-{hvd.world.size}").touch()
