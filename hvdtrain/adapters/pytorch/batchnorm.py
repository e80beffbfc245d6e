"""BatchNorm over the global batch, on any device (PyTorch's SyncBatchNorm does not support CPUs).

Each rank computes count, mean and squared deviations of its part. All ranks gather the three of
each rank, by a sum in which the others have zeros, and merge them exactly (Chan, Golub and LeVeque,
1979): a sum of squares would cancel if the mean is large. The backward pass sums two numbers per
channel.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.adapters.framework import SumOverRanks
from hvdtrain.adapters.pytorch.weights import weigh
from hvdtrain.steps.world import World

log = logging.getLogger(__name__)

Weight = Callable[[], Any]
"""The weight of this rank's loss; None: its input is a stand-in."""


class SyncBatchNorm(_BatchNorm):
    """BatchNorm of any number of dimensions with the statistics of the global batch.

    All ranks must run it together, forward and backward, with inputs of the same channels; a
    rank whose input is a stand-in gives it no weight. In evaluation it is plain BatchNorm.
    """

    total: SumOverRanks
    share: Weight
    name: str
    rank: int
    size: int
    stand_in = False  # the input is one

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (as in torch)
        """Normalise ``input`` of shape (n, channels, ...)."""
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        n, mean, variance = self._statistics(input.detach())
        self._track(mean, variance * (n / (n - 1).clamp(min=1.0)), (n > 0).double())
        scale = torch.rsqrt(variance + self.eps)
        result: torch.Tensor = _Normalize.apply(input, self.weight, self.bias, mean, scale, n, self)
        return result

    def _check_input_dim(self, input: torch.Tensor) -> None:  # noqa: A002 (as in torch)
        if input.ndim < 2:
            raise ValueError(f"expected at least 2 dimensions, got {input.ndim}")

    def _statistics(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return count, mean and variance of the global batch, in float64."""
        x, axes = wide(x[:0] if self.stand_in else x), axes_of(x)
        channels = x.shape[1]
        count = x.numel() // channels
        mean = x.sum(axes) / max(count, 1)
        squares = (x - per_channel(mean, x)).square().sum(axes)
        rows = x.new_zeros(self.size, 2 * channels + 1)
        rows[self.rank] = torch.cat([x.new_tensor([count]), mean, squares])
        rows = self.total(rows, f"{self.name}.forward").double()
        counts, means, squares = rows.split([1, channels, channels], dim=1)
        n = counts.sum()  # 0 in a pass in which all ranks have stand-ins
        whole = (counts * means).sum(0) / n.clamp(min=1.0)
        variance = (squares + counts * (means - whole).square()).sum(0) / n.clamp(min=1.0)
        return n, whole, variance

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor, seen: torch.Tensor) -> None:
        if not self.track_running_stats or self.num_batches_tracked is None:
            return
        assert self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked += seen.long()
        # None: the mean of all batches.
        number = self.num_batches_tracked.double()
        factor = seen * (1 / number if self.momentum is None else self.momentum)
        for running, value in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(value.to(running.dtype), factor.to(running.dtype))


class _Normalize(torch.autograd.Function):
    """Normalise the part of this rank by the statistics of the global batch.

    Each rank's loss depends on every rank's input, so the gradient needs sums over all ranks, of
    the losses with their weights in the global batch. They are divided by this rank's weight,
    because all gradients of this rank are multiplied by that at the end of the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        scale: torch.Tensor,
        n: torch.Tensor,
        layer: SyncBatchNorm,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, mean, scale, n)
        ctx.layer = layer
        normal = normalized(x, mean, scale)
        if weight is not None:
            normal = normal * per_channel(weight, normal)
        if bias is not None:
            normal = normal + per_channel(bias, normal)
        return normal.to(x.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, mean, scale, n = ctx.saved_tensors
        layer, axes = ctx.layer, axes_of(x)
        share = None if layer.stand_in else layer.share()
        normal, gradient = normalized(x, mean, scale), wide(gradient)
        of_bias, of_weight = gradient.sum(axes), (gradient * normal).sum(axes)
        mine = torch.cat([of_bias, of_weight]).double()
        weigh(mine, share, out=mine)
        means = layer.total(mine, f"{layer.name}.backward") / n.clamp(min=1.0)
        means = torch.zeros_like(means) if share is None else means / share
        shift, slope = means.chunk(2)
        gradient = gradient - per_channel(shift, normal) - normal * per_channel(slope, normal)
        scale = scale if weight is None else scale * weight.double()
        gradients = (gradient * per_channel(scale, normal), of_weight, of_bias)
        wanted = zip(gradients, ctx.needs_input_grad, strict=False)
        return tuple(value if is_wanted else None for value, is_wanted in wanted) + (None,) * 4


def wide(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in at least float32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def axes_of(x: torch.Tensor) -> list[int]:
    """Return all dimensions but that of the channels."""
    return [axis for axis in range(x.ndim) if axis != 1]


def per_channel(values: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return a vector with a value per channel in the type of ``x``, broadcast along the others."""
    return values.to(x.dtype).view([-1] + [1] * (x.ndim - 2))


def normalized(x: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with the mean 0 and the variance 1."""
    x = wide(x)
    return (x - per_channel(mean, x)) * per_channel(scale, x)


def convert(model: nn.Module, total: SumOverRanks, share: Weight, world: World) -> int:
    """Convert every BatchNorm layer in ``model``, in place; return their number.

    Parameters and buffers remain the same objects, so an existing optimizer stays valid.
    """
    number = 0
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.__class__ = SyncBatchNorm
            assert isinstance(module, SyncBatchNorm)
            module.total, module.share, module.name = total, share, f"batchnorm.{number}"
            module.rank, module.size = world.rank, world.size
            number += 1
    if not number and world.rank == 0:
        log.warning("--sync-batchnorm has no effect: the model has no BatchNorm layer of PyTorch")
    return number


def tracks(module: nn.Module) -> TypeGuard[_BatchNorm]:
    """Return whether ``module`` is a BatchNorm layer for which stand-ins matter."""
    tracked = isinstance(module, _BatchNorm) and module.track_running_stats
    return tracked or isinstance(module, SyncBatchNorm)


def leave_out(layer: _BatchNorm, stand_in: bool) -> None:
    """Begin or end passes in which the input of ``layer`` is a stand-in: it tracks nothing of it.

    The statistics of ``SyncBatchNorm`` are of the other ranks, and are tracked.
    """
    if isinstance(layer, SyncBatchNorm):
        layer.stand_in = stand_in
    else:
        layer.track_running_stats = not stand_in
