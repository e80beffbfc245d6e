"""On every rank, for test_weights.py: losses that are means over something else than samples.

    weighted_pytorch.py STRATEGY FOLDER

Each is compared with a plain loop of one process, in float64, which divides the sum of the losses
of an update by the sum of the counts. With 21 samples in global batches of five, parts are uneven,
and at the tail some are empty.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from hvdtrain import adapter
from hvdtrain.steps.sharding import Part, Shards
from tests.parallel.expect import expect_error

torch.set_default_dtype(torch.float64)
hvd: Any = adapter("pytorch", sys.argv[1])
world = hvd.initialize()
hvd.pin_device()

SAMPLES, BATCH, CLASSES = 21, 5, 3
draw = torch.Generator().manual_seed(3)
TOKENS = torch.randn(SAMPLES, 7, 6, generator=draw)  # sequences of vectors, or rows of pixels
WORDS = torch.randint(CLASSES, (SAMPLES, 7), generator=draw)
PADDING = torch.rand(SAMPLES, 7, generator=draw) < torch.rand(SAMPLES, 1, generator=draw)
PADDING[Shards(SAMPLES, BATCH).batch_sampler(0)[1]] = True  # no word in a whole global batch
WORDS[PADDING] = -100
CLASS = torch.randint(CLASSES, (SAMPLES,), generator=draw)
RARE = torch.tensor([0.2, 1.0, 3.5])
BOXES = torch.randint(0, 5, (SAMPLES,), generator=draw)  # their numbers; many have none

Term = tuple[torch.Tensor, torch.Tensor]  # the sum of the losses, and what to divide it by


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def words(model: nn.Module, at: torch.Tensor) -> Term:
    """The cross-entropy of the words that are no padding, as nn.CrossEntropyLoss has it."""
    output = model(TOKENS[at]).flatten(0, 1)
    return F.cross_entropy(output, WORDS[at].flatten(), reduction="sum"), (WORDS[at] >= 0).sum()


def classes(model: nn.Module, at: torch.Tensor) -> Term:
    """That of classes with weights, which nn.CrossEntropyLoss(weight) divides by their sum."""
    output = model(TOKENS[at]).mean(1)
    loss = F.cross_entropy(output, CLASS[at], RARE, reduction="sum")
    return loss, RARE[CLASS[at]].sum()


def pixels(model: nn.Module, at: torch.Tensor) -> Term:
    """The squared error of valid pixels of a segmentation."""
    valid = ~PADDING[at]
    error = (model(TOKENS[at])[..., 0] - TOKENS[at, :, 0].sin()).square()
    return (error * valid).sum(), valid.sum()


def boxes(model: nn.Module, at: torch.Tensor) -> Term:
    """The distance of boxes, of which images have none, one, or several."""
    output = model(TOKENS[at]).mean(1).abs().sum(1)
    return (output * BOXES[at]).sum(), BOXES[at].sum()


LOSSES: dict[str, Callable[[nn.Module, torch.Tensor], Term]] = {
    "words": words,
    "classes": classes,
    "pixels": pixels,
    "boxes": boxes,
}


def updates(shards: Shards, passes: int) -> Iterator[list[tuple[Part, bool]]]:
    """Yield the parts of each update, ``passes`` at most; the last may have fewer."""
    for epoch in range(2):
        parts: list[Any] = list(shards.parts(epoch))
        for start in range(0, len(parts), passes):
            yield parts[start : start + passes]


def plain(loss: Callable[..., Term], passes: int, clip: float) -> dict[str, torch.Tensor]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    for parts in updates(Shards(SAMPLES, BATCH), passes):
        optimizer.zero_grad()
        terms = [loss(model, torch.from_numpy(part.indices)) for part in parts]
        count = sum(count for _, count in terms)
        (sum(total for total, _ in terms) / max(count, 1e-300)).backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return dict(model.state_dict())


def weighted(loss: Callable[..., Term], passes: int, clip: float, clear: Any) -> dict[str, Any]:
    shards = hvd.shard_data(SAMPLES, global_batch=BATCH)
    model = net()
    model, optimizer = hvd.distribute_optimizer(
        model, torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9)
    )
    hvd.broadcast_state(model, optimizer)
    for parts in updates(shards, passes):
        clear(model, optimizer)
        for part in parts:
            with shards.step(part):
                total, count = loss(model, torch.from_numpy(part.indices))
                hvd.weight_loss(count)
                (total / count).backward()  # nan over nothing
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    hvd.check_replicas(model, optimizer)
    return dict(hvd.export_state(model, None).model)


def difference(mine: dict[str, Any], theirs: dict[str, torch.Tensor]) -> float:
    return max(float((torch.as_tensor(mine[name]) - theirs[name]).abs().max()) for name in theirs)


CLEARS: dict[str, Any] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "to zero": lambda model, optimizer: model.zero_grad(set_to_none=False),
}


def check_equality() -> None:
    worst = 0.0
    for name, loss in LOSSES.items():
        for passes, clip, clear in ((1, 0.0, "optimizer"), (2, 0.1, "model"), (3, 0.5, "to zero")):
            theirs = plain(loss, passes, clip)
            distance = difference(weighted(loss, passes, clip, CLEARS[clear]), theirs)
            assert distance < 1e-9, (name, passes, clip, clear, distance)
            worst = max(worst, distance)
    if world.is_writer:
        print(f"largest difference from one process: {worst:.1e}")


def trained() -> tuple[Shards, Any, Callable[[], None]]:
    """Return the shards, the optimizer, and a function that makes a backward pass."""
    shards = hvd.shard_data(SAMPLES, global_batch=4 * world.size)
    model = net()
    model, optimizer = hvd.distribute_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.3))
    return shards, optimizer, lambda: model(TOKENS[:2]).mean().backward()


def check_misuse() -> None:
    shards, optimizer, backward = trained()
    with shards.step(next(shards.parts(0))):
        for count in (-1, float("inf"), float("nan"), torch.ones(2), "many"):
            expect_error(lambda count=count: hvd.weight_loss(count), "must be a number")
        hvd.weight_loss(3)
        expect_error(hvd.no_sync, "cannot be combined with no_sync")
        backward()
        expect_error(backward, "weighs one backward pass")
    shards, optimizer, backward = trained()
    with shards.step(next(shards.parts(0))):
        hvd.weight_loss(3)
        backward()
        optimizer.step()
    with shards.step(next(shards.parts(0))):  # an unweighted update after a weighted one
        optimizer.zero_grad()
        backward()
        hvd.weight_loss(3)
        expect_error(backward, "weighted and unweighted")
    shards, optimizer, backward = trained()
    with shards.step(next(shards.parts(0))):
        hvd.weight_loss(3)
        backward()
    with shards.step(next(shards.parts(0))):
        expect_error(backward, "weighted and unweighted")
    if world.size > 1:
        shards, optimizer, backward = trained()
        with shards.step(next(shards.parts(0))):
            with hvd.no_sync():
                backward()
            hvd.weight_loss(3)
            expect_error(backward, "weighted and unweighted")


def check_total() -> None:
    """Several denominators in one loss: each term is divided by its own."""
    shards = hvd.shard_data(SAMPLES, global_batch=BATCH)
    model, theirs = net(), net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.3)
    model, optimizer = hvd.distribute_optimizer(model, optimizer)
    for part, whole in zip(shards.parts(0), Shards(SAMPLES, BATCH).parts(0), strict=True):
        optimizer.zero_grad()
        with shards.step(part):
            (mlm, n), (nsp, m) = (
                each(model, torch.from_numpy(part.indices)) for each in (words, classes)
            )
            total = hvd.total(tokens=n, weights=m, passes=1)
            hvd.weight_loss(1)
            loss = mlm / total["tokens"] + nsp / total["weights"]
            (total["passes"] * loss).backward()
            optimizer.step()
        reference.zero_grad()
        (mlm, n), (nsp, m) = (
            each(theirs, torch.from_numpy(whole.indices)) for each in (words, classes)
        )
        assert total == {
            "tokens": float(n),
            "weights": total["weights"],
            "passes": min(world.size, whole.count),
        }
        (mlm / n + nsp / m).backward()
        reference.step()
    exported = hvd.export_state(model, None).model
    assert difference(exported, theirs.state_dict()) < 1e-9


class Heads(nn.Module):
    """A trunk with two heads, and a layer that is not trained by the optimizers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.other = nn.Linear(6, 5), nn.Linear(6, 5)
        self.heads = nn.ModuleList([nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)])

    def forward(self, x: torch.Tensor, head: int) -> torch.Tensor:
        hidden = torch.tanh(self.trunk(x)) + self.other(x)
        result: torch.Tensor = self.heads[head](hidden)
        return result


def check_heads() -> None:
    """Passes through one head each, two optimizers, and passes whose gradients are dropped."""
    shards, model, plain = hvd.shard_data(SAMPLES, global_batch=BATCH), Heads(), Heads()
    optimizers = []
    for each in (model, plain):
        groups = (
            [*each.trunk.parameters(), *each.heads[0].parameters()],
            each.heads[1].parameters(),
        )
        optimizers.append([torch.optim.SGD(group, lr=0.3) for group in groups])
    for index, optimizer in enumerate(optimizers[0]):
        model, optimizers[0][index] = hvd.distribute_optimizer(model, optimizer)
    parts = zip(shards.parts(0), Shards(SAMPLES, BATCH).parts(0), strict=True)
    sums: list[Any] = [[], []]  # of this update of each optimizer in the plain loop
    for number, (part, whole) in enumerate(parts):
        head = number % 2
        at = torch.from_numpy(whole.indices)
        sums[0].append(words(lambda x, head=head: plain(x, head), at))
        if head:
            sums[1].append(sums[0][-1])
        with shards.step(part):
            at = torch.from_numpy(part.indices)
            total, count = words(lambda x, head=head: model(x, head), at)
            hvd.weight_loss(count)
            (total / count).backward()
            if number == 2:  # the update of the first optimizer is dropped
                for each in optimizers[0]:
                    each.zero_grad()
                sums = [[], []]
            if number in (1, 4):
                for mine, theirs, terms in zip(*optimizers, sums, strict=True):
                    mine.step()
                    mine.zero_grad()
                    theirs.zero_grad()
                    if terms:
                        mean = sum(t for t, _ in terms) / max(sum(n for _, n in terms), 1e-300)
                        parameters = [p for group in theirs.param_groups for p in group["params"]]
                        gradients = torch.autograd.grad(
                            mean, parameters, allow_unused=True, retain_graph=True
                        )
                        for parameter, gradient in zip(parameters, gradients, strict=True):
                            parameter.grad = gradient
                for theirs in optimizers[1]:
                    theirs.step()
                sums = [[], []]
    distance = difference(hvd.export_state(model, None).model, dict(plain.state_dict()))
    assert distance < 1e-9, distance


check_equality()
if sys.argv[1] != "fsdp":  # which replaces the parameters of the second optimizer
    check_heads()
check_total()
check_misuse()
Path(sys.argv[2], f"{world.rank}-of-{world.size}").touch()
