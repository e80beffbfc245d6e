"""BatchNorm over the global batch, on any device (PyTorch's SyncBatchNorm does not support CPUs).

Each rank computes count, mean and squared deviations of its part; the three are merged exactly
(Chan, Golub and LeVeque, 1979) by one differentiable sum over the ranks in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

SumOverRanks = Callable[[torch.Tensor, str], torch.Tensor]
"""(values, name) -> their sum over all ranks; the name is the same on all ranks."""


Weight = Callable[[], float]
"""The share of this rank's part in the global batch."""


class _Sum(torch.autograd.Function):
    """Sum over all ranks.

    Each rank's loss depends on every rank's input, so the gradient is a sum over all ranks too, of
    the losses with their weights in the global batch. It is divided by this rank's weight, because
    all gradients of this rank are multiplied by that at the end of the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, values: torch.Tensor, total: SumOverRanks, weight: Weight, name: str
    ) -> torch.Tensor:
        ctx.total, ctx.weight, ctx.name = total, weight, name
        return total(values, f"{name}.forward")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        weight = ctx.weight()
        mine = gradients[0] * weight if weight else torch.zeros_like(gradients[0])  # may be nan
        whole = ctx.total(mine, f"{ctx.name}.backward")
        return whole / weight if weight else whole, None, None, None


class SyncBatchNorm2d(nn.BatchNorm2d):
    """``nn.BatchNorm2d`` with the statistics of the global batch.

    All ranks must run it together, forward and backward, with inputs of the same channels; a
    rank's input may be empty. In evaluation it is plain ``nn.BatchNorm2d``.
    """

    total: SumOverRanks
    share: Weight
    name: str

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 (as in torch)
        """Normalise ``input`` of shape (n, channels, height, width)."""
        if not self.training:
            return super().forward(input)
        axes = (0, 2, 3)
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        count = wide.numel() // wide.shape[1]
        local_mean = wide.sum(axes, dtype=wide.dtype) / max(count, 1)
        deviations = (wide - local_mean[:, None, None]).square().sum(axes)
        # float64: the difference of squares below would cancel in float32.
        sums = local_mean.double() * count
        squares = deviations.double() + local_mean.double() * sums
        n = torch.full((1,), float(count), dtype=torch.float64, device=input.device)
        local = torch.cat([sums, squares, n])
        merged: torch.Tensor = _Sum.apply(local, self.total, self.share, self.name)
        channels = wide.shape[1]
        n = merged[-1].detach()
        mean = merged[:channels] / n
        variance = (merged[channels:-1] / n - mean * mean).clamp(min=0.0)
        self._track(mean.detach(), variance.detach() * (n / (n - 1).clamp(min=1.0)))
        scale = torch.rsqrt(variance + self.eps) * self.weight.double()
        shift = self.bias.double() - mean * scale
        result = wide * scale.to(wide.dtype)[:, None, None] + shift.to(wide.dtype)[:, None, None]
        return result.to(input.dtype)

    @torch.no_grad()
    def _track(self, mean: torch.Tensor, variance: torch.Tensor) -> None:
        assert self.running_mean is not None and self.running_var is not None
        assert self.momentum is not None and self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), self.momentum)
        self.running_var.lerp_(variance.to(self.running_var.dtype), self.momentum)


def convert(model: nn.Module, total: SumOverRanks, share: Weight) -> int:
    """Convert every ``nn.BatchNorm2d`` in ``model``, in place; return their number.

    Parameters and buffers remain the same objects, so an existing optimizer stays valid.
    """
    number = 0
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.__class__ = SyncBatchNorm2d
            assert isinstance(module, SyncBatchNorm2d)
            module.total, module.share, module.name = total, share, f"batchnorm.{number}"
            number += 1
    return number
