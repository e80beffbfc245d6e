"""Run on every rank by test_batchnorm.py: BatchNorm, of the global batch and of each rank.

    norms.py STRATEGY FOLDER [KIND WAY]

13 samples in global batches of 4 leave parts of 2, 1, 1 and, at the tail of one, stand-ins.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from hvdtrain.adapters.select import adapter
from hvdtrain.steps.checkpoint import load_newest
from hvdtrain.steps.sharding import Shards

SAMPLES, BATCH, CHANNELS = 13, 4, 3
Array = np.ndarray[Any, Any]
hvd: Any = adapter("pytorch", sys.argv[1])
world = hvd.initialize()
hvd.pin_device()
torch.manual_seed(0)


def expected(layer: Any, x: Array, upstream: Array) -> tuple[Array, ...]:
    """Return output, gradients of input, weight and bias, and mean and variance to track."""
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)

    def wide(values: Any) -> Array:
        array = np.asarray(values, np.longdouble)
        return array if array.ndim == x.ndim else array.reshape(-1, *[1] * (x.ndim - 2))

    x, g, n = wide(x), wide(upstream) / len(x), x.size // CHANNELS
    weight = wide(np.ones(CHANNELS) if layer.weight is None else layer.weight.detach())
    bias = wide(np.zeros(CHANNELS) if layer.bias is None else layer.bias.detach())
    mean = x.mean(axes, keepdims=True)
    variance = np.square(x - mean).mean(axes, keepdims=True)
    normal = (x - mean) / np.sqrt(variance + layer.eps)
    slope = (g * normal).mean(axes, keepdims=True)
    of_x = weight / np.sqrt(variance + layer.eps)
    of_x = of_x * (g - g.mean(axes, keepdims=True) - normal * slope)
    tracked = mean.ravel(), variance.ravel() * n / max(n - 1, 1)
    return normal * weight + bias, of_x, (g * normal).sum(axes), g.sum(axes), *tracked


def check(name: str, found: Any, wanted: Array) -> None:
    error = abs(np.asarray(found, np.longdouble) - wanted).max(initial=0) if wanted.size else 0
    assert error < 1e-11 * max(1, abs(wanted).max(initial=0)), (name, float(error))


def compare(name: str, layer: Any, shape: tuple[int, ...], centre: float) -> None:
    torch.manual_seed(2)
    x, upstream = torch.randn(2, SAMPLES, CHANNELS, *shape, dtype=torch.float64)
    x = x + centre * torch.tensor([1.0, 0.0, -1.0]).view(1, -1, *[1] * len(shape))
    plain, steps = copy.deepcopy(layer), 0
    hvd.strategy.synchronize_batchnorm(SimpleNamespace(model=layer))
    running: list[Any] = [np.zeros(CHANNELS), np.ones(CHANNELS)]
    for part in hvd.shard_data(SAMPLES, global_batch=BATCH).epoch(0):
        steps += 1
        start = (steps - 1) * BATCH
        whole = order[start : start + BATCH]
        layer.zero_grad()
        mine = x[part.indices].requires_grad_()
        y = layer(mine)
        (y * upstream[part.indices]).flatten(1).sum(1).mean().backward()
        wanted = expected(layer, x[whole].numpy(), upstream[whole].numpy())
        rows = [list(whole).index(index) for index in part.indices]
        check(f"{name} output", y.detach(), wanted[0][rows])
        assert mine.grad is not None
        if part.count:
            check(f"{name} gradient", mine.grad * part.weight, wanted[1][rows])
        for parameter, value in zip(layer.parameters(), wanted[2:4], strict=False):
            total = hvd.strategy.sum_tensor(parameter.grad * part.weight, "test")
            check(f"{name} parameter", total, value)
        factor = layer.momentum or 1 / steps
        running = [
            old * (1 - np.longdouble(factor)) + new * np.longdouble(factor)
            for old, new in zip(running, wanted[4:], strict=True)
        ]
    if layer.track_running_stats:
        assert int(layer.num_batches_tracked) == steps
        check(f"{name} mean", layer.running_mean, running[0])
        check(f"{name} variance", layer.running_var, running[1])
        plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer.eval()(x), plain.eval()(x))


def averaged(folder: Path) -> None:
    """Average the statistics of a loop whose samples nothing counts; a mask remains one."""
    other: Any = adapter("pytorch", sys.argv[1])
    other.initialize()
    model: Any = torch.nn.BatchNorm1d(2)
    model.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model.running_mean.fill_(world.rank)
    for first in (0, min(1, world.size - 1)):  # the first rank that has seen samples
        other.save_checkpoint(folder, model, optimizer, state={"step": first})
        saved = load_newest(folder)
        assert saved
        with other.averaged_buffers(model):
            for state in (model.state_dict(), saved.model):
                assert (np.array(state["running_mean"]) == (first + world.size - 1) / 2).all()
                assert np.array(state["mask"]).tolist() == [0, -np.inf]
        assert (model.running_mean == world.rank).all()
        other.samples_seen = 4 * (world.rank > 0)


order = np.concatenate([part.indices for part in Shards(SAMPLES, BATCH).epoch(0)])
KINDS = {
    "1d": (torch.nn.BatchNorm1d, ()),
    "of sequences": (torch.nn.BatchNorm1d, (5,)),
    "2d": (torch.nn.BatchNorm2d, (3, 2)),
    "3d": (torch.nn.BatchNorm3d, (2, 3, 2)),
}
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "not affine": {"affine": False},
    "cumulative": {"momentum": None},
    "not tracked": {"track_running_stats": False},
}
for kind, (make, shape) in KINDS.items():
    for way, options in WAYS.items():
        if sys.argv[3:] not in ([], [kind, way]):
            continue
        for centre in (0.0, 1e4):
            layer = make(CHANNELS, **options).double()
            for parameter in layer.parameters():
                torch.nn.init.uniform_(parameter)
            compare(f"{kind}, {way}, {centre}:", layer, shape, centre)
averaged(Path(sys.argv[2], "checkpoints"))
Path(sys.argv[2], f"{world.rank}-of-{world.size}").touch()
