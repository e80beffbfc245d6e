"""Where a model can be cut: its layers in a row, and what each of them costs."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import plural

LAST_MAP = 7 * 7  # positions in the last map of a network for images of ImageNet's size


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of ``model``, of which each takes what the one before returns.

    Those of a ``Sequential``, and of each ``Sequential`` in it; any other model says so itself, by
    a method ``in_a_row``.

    Raises:
        UsageError: nothing tells what they are.
    """
    if type(model) is torch.nn.Sequential:
        return [one for layer in model for one in _unfolded(layer)]
    if in_a_row := getattr(model, "in_a_row", None):
        return list(in_a_row())
    raise UsageError(
        f"--strategy pipeline cuts a model between its layers, and which those of a "
        f"{type(model).__name__} are is not known: give a torch.nn.Sequential, or a model with a "
        "method in_a_row() that returns them, each of which takes what the one before returns"
    )


def _unfolded(layer: torch.nn.Module) -> list[torch.nn.Module]:
    return layers_of(layer) if type(layer) is torch.nn.Sequential else [layer]


def costs_of(layers: Sequence[torch.nn.Module]) -> list[int]:
    """Return what each layer costs, about: its multiplications for a sample, by its weights alone.

    A weight of a convolution is used at each position of its map, any other one once. Maps shrink
    by the strides of the layers (within one the largest counts: a block may have it twice, side by
    side); how large the first is nobody has said, so the last is taken to be ``LAST_MAP``.
    """
    strides = [max((_stride(one) for one in layer.modules()), default=1) for layer in layers]
    positions, costs = LAST_MAP * math.prod(strides), []
    for layer, stride in zip(layers, strides, strict=True):
        positions //= stride
        weights = [one for one in layer.parameters() if one.ndim > 1]
        costs.append(sum(one.numel() * (positions if one.ndim > 2 else 1) for one in weights))
    return costs


def _stride(module: torch.nn.Module) -> int:
    """Return how many positions become one; 1 for what is no convolution or pooling."""
    stride, kind = getattr(module, "stride", 1), type(module).__name__
    if isinstance(stride, int):
        return stride ** int(kind[-2]) if kind[-2:] in ("1d", "2d", "3d") else 1
    return math.prod(stride)


def owners_of(
    model: torch.nn.Module, stages: Sequence[Sequence[torch.nn.Module]]
) -> dict[str, int]:
    """Return the stage that each parameter and buffer of ``model`` belongs to, by its name.

    What no layer has is the first stage's.

    Raises:
        UsageError: several stages share one.
    """
    found: dict[int, int] = {}
    state = model.state_dict(keep_vars=True)
    for stage, layers in enumerate(stages):
        for layer in layers:
            for value in (*layer.parameters(), *layer.buffers()):
                if found.setdefault(id(value), stage) != stage:
                    name = next((name for name, one in state.items() if one is value), "a buffer")
                    raise UsageError(
                        f"--strategy pipeline: {name} is in stage "
                        f"{found[id(value)]} and in stage {stage}, and cannot be in both: give "
                        "fewer --stages"
                    )
    return {name: found.get(id(value), 0) for name, value in state.items()}


def check_number(layers: Sequence[torch.nn.Module], stages: int) -> None:
    """Raise ``UsageError`` where there are fewer layers than stages."""
    if len(layers) < stages:
        raise UsageError(
            f"--stages: the model has {plural(len(layers), 'layer')} in a row, too few for "
            f"{stages} stages: give --stages {len(layers)} at most"
        )
