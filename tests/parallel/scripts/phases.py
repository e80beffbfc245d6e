"""Run on every rank by test_adapter.py: models trained in phases, by several optimizers, in part.

Each loop is run by hand, too, in this process over the whole global batches: the weights must be
those. 11 samples in global batches of 5 leave stand-ins at the end of an epoch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_

from hvdtrain.adapters.select import adapter
from hvdtrain.steps.checkpoint import load_newest
from hvdtrain.steps.sharding import Part, Shards
from tests.parallel.expect import expect_error, expect_model

SAMPLES, BATCH = 11, 5
strategy = sys.argv.pop(1)
hvd = adapter("pytorch", strategy)
world = hvd.initialize()
hvd.pin_device()

torch.manual_seed(0)
x = torch.randn(SAMPLES, 4, dtype=torch.float64)
y = torch.randn(SAMPLES, 1, dtype=torch.float64)

Distribute = Callable[[Any, Any], tuple[Any, Any]]
Epoch = Callable[[int], Iterable[Part]]
Case = Callable[[Distribute, Epoch], Any]


def net() -> Any:
    torch.manual_seed(1)
    layers = (torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return torch.nn.Sequential(*layers).double()


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def loss_of(model: Any, part: Part) -> torch.Tensor:
    return (model(x[part.indices]) - y[part.indices]).square().mean()


def backward(model: Any, part: Part) -> None:
    loss_of(model, part).backward()


def update(model: Any, optimizer: Any, parts: Iterable[Part], clips: Any = None) -> None:
    for part in parts:
        optimizer.zero_grad()
        backward(model, part)
        if clips is not None:
            clip_grad_norm_(clips.parameters(), 0.1)
        optimizer.step()


def an_optimizer_per_phase(distribute: Distribute, epoch: Epoch) -> Any:
    """Distribute the model that the previous call returned, or the one that it was given."""
    model = used = net()
    for number in range(4):
        optimizer = sgd(used)
        used, optimizer = distribute(model if number == 2 else used, optimizer)
        update(used, optimizer, epoch(number))
    return used


def the_head_first(distribute: Distribute, epoch: Epoch) -> Any:
    model = used = net()
    used, head = distribute(used, sgd(model[2]))
    update(used, head, epoch(0), clips=model)
    used, optimizer = distribute(used, sgd(model))
    update(used, optimizer, epoch(1), clips=model)
    return used


def frozen_at_first(distribute: Distribute, epoch: Epoch) -> Any:
    """Train a frozen layer from the second epoch on, and freeze another one."""
    model = used = net()
    model[0].requires_grad_(False)
    used, optimizer = distribute(used, sgd(model))
    update(used, optimizer, epoch(0), clips=model)
    model[0].requires_grad_(True)
    model[2].requires_grad_(False)
    update(used, optimizer, epoch(1), clips=model)
    return used


def distributed_when_unfrozen(distribute: Distribute, epoch: Epoch) -> Any:
    model = used = net()
    model[0].requires_grad_(False)
    for number in range(3):
        used, optimizer = distribute(used, sgd(model))
        update(used, optimizer, epoch(number), clips=model)
        model[0].requires_grad_(number == 0)
    return used


def a_group_added(distribute: Distribute, epoch: Epoch) -> Any:
    """Of a layer that had gradients already, which were only clipped with."""
    model = used = net()
    used, optimizer = distribute(used, sgd(model[2]))
    update(used, optimizer, epoch(0), clips=model)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
    update(used, optimizer, epoch(1), clips=model)
    return used


def a_frozen_group_added(distribute: Distribute, epoch: Epoch) -> Any:
    model = used = net()
    model[0].requires_grad_(False)
    used, optimizer = distribute(used, sgd(model[2]))
    update(used, optimizer, epoch(0), clips=model)
    model[0].requires_grad_(True)
    optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.2})
    update(used, optimizer, epoch(1), clips=model)
    return used


def others_are_zeroed_by_the_model(distribute: Distribute, epoch: Epoch) -> Any:
    """Accumulate two parts; the optimizer has the head only, all gradients are clipped."""
    model = used = net()
    used, optimizer = distribute(used, sgd(model[2]))
    for number in range(3):
        used.zero_grad()
        for index, part in enumerate(epoch(number)):
            backward(used, part)
            if index % 2:
                clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
                used.zero_grad()
    return used


def two_optimizers(distribute: Distribute, epoch: Epoch) -> Any:
    """Distribute each with the same model, and update one twice as often."""
    model = used = net()
    used, first = distribute(used, sgd(model[2]))
    used, second = distribute(used, sgd(model[0]))
    assert distribute(model, torch.optim.SGD(used.parameters()))[0] is used
    used, second = distribute(used, sgd(model[0]))
    used, first = distribute(used, sgd(model[2]))
    for number in range(2):
        for index, part in enumerate(epoch(number)):
            first.zero_grad()
            loss_of(used, part).backward()
            clip_grad_norm_(model.parameters(), 0.1)
            first.step()
            if index % 2:
                second.step()
                second.zero_grad()
    return used


def two_passes(distribute: Distribute, epoch: Epoch) -> Any:
    """Make two backward passes after one forward pass."""
    used = net()
    used, optimizer = distribute(used, sgd(used))
    for part in epoch(0):
        optimizer.zero_grad()
        output = used(inputs := x[part.indices].requires_grad_())
        # The gradients of the input alone are no pass.
        torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        (output - y[part.indices]).square().mean().backward(retain_graph=True)
        torch.autograd.grad(output.sum(), inputs, retain_graph=True)
        output.abs().mean().backward()
        optimizer.step()
    return used


def two_forward_passes(distribute: Distribute, epoch: Epoch) -> Any:
    used = net()
    used, optimizer = distribute(used, sgd(used))
    for part in epoch(0):
        optimizer.zero_grad()
        outputs = [used(x[part.indices]) for _ in range(2)]
        for output in outputs:
            (output - y[part.indices]).square().mean().backward()
        optimizer.step()
    return used


class Words(torch.nn.Module):
    """An embedding whose gradients are sparse, tied to no other layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.table, self.head = torch.nn.Embedding(6, 3, sparse=True), torch.nn.Linear(3, 1)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((inputs[:, 0] * 9).long() % 6))


def sparse_gradients(distribute: Distribute, epoch: Epoch) -> Any:
    """Also accumulated over parts."""
    used: Any = Words()
    used, optimizer = distribute(used, sgd(used))
    for number in range(2):
        update(used, optimizer, epoch(number))
        for part in epoch(number):
            backward(used, part)
    optimizer.step()
    return used


def refused() -> None:
    """Step 5 tells what would fail, or train nothing, later."""
    model = net()
    optimizer = sgd(model.requires_grad_(False))
    expect_error(lambda: hvd.distribute_optimizer(model, optimizer), "nothing would be trained")
    words = Words()
    adam = torch.optim.SparseAdam(words.table.parameters())
    expect_error(lambda: hvd.distribute_optimizer(words, adam), "SparseAdam", "torch.optim.Adam")
    model = net()
    model[2].to(torch.bfloat16)
    words_of_it = ("2.weight", "bfloat16", "torch.autocast")
    expect_error(lambda: hvd.distribute_optimizer(model, sgd(model)), *words_of_it)
    model = net()
    model[1] = type("Counting", (torch.nn.Tanh,), {"get_extra_state": lambda _: {"calls": 3}})()
    words_of_it = ("1._extra_state", "dict", "only tensors")
    expect_error(lambda: hvd.distribute_optimizer(model, sgd(model)), *words_of_it)


class Projection(torch.nn.Linear):
    """A linear layer with buffers that are in no checkpoint, another one on each rank."""

    def __init__(self) -> None:
        super().__init__(4, 1)
        random = torch.randn(4, generator=torch.Generator().manual_seed(world.rank))
        self.register_buffer("random", random, persistent=False)
        self.register_buffer("shared", torch.ones(1, dtype=torch.int64).expand(3), persistent=False)


def unsaved_buffers(folder: Path) -> None:
    model: Any = Projection()
    used, optimizer = hvd.distribute_optimizer(model, sgd(model))
    hvd.broadcast_state(used, optimizer)
    expected = torch.randn(4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(model.random, expected)
    hvd.save_checkpoint(folder, used, optimizer, state={"step": 1})
    saved = load_newest(folder)
    assert saved and set(saved.model) == {"weight", "bias"}


def lists_in_the_state(folder: Path) -> None:
    """LBFGS is trained as in one process, and saved without its state."""
    both = [net(), net()]
    optimizers = [torch.optim.LBFGS(one.parameters(), max_iter=3) for one in both]
    model, optimizers[0] = hvd.distribute_optimizer(both[0], optimizers[0])
    for used, optimizer, shards in (
        (model, optimizers[0], hvd.shard_data(SAMPLES, global_batch=SAMPLES)),
        (both[1], optimizers[1], Shards(SAMPLES, SAMPLES)),
    ):
        for part in shards.epoch(0):

            def closure(used: Any = used, optimizer: Any = optimizer, part: Part = part) -> Any:
                optimizer.zero_grad()
                backward(used, part)
                return torch.zeros(())

            optimizer.step(closure)
    worst = max((a - b).abs().max() for a, b in zip(*(m.parameters() for m in both), strict=True))
    assert worst < 1e-12
    state = {"step": 1}
    expect_error(
        lambda: hvd.save_checkpoint(folder, model, optimizers[0], state=state),
        *("LBFGS: old_dirs", "a list", "take None as the optimizer"),
    )
    hvd.save_checkpoint(folder, model, None, state=state)


def replaced() -> None:
    """The optimizer of an earlier phase is told from the one that is used now."""
    model = net()
    used, optimizer = hvd.distribute_optimizer(model, sgd(model))
    hvd.distribute_optimizer(used, torch.optim.SGD(used.parameters()))
    expect_error(optimizer.step, "same parameters", "use that one")


CASES: list[Case] = [
    *(an_optimizer_per_phase, the_head_first, frozen_at_first, distributed_when_unfrozen),
    *(a_group_added, a_frozen_group_added, others_are_zeroed_by_the_model, two_optimizers),
    *(two_passes, two_forward_passes, sparse_gradients),
]
# What strategies refuse that sum what was trained in step 5 alone.
LATE = ("trained in step 5", "distribute_optimizer again")
REFUSED: dict[str, dict[Case, tuple[str, ...]]] = {
    "ddp": {frozen_at_first: LATE, a_frozen_group_added: LATE}
}
REFUSED["zero"] = {**REFUSED["ddp"], a_group_added: LATE}


def compare(case: Case) -> None:
    single = case(lambda *both: both, Shards(SAMPLES, BATCH, seed=3).epoch)
    shards = hvd.shard_data(SAMPLES, global_batch=BATCH, seed=3)
    if words := REFUSED.get(strategy, {}).get(case):
        return expect_error(lambda: case(hvd.distribute_optimizer, shards.epoch), *words)
    model = case(hvd.distribute_optimizer, shards.epoch)
    hvd.check_replicas(model)
    return expect_model(hvd, model, single, case.__name__)


names = sys.argv[2:]
for case in CASES:
    if not names or case.__name__ in names:
        compare(case)
if not names:
    refused()
    unsaved_buffers(Path(sys.argv[1], "buffers"))
    if strategy in ("horovod", "mpi"):
        replaced()
        lists_in_the_state(Path(sys.argv[1], "lbfgs"))
Path(sys.argv[1], f"{world.rank}-of-{world.size}").touch()
