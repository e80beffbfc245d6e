"""Run on every rank by test_adapter.py: gradients from whatever source, and modules with a state.

5 samples in global batches of 4: the second batch is a stand-in on all ranks but one. Each case is
run by hand, too, in this process over the whole global batches: parameters and buffers must be
those.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.func import functional_call, grad, vmap
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils.checkpoint import checkpoint

from hvdtrain.adapters.select import adapter
from hvdtrain.steps.sharding import Part, Shards
from tests.parallel.expect import expect_error, expect_model

SAMPLES, BATCH, EPOCHS = 5, 4, 3
strategy = sys.argv.pop(1)
hvd = adapter("pytorch", strategy)
world = hvd.initialize()
hvd.pin_device()

torch.manual_seed(0)
x = torch.randn(SAMPLES, 4).double()
y = torch.randn(SAMPLES, 4).double()

Step = Callable[[Any, Any, Part], None]


class Net(torch.nn.Module):
    """A layer that is used twice, under a reentrant checkpoint if ``reentrant``."""

    reentrant = False

    def __init__(self, *others: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.twice, self.last = (torch.nn.Linear(4, 4) for _ in range(3))
        self.others = torch.nn.Sequential(*(make() for make in others))
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        for _ in range(2):
            hidden = (
                checkpoint(self.twice, hidden, use_reentrant=True)
                if self.reentrant
                else self.twice(hidden)
            )
        return self.last(self.others(torch.tanh(hidden)))


class Counter(torch.nn.Module):
    """Depends on the number of its forward passes, kept in buffers and in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros((), dtype=torch.int64))
        self.register_buffer("real", torch.zeros(()))
        self.number = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.whole, self.real, self.number = self.whole + 1, self.real + 1, self.number + 1
        return inputs / (1 + 0.1 * (self.whole + self.real + self.number))


def loss_of(net: Any, part: Part) -> torch.Tensor:
    return (net(x[part.indices]) - y[part.indices]).square().mean()


def whole(net: Any) -> Any:
    """Return the model itself: passes through it bypass the wrapper of a strategy."""
    return getattr(net, "module", net)


def assign(net: Any, gradients: Any) -> None:
    for parameter, gradient in zip(net.parameters(), gradients, strict=True):
        parameter.grad = gradient


def backward(net: Any, optimizer: Any, part: Part) -> None:
    optimizer.zero_grad()
    loss_of(net, part).backward()
    clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()


def by_autograd(net: Any, optimizer: Any, part: Part) -> None:
    assign(net, torch.autograd.grad(loss_of(whole(net), part), list(net.parameters())))
    optimizer.step()


def merged(net: Any, optimizer: Any, part: Part) -> None:
    """The gradients of two tasks, one of them orthogonal to the other, clipped."""
    parameters = list(net.parameters())
    first = torch.autograd.grad(loss_of(whole(net), part), parameters)
    second = torch.autograd.grad(whole(net)(x[part.indices]).square().mean(), parameters)
    assign(net, [a + 0.1 * b for a, b in zip(first, second, strict=True)])
    if world.size > 1 and net is not expected:
        optimizer.synchronize()
    clip_grad_norm_(parameters, 0.5)
    optimizer.step()


def per_sample(net: Any, optimizer: Any, part: Part) -> None:
    model = whole(net)

    def loss(values: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (functional_call(model, values, (a[None],)) - b[None]).square().mean()

    values = {name: value.detach() for name, value in model.named_parameters()}
    rows = vmap(grad(loss), (None, 0, 0))(values, x[part.indices], y[part.indices])
    assign(net, [row.mean(0) for row in rows.values()])
    optimizer.step()


def in_addition(net: Any, optimizer: Any, part: Part) -> None:
    """A pass of ``backward``, and a gradient that is added to one of its sums, in place or not."""
    optimizer.zero_grad(set_to_none=False)
    loss_of(net, part).backward()
    last = whole(net).last
    extra = torch.autograd.grad(whole(net)(x[part.indices]).mean(), list(last.parameters()))
    last.weight.grad = last.weight.grad + extra[0]
    last.bias.grad = last.bias.grad + extra[1]
    optimizer.step()


def without_samples_of_some(net: Any, optimizer: Any, part: Part) -> None:
    """A gradient that only the rank with the first sample has."""
    optimizer.zero_grad()
    whole(net).first.weight.grad = None
    last = whole(net).last.bias
    if part.count and 0 in part.indices:
        share = 1 / part.global_count if part.global_count == part.count else 1 / part.count
        last.grad = torch.ones_like(last) * share
    optimizer.step()


def written_in_place(net: Any, optimizer: Any, part: Part) -> None:
    """Several steps of a part: a step has used its sums, which are then overwritten."""
    for clips in (False, True, False):
        gradients = torch.autograd.grad(loss_of(whole(net), part), list(net.parameters()))
        for parameter, gradient in zip(net.parameters(), gradients, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            parameter.grad.copy_(gradient)
        if clips:
            if world.size > 1 and net is not expected:
                optimizer.synchronize()
            clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()


def bypassing(net: Any, optimizer: Any, part: Part) -> None:
    optimizer.zero_grad()
    loss_of(whole(net), part).backward()
    clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()


def bypassing_in_part(net: Any, optimizer: Any, part: Part) -> None:
    """One pass through the wrapper and one beside it, which adds to the same gradients."""
    optimizer.zero_grad()
    loss_of(net, part).backward()
    whole(net).last(x[part.indices]).square().mean().backward()
    clip_grad_norm_(net.parameters(), 0.5)
    optimizer.step()


def in_a_closure(net: Any, optimizer: Any, part: Part) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(net, part)
        loss.backward()
        return loss

    optimizer.step(closure)


def assigned_in_a_closure(net: Any, optimizer: Any, part: Part) -> None:
    def closure() -> torch.Tensor:
        loss = loss_of(whole(net), part)
        assign(net, torch.autograd.grad(loss, list(net.parameters())))
        return loss

    optimizer.step(closure=closure)


def summed_locally(net: Any, optimizer: Any, part: Part) -> None:
    """Passes within ``no_sync`` alone are summed at the step."""
    optimizer.zero_grad()
    with hvd.no_sync():
        loss_of(net, part).backward()
        loss_of(net, part).backward()
    optimizer.step()


class Reentrant(Net):
    reentrant = True


def normalized() -> torch.nn.Module:
    return spectral_norm(torch.nn.Linear(4, 4))


def normalized_of_old() -> torch.nn.Module:
    return torch.nn.utils.spectral_norm(torch.nn.Linear(4, 4))


def train(model: Callable[[], Any], step: Step, expected: Any) -> None:
    """Run ``step`` over all ranks, and compare with the model that one process has trained."""
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net, optimizer = hvd.distribute_optimizer(net, optimizer)
    shards = hvd.shard_data(SAMPLES, global_batch=BATCH, seed=3)
    for epoch in range(EPOCHS):
        for part in shards.epoch(epoch):
            step(net, optimizer, part)
    hvd.average_metrics(1)
    hvd.check_replicas(net, optimizer)
    expect_model(hvd, net, expected, step.__name__)


MODELS: dict[str, Callable[[], Any]] = {
    "plain": Net,
    "reentrant": Reentrant,
    "spectral": lambda: Net(normalized, normalized_of_old),
    "counter": lambda: Net(Counter),
}
STEPS: list[Step] = [
    *(backward, by_autograd, merged, per_sample, in_addition, without_samples_of_some),
    *(
        written_in_place,
        bypassing,
        bypassing_in_part,
        in_a_closure,
        assigned_in_a_closure,
        summed_locally,
    ),
]
CASES = [("plain", step) for step in STEPS] + [
    (name, step) for name in list(MODELS)[1:] for step in (backward, in_a_closure)
]
# PyTorch's own errors: its parameters are not those of the pass.
UNSUPPORTED = {
    "fsdp": {
        *(merged, per_sample, in_addition, without_samples_of_some, bypassing_in_part),
        *(written_in_place, assigned_in_a_closure),
    }
}


def refusal(name: str, step: Step) -> str:
    """Return what the strategy says of a case that it refuses."""
    if strategy == "fsdp" and step is by_autograd:
        return "cannot sum gradients that were assigned"
    if strategy == "fsdp" and step is summed_locally:
        return "make the last one before step() outside"
    if strategy == "zero" and step in (in_a_closure, assigned_in_a_closure):
        return "takes no closure"
    return ""


if __name__ == "__main__":
    folder, *names = sys.argv[1:]
    for name, step in CASES:
        if names and step.__name__ not in names:
            continue
        if step in UNSUPPORTED.get(strategy, ()):
            continue
        if name == "reentrant" and strategy in ("ddp", "zero"):
            continue  # refused: see optimizers.py
        expected = MODELS[name]()
        plain = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9)
        parts = Shards(SAMPLES, BATCH, seed=3)
        for epoch in range(EPOCHS):
            for part in parts.epoch(epoch):
                step(expected, plain, part)
        if world.is_writer:
            print(name, step.__name__, flush=True)
        if world.size > 1 and (words := refusal(name, step)):
            expect_error(functools.partial(train, MODELS[name], step, expected), words)
        else:
            train(MODELS[name], step, expected)
    Path(folder, f"{world.rank}-of-{world.size}").touch()
