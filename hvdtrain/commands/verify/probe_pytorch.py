"""Compute with plain PyTorch, for the checks of the eight steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from typing_extensions import override

from hvdtrain.commands.verify.harness import WIDTHS, Array, FrameworkProbe, Processor, weights
from hvdtrain.config.options import Options
from hvdtrain.system.machine import accelerator
from hvdtrain.tasks.pytorch import InMemory, TorchTask


class PlainFramework(FrameworkProbe):
    """Plain PyTorch."""

    @override
    def processor(self) -> Processor:
        device = torch.device(self.device)
        if device.type == accelerator.CPU:
            return Processor(None, torch.get_num_threads())
        properties = accelerator.module(device.type).get_device_properties(device)
        return Processor(str(getattr(properties, "uuid", device)), 0)

    @override
    def network(self, seed: int, *, buffers: bool = False) -> torch.nn.Module:
        layers: list[torch.nn.Module] = []
        for matrix, bias in weights(seed):
            layer = torch.nn.Linear(*matrix.shape).double()
            with torch.no_grad():
                layer.weight.copy_(torch.from_numpy(matrix.T.copy()))
                layer.bias.copy_(torch.from_numpy(bias))
            layers += [layer, torch.nn.Tanh()]
        if buffers:
            layers.insert(2, torch.nn.BatchNorm1d(WIDTHS[1], dtype=torch.float64))
        return torch.nn.Sequential(*layers[:-1]).to(self.device)

    @override
    def sgd(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1.0)

    @override
    def adam(self, model: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(model.parameters(), lr=0.01)

    def _loss(self, model: Any, x: Array, y: Array) -> torch.Tensor:
        inputs, targets = (torch.from_numpy(array).to(self.device) for array in (x, y))
        return ((model(inputs) - targets) ** 2).sum(1).mean()

    @override
    def update(self, model: Any, optimizer: Any, x: Array, y: Array) -> None:
        optimizer.zero_grad()
        self._loss(model, x, y).backward()
        optimizer.step()

    @override
    def gradient(self, model: Any, x: Array, y: Array) -> Array:
        return _flat(torch.autograd.grad(self._loss(model, x, y), list(model.parameters())))

    @override
    def parameters(self, model: Any) -> Array:
        return _flat(model.parameters())

    @override
    def set_parameters(self, model: Any, values: Array) -> None:
        vector = torch.from_numpy(np.array(values)).to(self.device)
        torch.nn.utils.vector_to_parameters(vector, model.parameters())

    @override
    def state(self, model: Any, optimizer: Any) -> list[Array]:
        tensors = list(model.state_dict().values())
        for parameter in model.parameters():
            tensors += [value for _, value in sorted(optimizer.state[parameter].items())]
        return [np.array(tensor.detach().cpu()) for tensor in tensors]

    @override
    def applied_rates(self, rates: list[float]) -> list[float]:
        data = InMemory(np.ones((1, 1, 1, 1), np.uint8), np.zeros(1, np.int64), self.device)
        layer = torch.nn.Linear(1, 2)
        options = Options(precision="fp64", momentum=0.0, device=self.device)
        task = TorchTask(torch.nn.Sequential(torch.nn.Flatten(), layer), options, data, None)
        applied = []
        for rate in rates:
            for value in layer.parameters():
                torch.nn.init.zeros_(value)
            batch = data.fetch(np.zeros(1, np.int64))
            task.update(batch, learning_rate=rate, seed=0)
            applied.append(2 * layer.bias[0].item())  # two equal logits: the gradient is -1/2
        return applied


def _flat(tensors: Any) -> Array:
    # A strategy may shard a parameter (a DTensor); gathering it is a collective of all ranks.
    full = [part.full_tensor() if hasattr(part, "full_tensor") else part for part in tensors]
    return np.concatenate([tensor.detach().cpu().numpy().ravel() for tensor in full])
