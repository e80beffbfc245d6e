"""BatchNorm layers that accept a batch with one value per channel, for which PyTorch's raise.

The part of a rank in an epoch's last batch may be a single sample, of which a ``BatchNorm1d``, or
the last layers of a network for small images, see one value. Its variance is 0, so the layer
returns its bias; there is no unbiased variance to track.
"""

from __future__ import annotations

import torch
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override


class _OfAnyBatch(_BatchNorm):
    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and input.numel() == input.shape[1]:
            return torch.batch_norm(
                input, self.weight, self.bias, None, None, True, 0.0, self.eps, False
            )
        return super().forward(input)


class BatchNorm1d(_OfAnyBatch, torch.nn.BatchNorm1d):
    """``nn.BatchNorm1d`` of any batch."""


class BatchNorm2d(_OfAnyBatch, torch.nn.BatchNorm2d):
    """``nn.BatchNorm2d`` of any batch."""


class BatchNorm3d(_OfAnyBatch, torch.nn.BatchNorm3d):
    """``nn.BatchNorm3d`` of any batch."""


_LAYERS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.BatchNorm1d: BatchNorm1d,
    torch.nn.BatchNorm2d: BatchNorm2d,
    torch.nn.BatchNorm3d: BatchNorm3d,
}


def accept_any_batch(model: torch.nn.Module) -> None:
    """Convert the BatchNorm layers in ``model``, in place; not those of a subclass."""
    for module in model.modules():
        module.__class__ = _LAYERS.get(type(module), type(module))
