"""Steps 2, 6 and 7 for PyTorch: devices, and the state of model and optimizer as arrays."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.adapters.pytorch import batchnorm
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint import Arrays, Checkpoint


class PyTorchAdapter(CommonAdapter):
    """The half of an adapter that is PyTorch's; a strategy adds ``connect`` and step 5."""

    device: torch.device = torch.device("cpu")

    def pin_device(self) -> str:
        """See ``Adapter``."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        place = self.world.local_rank % max(1, count)
        name = torch.cuda.get_device_name(place) if count else "cpu"
        self.check_devices(name, place, count)
        if count:
            self.device = torch.device("cuda", place)
            torch.cuda.set_device(self.device)
            self.has_gpu = True
            return f"{self.device} ({name})"
        threads = self.cpu_threads()
        torch.set_num_threads(threads)
        return f"cpu, {threads} thread{'s' if threads > 1 else ''}"

    def check_trained(self, model: Any, optimizer: Any) -> None:
        """See ``CommonAdapter``."""
        if not isinstance(model, torch.nn.Module):
            raise UsageError(f"the model is a {type(model).__name__}, not a torch.nn.Module")
        if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
            kind = type(optimizer).__name__
            raise UsageError(f"the optimizer is a {kind}, not a torch.optim.Optimizer")

    def trained_names(self, model: Any) -> set[str]:
        """See ``CommonAdapter``."""
        return {name for name, value in model.named_parameters() if value.requires_grad}

    def synchronize_batchnorm(self, task: Any) -> None:
        """See ``CommonAdapter``."""
        if batchnorm.convert(task.model, self.sum_tensor, lambda: self.part_weight):
            task.needs_empty_forward = True  # the other ranks wait in each BatchNorm layer

    def sum_tensor(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """The sum of ``values`` over all ranks, not differentiable."""
        return values

    def make_deterministic(self) -> None:
        """See ``CommonAdapter``."""
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as PyTorch's notes ask for
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    def export_state(self, model: Any, optimizer: Any) -> Checkpoint:
        """See ``CommonAdapter``."""
        weights = {name: _array(value) for name, value in model.state_dict().items()}
        return Checkpoint(weights, {} if optimizer is None else _optimizer_arrays(optimizer))

    def import_state(self, model: Any, optimizer: Any, state: Checkpoint) -> None:
        """See ``CommonAdapter``."""
        own = model.state_dict()
        wrong = [
            name
            for name in sorted(own.keys() | state.model.keys())
            if name not in own
            or name not in state.model
            or tuple(own[name].shape) != state.model[name].shape
        ]
        if wrong:
            raise UsageError(
                f"{state.path or 'the state of rank 0'} is not of this model: {len(wrong)} tensors "
                f"differ in name or shape, the first is {wrong[0]}"
            )
        with torch.no_grad():
            for name, value in own.items():
                value.copy_(torch.from_numpy(np.array(state.model[name])))
        if optimizer is not None:
            _load_optimizer(optimizer, state.training)

    def local_buffers(self, model: Any) -> Arrays:
        """See ``CommonAdapter``."""
        return {
            name: _array(value)
            for name, value in model.named_buffers()
            if value.is_floating_point()
        }

    def set_local_buffers(self, model: Any, arrays: Arrays) -> None:
        """See ``CommonAdapter``."""
        for name, value in model.named_buffers():
            if name in arrays:
                value.copy_(torch.from_numpy(np.array(arrays[name])))


def _array(value: torch.Tensor) -> np.ndarray[Any, Any]:
    return value.detach().to("cpu", copy=True).contiguous().numpy()


def _optimizer_arrays(optimizer: torch.optim.Optimizer) -> Arrays:
    # "3/momentum_buffer": the state of the fourth parameter, numbered as state_dict does.
    return {
        f"{index}/{key}": _array(torch.as_tensor(value))
        for index, entries in sorted(optimizer.state_dict()["state"].items())
        for key, value in entries.items()
        if value is not None
    }


def _load_optimizer(optimizer: torch.optim.Optimizer, arrays: Arrays) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in arrays.items():
        index, _, key = name.partition("/")
        state.setdefault(int(index), {})[key] = torch.from_numpy(np.array(value))
    # Learning rate, momentum and the rest are options of this run, not of the one that saved.
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": state, "param_groups": groups})
