"""Run on every rank by test_pipeline.py: models and loops that only a pipeline could get wrong.

    stages.py STAGES FOLDER [CASE ...]

Each is also run in this one process, over the whole global batches, without hvdtrain.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hvdtrain.adapters.select import adapter
from hvdtrain.config.comm_options import CommOptions
from hvdtrain.steps.sharding import Shards
from tests.parallel.expect import expect_error

SAMPLES, BATCH, EPOCHS = 13, 4, 2
options = CommOptions(stages=int(sys.argv[1]), micro_batches=2)
hvd: Any = adapter("pytorch", "pipeline", comm_options=options)
world = hvd.initialize()
hvd.pin_device()
torch.manual_seed(0)
x = torch.randn(SAMPLES, 6, dtype=torch.float64)


def layers(*between: torch.nn.Module) -> torch.nn.Sequential:
    """Return a net of which the first two Linear layers and ``between`` them are in stage 0."""
    torch.manual_seed(1)
    first = (torch.nn.Linear(6, 6), *between, torch.nn.Linear(6, 6), torch.nn.Tanh())
    return torch.nn.Sequential(*first, torch.nn.Linear(6, 12), torch.nn.Linear(12, 6)).double()


def tied() -> torch.nn.Sequential:
    net: Any = layers(torch.nn.Tanh())
    net[2].weight = net[0].weight
    return net


def of_int16() -> torch.nn.Sequential:
    """Gloo reduces and broadcasts no such numbers."""
    net = layers()
    net[0].register_buffer("table", torch.arange(3, dtype=torch.int16) + 7 * world.rank)
    net[3].register_buffer("number", torch.tensor(world.rank, dtype=torch.int16))
    return net


def normalized() -> torch.nn.Sequential:
    net: Any = layers(torch.nn.BatchNorm1d(6).double())
    torch.nn.init.uniform_(net[1].running_mean)
    return net


def loss_of(net: Any, inputs: torch.Tensor) -> torch.Tensor:
    return net(inputs).square().sum(1).mean()


def one_pass(net: Any, inputs: torch.Tensor) -> None:
    loss_of(net, inputs).backward()


def two_passes(net: Any, inputs: torch.Tensor) -> None:
    loss_of(net, inputs).backward()
    net(inputs).sum(1).mean().backward()


def summed_together(net: Any, inputs: torch.Tensor) -> None:
    with hvd.no_sync():
        loss_of(net, inputs).backward()
    net(inputs).sum(1).mean().backward()


def clip(net: Any) -> None:
    method = getattr(net, "clip_grad_norm_", None)
    method(0.1) if method else torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)


def run(
    net: Any, optimizer: torch.optim.Optimizer, shards: Shards, passes: Callable[..., None]
) -> None:
    net.train()
    for layer in net.modules():
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.eval()  # once: its statistics remain as they are
    for epoch in range(EPOCHS):
        for part in shards.epoch(epoch):
            optimizer.zero_grad()
            passes(net, x[part.indices])
            clip(net)
            optimizer.step()


def compare(make: Callable[[], torch.nn.Sequential], passes: Callable[..., None]) -> None:
    single, net = make(), make()
    run(single, torch.optim.SGD(single.parameters(), 0.1), Shards(SAMPLES, BATCH), passes)
    net, optimizer = hvd.distribute_optimizer(net, torch.optim.SGD(net.parameters(), 0.1))
    hvd.broadcast_state(net, optimizer)
    run(net, optimizer, hvd.shard_data(SAMPLES, global_batch=BATCH), passes)
    found = hvd.export_state(net, None).model
    for name, value in single.state_dict().items():
        if value.dtype != torch.int16:
            error = abs(found[name] - value.numpy()).max()
            assert error < 1e-12, (make.__name__, passes.__name__, name, error)
        else:  # rank 0's
            assert found[name].tolist() == (0 if name == "3.number" else [0, 1, 2]), name


def one_output_twice() -> None:
    net: Any = layers()
    net, _ = hvd.distribute_optimizer(net, torch.optim.SGD(net.parameters(), 0.1))
    for part in hvd.shard_data(SAMPLES, global_batch=BATCH).epoch(0):
        output = net(x[part.indices])
        output.sum().backward(retain_graph=True)
        again = output.square().sum().backward
        expect_error(again, "sum the losses, or call the model again")
        break


def tied_in_each_way() -> None:
    for passes in (one_pass, two_passes, summed_together):
        compare(tied, passes)


CASES: dict[str, Callable[[], None]] = {
    "tied": tied_in_each_way,
    "frozen": lambda: compare(normalized, one_pass),
    "int16": lambda: compare(of_int16, one_pass),
    "twice": one_output_twice,
}
for case in sys.argv[3:] or CASES:
    CASES[case]()
Path(sys.argv[2], f"{world.rank}-of-{world.size}").touch()
