"""Run on every rank by test_adapter.py: what users' own PyTorch loops do between the eight calls.

Every loop is also run by hand in this one process, over the whole global batches, without
hvdtrain: the weights must be those. 13 samples in global batches of 4 leave parts of 2, 1, 1 and,
at the tail of one sample, stand-ins.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset

from hvdtrain.adapters.select import adapter
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps.sharding import Shards
from tests.parallel.expect import expect_error, expect_model, expect_snapshot

SAMPLES, BATCH, EPOCHS = 13, 4, 3
strategy = sys.argv.pop(1)
hvd = adapter("pytorch", strategy)


for early in ("world", "communicator"):
    expect_error(lambda name=early: getattr(hvd, name), "initialize() first")  # type: ignore[misc]
expect_error(lambda: adapter("torch"), "did you mean pytorch?")
world = hvd.initialize()
hvd.pin_device()
rank, size = world.rank, world.size

torch.manual_seed(0)
x = torch.randn(SAMPLES, 5, dtype=torch.float64)
y = torch.arange(SAMPLES) % 3


class Net(torch.nn.Module):
    """Two layers, and a third that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3)
        )
        self.unused = torch.nn.Linear(2, 2)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


def sgd(net: torch.nn.Module, *, decay: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.5, momentum=0.9, weight_decay=decay)


def train(step: Callable[..., None], *, loader: bool = False) -> None:
    """Run ``step(net, optimizer, inputs, labels, number)`` over all ranks and in one process.

    Args:
        step: called for every part.
        loader: batches come from worker processes that read ahead.
    """
    single = Net()
    plain = sgd(single)
    order = Shards(SAMPLES, BATCH, seed=3)
    for epoch in range(EPOCHS):
        for number, part in enumerate(order.epoch(epoch)):
            step(single, plain, x[part.indices], y[part.indices], number)

    net = Net()
    net, optimizer = hvd.distribute_optimizer(net, sgd(net))
    shards = hvd.shard_data(SAMPLES, global_batch=BATCH, seed=3)
    data = TensorDataset(x, y)
    for epoch in range(EPOCHS):
        steps: Iterator[Any] = ((part, data[part.indices]) for part in shards.epoch(epoch))
        if loader:
            sampler = shards.batch_sampler(epoch)
            steps = shards.batches(epoch, DataLoader(data, batch_sampler=sampler, num_workers=2))
        for number, (_, (inputs, labels)) in enumerate(steps):
            step(net, optimizer, inputs, labels, number)
        hvd.average_metrics(1)  # a call of all ranks, whatever the last part has left
    expect_model(hvd, net, single, step.__name__)
    hvd.check_replicas(net, optimizer)


def loss_of(net: Any, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(net(inputs), labels)


def backward(net: Any, inputs: torch.Tensor, labels: torch.Tensor, passes: int = 1) -> None:
    """Make a backward pass, one of ``passes``."""
    (loss_of(net, inputs, labels) / passes).backward()


def clip(net: Any) -> None:
    clip_grad_norm_(net.parameters(), 0.1)


def clipped(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(net, inputs, labels).backward()
    clip(net)
    optimizer.step()


def zeroed_at_the_end(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    backward(net, inputs, labels)
    for parameter in net.parameters():
        if parameter.grad is not None:
            parameter.grad.clamp_(-0.01, 0.01)
    optimizer.step()
    optimizer.zero_grad(set_to_none=number % 2 == 0)


def accumulated(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    """Update after every second part; the tail of an epoch goes into the next update."""
    backward(net, inputs, labels, passes=2)
    if number % 2:
        clip(net)
        optimizer.step()
        optimizer.zero_grad()


def tail_dropped(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    """Update after three parts; the gradients of the fourth, the tail, are thrown away."""
    backward(net, inputs, labels, passes=3)
    hvd.average_metrics(len(labels), loss=0.0)  # a call of all ranks before the gradients are used
    if number == 2:
        clip(net)
        optimizer.step()
    if number >= 2:
        optimizer.zero_grad(set_to_none=number == 2)


def tail_dropped_later(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    """As ``tail_dropped``, but it is the next epoch that begins anew."""
    if number == 0:
        net.zero_grad()
    backward(net, inputs, labels, passes=3)
    if number == 2:
        clip(net)
        optimizer.step()
        net.zero_grad()


def zeroed_by_the_model(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    net.zero_grad()
    backward(net, inputs, labels)
    clip(net)
    optimizer.step()


def zeroed_in_place(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    """By a module around the net, which a strategy knows nothing of."""
    torch.nn.ModuleList([net]).zero_grad(set_to_none=False)
    backward(net, inputs, labels)
    clip(net)
    optimizer.step()


def two_passes(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    optimizer.zero_grad()
    loss_of(net, inputs, labels).backward()
    (net(inputs).square().sum(1).mean() * 0.1).backward()
    optimizer.step()


def summed_together(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    """Sum the gradients of three passes at once."""
    optimizer.zero_grad()
    with hvd.no_sync():
        (loss_of(net, inputs, labels) * 0.3).backward()
        (net(inputs).square().sum(1).mean() * 0.1).backward()
    (loss_of(net, inputs, labels) * 0.7).backward()
    clip(net)
    optimizer.step()


def summed_beside_others(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    """Sum two passes at once, beside one that was summed by itself before."""
    optimizer.zero_grad()
    (net(inputs).square().sum(1).mean() * 0.1).backward()
    with hvd.no_sync():
        (loss_of(net, inputs, labels) * 0.3).backward()
    (loss_of(net, inputs, labels) * 0.7).backward()
    clip(net)
    optimizer.step()


def scaled(net: Any, optimizer: Any, inputs: Any, labels: Any, number: int) -> None:
    """Let a loss scaler look at the gradients; in steps 0 and 2 the scaled ones overflow."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100 if number % 2 == 0 else 1024.0)
    optimizer.zero_grad()
    scaler.scale(loss_of(net, inputs, labels) * 2.0**924).backward()
    scaler.unscale_(optimizer)
    clip(net)
    scaler.step(optimizer)


def adversarial() -> None:
    """Train two networks with an optimizer each; one's backward pass reaches both."""

    def run(maker: Any, discriminator: Any, first: Any, second: Any, parts: Any) -> None:
        for part in parts:
            real = x[part.indices]
            first.zero_grad()
            fake = maker(real)
            (discriminator(fake.detach()).mean() - discriminator(real[:, :3]).mean()).backward()
            first.step()
            second.zero_grad()
            (-discriminator(maker(real)).mean()).backward()
            second.step()

    def networks() -> list[Any]:
        torch.manual_seed(5)
        return [torch.nn.Linear(5, 3).double(), torch.nn.Linear(3, 1).double()]

    single = networks()
    run(*single, sgd(single[1]), sgd(single[0]), Shards(SAMPLES, BATCH, seed=3).epoch(0))
    other = adapter("pytorch", strategy)
    other.initialize()
    maker, discriminator = networks()
    discriminator, first = other.distribute_optimizer(discriminator, sgd(discriminator))
    maker, second = other.distribute_optimizer(maker, sgd(maker))
    shards = other.shard_data(SAMPLES, global_batch=BATCH, seed=3)
    run(maker, discriminator, first, second, shards.epoch(0))
    for mine, theirs in zip((maker, discriminator), single, strict=True):
        expect_model(other, mine, theirs)


def one_model_after_the_other() -> None:
    """As in a cross-validation: the flags of the last update count, and models are released."""
    other = adapter("pytorch", strategy)
    other.initialize()
    other.__class__ = type("Saving", (type(other),), {"is_saving": True})
    kept, held = [], []
    for saving in (True, False):
        type(other).is_saving = saving  # when the last update of this model is made
        net = Net()
        kept.append(weakref.ref(net))
        net, optimizer = other.distribute_optimizer(net, sgd(net))
        for part in other.shard_data(SAMPLES, global_batch=BATCH).epoch(0):
            optimizer.zero_grad()
            loss_of(net, x[part.indices], y[part.indices]).backward()
            optimizer.step()
        assert other.flags_agreed.saving == saving
        other.check_replicas(net, optimizer)
        held.append((net, optimizer))
    assert len(other.strategy.gradient_sums) == 2 * (size > 1)
    held.clear()
    del net, optimizer
    gc.collect()
    assert [reference() for reference in kept] == [None, None]
    assert not other.strategy.gradient_sums


def misuse(folder: Path) -> None:
    net = Net()
    optimizer = sgd(net)
    expect_error(lambda: hvd.shard_data([1, 2], global_batch=1), "not a list", "len(")  # type: ignore[arg-type]
    expect_error(lambda: hvd.broadcast_state(net.state_dict()), "OrderedDict", "torch.nn.Module")
    expect_error(lambda: hvd.save_checkpoint(folder, net, optimizer, state={}), '"step": 120')
    state = {"step": 1, "best": torch.ones(2)}
    expect_error(
        lambda: hvd.save_checkpoint(folder, net, optimizer, state=state), "state['best']", "JSON"
    )
    file = folder / "model.pt"
    state = {"step": 1, "note": "x"}
    expect_error(lambda: hvd.save_checkpoint(file, net, optimizer, state=state), "model.pt", "file")
    assert not file.exists()

    hvd.broadcast_state(net, optimizer)
    hvd.save_checkpoint(folder / "c", net, optimizer, state=state)
    again = Net()
    torch.nn.init.zeros_(again.layers[0].weight)
    found = hvd.resume(folder / "c", again, sgd(again))
    assert found and (found["step"], found["note"]) == (1, "x")
    assert torch.equal(again.layers[0].weight, net.layers[0].weight)
    assert hvd.resume(folder / "none", again, sgd(again)) is None
    if size > 1:
        with torch.no_grad():
            again.layers[0].bias[0] += rank
        before = sorted(path.name for path in (folder / "c").glob("step-*"))
        expect_error(
            lambda: hvd.save_checkpoint(folder / "c", again, optimizer, state={"step": 2}),
            *("differs from rank 0's", "nothing was saved", "layers.0.bias"),
            kind=HvdtrainError,
        )
        assert sorted(path.name for path in (folder / "c").glob("step-*")) == before


class WideNet(Net):
    """36 MB of weights and momenta: a thread does not write them within an update."""

    def __init__(self) -> None:
        super().__init__()
        widths = [(5, 1500), (1500, 1500), (1500, 3)]
        self.layers = torch.nn.Sequential(*(torch.nn.Linear(*pair) for pair in widths))
        self.double()


def saved_in_the_background(folder: Path) -> None:
    """What is written is the state at the call, although updates go on."""
    net = WideNet()
    net, optimizer = hvd.distribute_optimizer(net, torch.optim.SGD(net.parameters(), 0.01, 0.9))
    shards = hvd.shard_data(SAMPLES, global_batch=size)

    def updates() -> Iterator[None]:
        for part in (part for epoch in range(20) for part in shards.epoch(epoch)):
            optimizer.zero_grad()
            loss_of(net, x[part.indices], y[part.indices]).backward()
            optimizer.step()
            yield

    expect_snapshot(hvd, folder, net, optimizer, updates())


def read_ahead() -> None:
    """A loader that draws from the shards itself is found at its first backward pass."""
    net = Net()
    net, kept = hvd.distribute_optimizer(net, sgd(net))
    shards = hvd.shard_data(SAMPLES, global_batch=size, seed=3)
    sampler = (part.indices.tolist() for part in shards.epoch(0))
    for inputs, labels in DataLoader(TensorDataset(x, y), batch_sampler=sampler, num_workers=1):
        expect_error(loss_of(net, inputs, labels).backward, "parts were drawn", "batch_sampler")
        break
    net = Net()
    net, kept = hvd.distribute_optimizer(net, sgd(net))
    shards = hvd.shard_data(SAMPLES, global_batch=BATCH)
    expect_error(loss_of(net, x, y).backward, "current part", "shards.step(part)")
    with_too_few = shards.batches(0, [1])
    expect_error(lambda: list(with_too_few), "ended after 1", "batch_sampler")
    assert isinstance(kept, torch.optim.SGD)


def without_a_pass() -> None:
    """Leave out the pass on a stand-in, which the step reports."""
    net = Net()
    net, optimizer = hvd.distribute_optimizer(net, sgd(net))
    for part in hvd.shard_data(size - 1, global_batch=size - 1).epoch(0):
        optimizer.zero_grad()
        if part.count:
            loss_of(net, x[part.indices], y[part.indices]).backward()
        optimizer.step()


def save_on_rank_zero_alone(folder: Path) -> None:
    """Never returns: the other ranks go on to the next sum of gradients."""
    net = Net()
    net, optimizer = hvd.distribute_optimizer(net, sgd(net))
    for part in hvd.shard_data(SAMPLES, global_batch=size).epoch(0):
        optimizer.zero_grad()
        loss_of(net, x[part.indices], y[part.indices]).backward()
        optimizer.step()
        if world.is_writer:
            hvd.save_checkpoint(folder, net, optimizer, state={"step": 1})


folder = sys.argv[1]
if sys.argv[2:] == ["alone"]:
    save_on_rank_zero_alone(Path(folder))
elif sys.argv[2:] == ["skipped"]:
    without_a_pass()
elif __name__ == "__main__":
    train(clipped)
    train(clipped, loader=True)
    train(zeroed_at_the_end)
    train(accumulated)
    train(tail_dropped)
    train(tail_dropped_later)
    train(zeroed_by_the_model)
    train(zeroed_in_place)
    train(two_passes)
    train(summed_together)
    train(summed_beside_others)
    train(scaled)
    adversarial()
    one_model_after_the_other()
    misuse(Path(folder))
    saved_in_the_background(Path(folder, "background"))
    if size > 1:
        read_ahead()
    Path(folder, f"{rank}-of-{size}").touch()
