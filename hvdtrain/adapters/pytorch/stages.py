"""Layers between which a model can be cut into pipeline stages, and the cost of each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from hvdtrain.errors import UsageError
from hvdtrain.system.output.text import plural

LAST_MAP = 7 * 7  # positions in the last map of a network for images of ImageNet's size


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of ``model`` in order: the input of each is the output of the previous.

    For a ``Sequential`` its layers, and those of each ``Sequential`` in it; any other model must
    have a method ``in_a_row`` that returns them.

    Raises:
        UsageError: the layers are unknown.
    """
    if type(model) is torch.nn.Sequential:
        return [layer for child in model for layer in _unfolded(child)]
    if in_a_row := getattr(model, "in_a_row", None):
        return list(in_a_row())
    raise UsageError(
        f"--strategy pipeline cuts a model between its layers, those of {type(model).__name__} are "
        "unknown: use a torch.nn.Sequential, or add a method in_a_row() that returns the layers in "
        "order, each of which takes the output of the previous"
    )


def _unfolded(layer: torch.nn.Module) -> list[torch.nn.Module]:
    return layers_of(layer) if type(layer) is torch.nn.Sequential else [layer]


def costs_of(layers: Sequence[torch.nn.Module]) -> list[int]:
    """Return the approximate cost of each layer: multiplications per sample, by its weights.

    A weight of a convolution is used at each position of its map, any other one once. Maps shrink
    by the strides of the layers (of each, the largest: parallel branches of a block have the same);
    the size of the input is unknown, so the last map is assumed to have ``LAST_MAP`` positions.
    """
    strides = [max((_stride(child) for child in layer.modules()), default=1) for layer in layers]
    positions, costs = LAST_MAP * math.prod(strides), []
    for layer, stride in zip(layers, strides, strict=True):
        positions //= stride
        weights = [value for value in layer.parameters() if value.ndim > 1]
        costs.append(sum(w.numel() * (positions if w.ndim > 2 else 1) for w in weights))
    return costs


def _stride(module: torch.nn.Module) -> int:
    """Return the number of positions merged into one; 1 for other than convolution and pooling."""
    stride, kind = getattr(module, "stride", 1), type(module).__name__
    if isinstance(stride, int):
        return stride ** int(kind[-2]) if kind[-2:] in ("1d", "2d", "3d") else 1
    return math.prod(stride)


def owners_of(
    model: torch.nn.Module, stages: Sequence[Sequence[torch.nn.Module]]
) -> dict[str, int]:
    """Return the stage of each parameter and buffer of ``model``, by name.

    Those that belong to no layer are assigned to the first stage.

    Raises:
        UsageError: several stages share a parameter or buffer.
    """
    owners: dict[int, int] = {}
    state = model.state_dict(keep_vars=True)
    for stage, layers in enumerate(stages):
        for layer in layers:
            for value in (*layer.parameters(), *layer.buffers()):
                if owners.setdefault(id(value), stage) != stage:
                    name = next((key for key, held in state.items() if held is value), "a buffer")
                    raise UsageError(
                        f"--strategy pipeline: {name} is in stage {owners[id(value)]} and in stage "
                        f"{stage}, and cannot be in both: use fewer --stages"
                    )
    return {name: owners.get(id(value), 0) for name, value in state.items()}


def check_number(layers: Sequence[torch.nn.Module], stages: int) -> None:
    """Raise ``UsageError`` if there are fewer layers than stages."""
    if len(layers) < stages:
        raise UsageError(
            f"--stages {stages}: the model has only {plural(len(layers), 'layer')} in sequence: "
            f"use at most --stages {len(layers)}"
        )
