"""Run on every rank by test_adapter.py: optimizers of PyTorch and of users, and their options.

Each loop is run by hand, too, in this process over the whole global batches. Of 11 samples in
global batches of 5 parts are uneven; rows of 5 and 3 are, too, and a rank may have none.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from hvdtrain.adapters.select import adapter
from hvdtrain.errors import HvdtrainError
from hvdtrain.steps.sharding import Shards
from hvdtrain.tasks.optimizers_pytorch import Lamb, Lars
from tests.parallel.expect import expect_error

SAMPLES, BATCH = 11, 5
strategy, folder = sys.argv[1], Path(sys.argv[2])
hvd = adapter("pytorch", strategy)
world = hvd.initialize()
hvd.pin_device()
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
x, y = torch.randn(SAMPLES, 4), torch.randn(SAMPLES, 3)
warnings: list[str] = []
handler = logging.Handler()
handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
logging.getLogger("hvdtrain").addHandler(handler)

Make = Callable[[Any], torch.optim.Optimizer]


def net(*, bias: bool = True, dtype: Any = None) -> Any:
    torch.manual_seed(1)
    first, last = torch.nn.Linear(4, 5, bias=bias), torch.nn.Linear(5, 3, bias=bias)
    return torch.nn.Sequential(first, torch.nn.Tanh(), last).to(dtype)


def trained(make: Make, model: Any, *, alone: bool = False, reads: Any = None) -> Any:
    """Return the weights after two epochs of this rank's parts, or of the global batches."""
    optimizer = make(model.parameters())
    used, shards = model, Shards(SAMPLES, BATCH)
    if not alone:
        used, optimizer = hvd.distribute_optimizer(model, optimizer)
        hvd.broadcast_state(used, optimizer)
        shards = hvd.shard_data(SAMPLES, global_batch=BATCH)
    for epoch in range(2):
        for part in shards.epoch(epoch):
            optimizer.zero_grad()
            inputs = x[part.indices].to(next(model.parameters()).dtype)
            (used(inputs) - y[part.indices]).abs().square().mean().backward()
            if reads:
                reads(model)
            optimizer.step()
    if alone:
        return {name: value.numpy() for name, value in model.state_dict().items()}
    hvd.save_checkpoint(folder, used, optimizer, state={"step": 1})
    return hvd.export_state(used, None).model


def equal(make: Make, *, bias: bool = True, dtype: Any = None, reads: Any = None) -> None:
    both = [
        trained(make, net(bias=bias, dtype=dtype), alone=alone, reads=reads)
        for alone in (True, False)
    ]
    worst = max(abs(both[0][name] - both[1][name]).max() for name in both[0])
    assert worst < (1e-5 if dtype else 1e-12), (make, worst)


class Stepped(torch.optim.SGD):
    """An elementwise optimizer of a user, by the step of its base class."""

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def optimizers() -> None:
    """What is known is exact or refused, what is not is exact and warned of, once."""
    kinds = "Adafactor Adagrad Adadelta Adam AdamW Adamax ASGD NAdam RAdam Rprop RMSprop SGD Muon"
    refused = {"Adafactor", "Muon", "Rprop"} if strategy == "fsdp" else set()
    for name in kinds.split():
        kind, muon = getattr(torch.optim, name), name == "Muon"

        def make(values: Any, kind: Any = kind) -> Any:
            return kind(values, lr=0.02)

        if name in refused:
            model = net(bias=not muon)
            words = (name, "--strategy fsdp", "use --strategy zero, ddp")
            expect_error(
                lambda m=model, f=make: hvd.distribute_optimizer(m, f(m.parameters())), *words
            )
        else:
            equal(make, bias=not muon)
    model = net()
    lbfgs = torch.optim.LBFGS(model.parameters())
    words = ("LBFGS", "all parameters", "use --strategy ddp, horovod or mpi")
    expect_error(lambda: hvd.distribute_optimizer(model, lbfgs), *words)
    for fused in (torch.optim.SGD, torch.optim.Adagrad):
        equal(lambda values, kind=fused: kind(values, lr=0.1, fused=True))
    for own in (Lars, Lamb):
        equal(lambda values, kind=own: kind(values, lr=0.1))
    assert not warnings


def begun(values: Any) -> torch.optim.Optimizer:
    """Return an optimizer that has made an update, and so has a state, before step 5."""
    parameters = list(values)
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def of_a_user() -> None:
    """An optimizer whose step calls that of its base class: PyTorch calls the hooks for each."""
    sgd_of([torch.zeros(1)])  # from now on
    for _ in range(2):
        equal(lambda values: Stepped(values, lr=0.1, momentum=0.9))
    if strategy in ("fsdp", "zero") and world.size > 1:  # this one is elementwise
        assert len(warnings) == world.is_writer and all("Stepped" in text for text in warnings)
    else:
        assert not warnings
    equal(begun)


def numbers() -> None:
    """Numbers that are read of gradients are those of the whole."""

    def clip(model: Any) -> None:
        for value in model.parameters():
            value.grad.mul_(min(1.0, 0.05 / value.grad.norm().item()))
            value.grad.mul_(0.1 / float(value.grad.abs().max()))
            assert bool(value.grad.isfinite().all())
        norm = clip_grad_norm_(model.parameters(), 0.05, norm_type=float("inf")).item()
        for value in model.parameters():
            value.grad.mul_(norm + value.grad.square().sum().item())

    equal(sgd_of, reads=clip)
    model = net()
    model.scale = torch.nn.Parameter(torch.full((1,), 0.5))  # with fsdp on one rank
    used, _ = hvd.distribute_optimizer(model, sgd_of(model.parameters()))
    assert (used.module if strategy == "zero" else used).scale.item() == 0.5


def sgd_of(values: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(values, lr=0.1)


def unusual_parameters() -> None:
    """They are trained as by one process, or refused with what to do."""
    model = net()
    model.empty = torch.nn.Parameter(torch.empty(0))
    sgd = sgd_of(model.parameters())
    if strategy == "fsdp":
        expect_error(lambda: hvd.distribute_optimizer(model, sgd), "which is empty")
    if strategy in ("ddp", "zero") and world.size > 1:
        equal(sgd_of, dtype=torch.complex64)
        model = net()
        model[1].forward = lambda values: checkpoint(torch.tanh, values, use_reentrant=True)
        used, _ = hvd.distribute_optimizer(model, sgd_of(model.parameters()))
        expect_error(lambda: used(x), "reentrant checkpoint", "use_reentrant=False")
    elif world.size > 1:
        model = net(dtype=torch.complex64)
        sgd = sgd_of(model.parameters())
        expect_error(lambda: hvd.distribute_optimizer(model, sgd), "cannot sum torch.complex64")
    model = net()
    model.register_buffer("turn", torch.ones(2, dtype=torch.complex128))
    sgd = sgd_of(model.parameters())
    expect_error(lambda: hvd.distribute_optimizer(model, sgd), "turn", "complex128", "view_as_real")


def options_of_rank_0() -> None:
    """Steps 5 and 6 send the learning rate etc., also new ones; a later difference is named."""
    model, mine = net(), world.rank == 0
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1 if mine else torch.tensor(0.5))
    if mine:
        optimizer.param_groups[0].update(betas=(0.5, 0.6), weight_decay=0.2, initial_lr=0.3)
    used, optimizer = hvd.distribute_optimizer(model, optimizer)
    names = ("lr", "betas", "weight_decay", "initial_lr")
    assert [optimizer.param_groups[0][name] for name in names] == [0.1, (0.5, 0.6), 0.2, 0.3]
    optimizer.param_groups[0]["lr"] = 0.4 if mine else 0.1
    hvd.broadcast_state(used, optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.4
    optimizer.param_groups[0]["lr"] = 0.1 if mine else 0.2
    save = lambda: hvd.save_checkpoint(folder / "no", used, optimizer, state={"step": 1})  # noqa: E731
    if world.size > 1:
        expect_error(
            save, "lr of group 0 of the optimizer", "options of the optimizer", kind=HvdtrainError
        )


def cycled(path: Path, first: int, last: int, momentum: float = 0.9, kind: Any = None) -> Any:
    """Train epochs under OneCycleLR, resumed if not the first; save at the end of the first two."""
    model = net()
    if kind is torch.optim.Adam:
        optimizer: Any = kind(model.parameters(), lr=0.1)
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 0.3, total_steps=13, max_momentum=momentum
    )
    used, optimizer = hvd.distribute_optimizer(model, optimizer)
    shards = hvd.shard_data(SAMPLES, global_batch=BATCH)
    (group,) = optimizer.param_groups
    state = hvd.resume(path, used, optimizer)
    assert bool(state) == bool(first)
    (group,) = optimizer.param_groups
    if state:
        cycle.load_state_dict(state["cycle"])
        group["lr"] = state["lr"]
        if momentum != 0.9:  # what the user has set for this run
            assert group["momentum"] == momentum
            return None
    for epoch in range(first, last):
        for part in shards.epoch(epoch):
            optimizer.zero_grad()
            (used(x[part.indices]) - y[part.indices]).square().mean().backward()
            optimizer.step()
            cycle.step()
    if last == 2:
        kept = {"step": 2, "lr": group["lr"], "cycle": cycle.state_dict()}
        hvd.save_checkpoint(path, used, optimizer, state=kept)
    return hvd.export_state(used, None).model


def schedules() -> None:
    """A resumed run has the schedule's momentum, or beta1, unless the user has set another."""
    for kind in (torch.optim.SGD, torch.optim.Adam):
        path = folder / kind.__name__
        uncut = cycled(path, 0, 4, kind=kind)
        cycled(path, 0, 2, kind=kind)
        cut = cycled(path, 2, 4, kind=kind)
        assert all((uncut[name] == cut[name]).all() for name in uncut)
    cycled(folder / "SGD", 2, 4, momentum=0.8)


if strategy in ("fsdp", "zero") and world.size > 1:
    optimizers()
    numbers()
of_a_user()
unusual_parameters()
options_of_rank_0()
schedules()
(folder / f"{world.rank}-of-{world.size}").touch()
