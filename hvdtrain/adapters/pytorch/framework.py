"""PyTorch: devices, state of model and optimizer as tensors, the profiler.

Precision, clipping and accumulation are in ``tasks/training_step_pytorch.py``.
"""

from __future__ import annotations

import functools
import json
import logging
import operator
import os
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from hvdtrain.adapters.digests import Groups, compare, digests_of
from hvdtrain.adapters.framework import Framework, Profiler, Rank, SumOverRanks
from hvdtrain.adapters.pytorch import batchnorm
from hvdtrain.adapters.pytorch.loader import TorchShards
from hvdtrain.adapters.pytorch.weights import LocalPasses, LossWeight, number_of
from hvdtrain.adapters.state_view import HostCopies, StateView, check_names
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import MODEL_FILE, TRAINING_FILE, Arrays, Checkpoint
from hvdtrain.steps.tensor_file import ArraySpec
from hvdtrain.system.machine import accelerator

log = logging.getLogger(__name__)

OF_DEVICE = {"foreach", "fused", "capturable", "differentiable"}  # options that select a kernel
IS_TRAINED = operator.attrgetter("requires_grad")  # of a parameter; mapped, it costs little
ITEM = operator.methodcaller("item")  # of a tensor of one element


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model within a strategy's wrapper: its names are those of a checkpoint."""
    wrappers = (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)
    return model.module if isinstance(model, wrappers) else model


class TensorCopies(HostCopies):
    """Copies of tensors; an accelerator ``device`` writes them itself, into page-locked memory."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._locked = device.type != accelerator.CPU

    @override
    def nbytes(self, layout: ArraySpec) -> int:
        size = super().nbytes(layout)
        # PyTorch's allocator of page-locked memory rounds to a power of two.
        return 1 << (size - 1).bit_length() if self._locked and size else size

    @override
    def allocate(self, layout: ArraySpec) -> np.ndarray[Any, Any]:
        if not self._locked:
            return super().allocate(layout)
        like = torch.from_numpy(np.empty(0, layout.dtype))
        return torch.empty(layout.shape, dtype=like.dtype, pin_memory=True).numpy()

    @override
    def fill(self, copy: np.ndarray[Any, Any], value: Any) -> None:
        torch.from_numpy(copy).copy_(value, non_blocking=True)

    @override
    def finish(self) -> None:
        if self._locked:
            accelerator.synchronize()


class TorchView(StateView):
    """State of a PyTorch model and its optimizer."""

    adapter: Rank

    @override
    def tensors(self, optimizer: Any = None) -> dict[str, dict[str, torch.Tensor]]:
        model = dict(unwrapped(self.model).state_dict(keep_vars=True))
        check_saved(model)
        return {MODEL_FILE: model, TRAINING_FILE: optimizer_tensors(optimizer)}

    @override
    def trained_names(self) -> set[str]:
        named = unwrapped(self.model).named_parameters()
        return {name for name, value in named if value.requires_grad}

    @override
    def options(self, optimizer: Any) -> Groups:
        groups: Groups = [{} for _ in (optimizer.param_groups if optimizer else ())]
        for group, options in zip(optimizer.param_groups if groups else (), groups, strict=True):
            for name in sorted(group.keys() - OF_DEVICE - {"params"}):
                with suppress(AttributeError, RuntimeError, TypeError, ValueError):  # a function
                    text = json.dumps(group[name], default=ITEM, allow_nan=False)
                    options[name] = json.loads(text)
        return groups

    @override
    def set_options(self, optimizer: Any, groups: Groups) -> None:
        known = self.options(optimizer)
        if len(known) != len(groups):
            raise UsageError(
                f"the optimizer has {len(known)} parameter groups, that of rank 0 {len(groups)}: "
                "create it with the same groups on every rank"
            )
        for group, mine, options in zip(optimizer.param_groups, known, groups, strict=True):
            for name, value in options.items():
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                elif name not in mine or mine[name] != value:
                    group[name] = tuple(value) if isinstance(value, list) else value

    @override
    def layout(self, tensor: torch.Tensor) -> ArraySpec:
        # Of the whole tensor, of which this rank may hold only a part.
        return ArraySpec(torch.empty(0, dtype=tensor.dtype).numpy().dtype, tuple(tensor.shape))

    @override
    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        return array_of(tensor) if isinstance(tensor, torch.Tensor) else tensor

    @override
    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach()  # an accelerator copies it itself

    @override
    def broadcast(self, optimizer: Any) -> str:
        saved = {id(value) for value in self.tensors()[MODEL_FILE].values()}
        buffers = unwrapped(self.model).named_buffers()
        if unsaved := {name: value for name, value in buffers if id(value) not in saved}:
            self.send(unsaved)
        return super().broadcast(optimizer)

    @torch.no_grad()
    def send(self, buffers: Mapping[str, torch.Tensor]) -> str:
        """Send rank 0's ``buffers`` to all ranks and compare them; return the common digest."""
        local = {name: array_of(value) for name, value in buffers.items()}
        for name, sent in self.adapter.communicator.broadcast_arrays(local).items():
            if sent.tobytes() != local[name].tobytes():  # expanded ones cannot be written
                buffers[name].copy_(tensor_of(sent))
        now = {name: array_of(value) for name, value in buffers.items()}
        reason = "right after the broadcast: please report it"
        return compare(self.adapter.communicator, digests_of(Checkpoint(now, {})), reason)

    @override
    def host_copies(self) -> HostCopies:
        return TensorCopies(self.adapter.device)

    @override
    def restore(self, optimizer: Any, state: Checkpoint) -> None:
        tensors = self.tensors()[MODEL_FILE]
        source = state.path or "the state of rank 0"
        check_names(tensors, state.model, f"{source} is not of this model")
        with torch.no_grad():
            for name, value in tensors.items():
                self.set_tensor(value, state.model[name])
            if optimizer is not None:
                self.restore_optimizer(optimizer, state)

    def restore_optimizer(self, optimizer: torch.optim.Optimizer, saved: Checkpoint) -> None:
        """Restore this rank's part of the state that ``optimizer_tensors`` returned."""
        state: dict[int, dict[str, torch.Tensor]] = {}
        parameters = parameters_of(optimizer)
        for name, stored in saved.training.items():
            number, _, key = name.partition("/")
            if not number.isdecimal():
                raise ValueError(f"{name!r} does not begin with the number of a parameter")
            index = int(number)
            if index >= len(parameters):
                raise UsageError(
                    f"{saved.path or 'the state of rank 0'} is not of this optimizer, which has "
                    f"{len(parameters)} parameters: it has state of parameter {index + 1}"
                )
            like = parameters[index]
            if (value := self.optimizer_state(index, like, stored)) is None:
                continue
            if value.shape == like.shape and not like.is_contiguous():
                value = torch.empty_like(like, dtype=value.dtype).copy_(value)  # for fused kernels
            state.setdefault(index, {})[key] = value
        # Options are of this run, not of the one that saved: see ``StateAdapter._restore_options``.
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def set_tensor(self, tensor: torch.Tensor, saved: Any) -> None:
        """Set a parameter or buffer to its ``saved`` value."""
        tensor.copy_(tensor_of(saved))

    def optimizer_state(self, index: int, parameter: Any, saved: Any) -> torch.Tensor | None:
        """Return this rank's part of the ``saved`` state of a parameter; None: it has none."""
        return tensor_of(saved)

    @override
    def local_buffers(self) -> Arrays:
        return {
            name: array_of(value).copy()
            for name, value in unwrapped(self.model).named_buffers()
            if value.is_floating_point()
        }

    @override
    def set_local_buffers(self, arrays: Arrays) -> None:
        for name, value in unwrapped(self.model).named_buffers():
            if name in arrays:
                value.copy_(tensor_of(arrays[name]))


class PyTorchFramework(Framework):
    """PyTorch on this rank."""

    kinds = (("torch.nn.Module", torch.nn.Module), ("torch.optim.Optimizer", torch.optim.Optimizer))
    cpu = torch.device("cpu")
    shards = TorchShards

    def __init__(self) -> None:
        self._left_out: list[_BatchNorm] = []  # layers whose input is a stand-in
        # Of optimizers in one process, since `weigh`.
        self._passes: weakref.WeakKeyDictionary[Any, LocalPasses] = weakref.WeakKeyDictionary()

    @override
    def gpus(self) -> int:
        return accelerator.count()

    @override
    def gpu_name(self, index: int) -> str:
        return accelerator.name(index)

    @override
    def use_gpu(self, index: int) -> tuple[torch.device, str]:
        device = accelerator.take(index)
        return device, str(device)

    @override
    def use_threads(self, share: Callable[[], int]) -> int:
        threads = share()
        torch.set_num_threads(threads)
        return threads

    @override
    def peak_memory(self, device: Any) -> int:
        return accelerator.peak_memory()

    @override
    def view(self, adapter: Rank, model: Any) -> TorchView:
        return TorchView(adapter, model)

    @override
    def prepare(self, adapter: Rank, model: Any, optimizer: Any) -> None:
        for name, value in TorchView(adapter, model).tensors()[MODEL_FILE].items():
            if value.dtype == torch.complex128:  # buffers that are not saved may be
                raise UsageError(
                    f"{name} of the model is complex128, which safetensors, and so a checkpoint, "
                    "does not have: keep its real and imaginary parts (torch.view_as_real)"
                )
        check_saved(dict(unwrapped(model).named_buffers()))
        if isinstance(optimizer, torch.optim.LBFGS) and adapter.communicator.is_root:
            warn_once(
                "LBFGS keeps lists, which no checkpoint holds: save with None as the optimizer"
            )
        if not any(map(IS_TRAINED, parameters_of(optimizer))):
            raise UsageError(
                "distribute_optimizer: no parameter of the optimizer has requires_grad, so nothing "
                "would be trained: freeze after this call what is to be trained later"
            )
        if isinstance(optimizer, torch.optim.SparseAdam) and adapter.world.devices > 1:
            raise UsageError(
                "distribute_optimizer: SparseAdam takes only sparse gradients, the sum over the "
                "ranks is dense: use torch.optim.Adam"
            )
        if not hasattr(optimizer, "synchronize"):  # unless a strategy sums assigned gradients
            optimizer.synchronize = lambda: None

    @override
    def leave_out(self, models: Iterable[Any], stand_in: bool) -> None:
        if stand_in == bool(self._left_out):
            return
        layers = (layer for model in models for layer in model.modules())
        changed = list(filter(batchnorm.tracks, layers)) if stand_in else self._left_out
        for layer in changed:
            batchnorm.leave_out(layer, stand_in)
        self._left_out = changed if stand_in else []

    @override
    def weigh(self, adapter: Rank, count: Any, optimizers: Iterable[Any]) -> None:
        number = number_of(count, adapter)
        adapter.pass_weight = LossWeight(number, lambda total: lambda: total)
        parameters = {optimizer: parameters_of(optimizer) for optimizer in optimizers}
        known = {id(value) for values in parameters.values() for value in values}
        all_of = (value for model in adapter.models for value in model.parameters())
        others = [value for value in all_of if id(value) not in known]  # with the first optimizer
        for optimizer, updated in parameters.items():
            if optimizer not in self._passes:
                self._passes[optimizer] = LocalPasses(optimizer, adapter)
            self._passes[optimizer].expect(updated, others)
            others = []

    @override
    def synchronize_batchnorm(self, adapter: Rank, task: Any, sum_tensor: SumOverRanks) -> None:
        adapter.models.add(task.model)
        if batchnorm.convert(task.model, sum_tensor, lambda: adapter.loss_weight, adapter.world):
            task.collective_passes = True  # the other ranks wait in each BatchNorm layer

    @override
    def make_deterministic(self) -> None:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # required by PyTorch
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False

    @override
    def compile(self, task: Any) -> None:
        for module in task.model.modules():
            if isinstance(module, batchnorm.SyncBatchNorm):  # its collectives do not compile
                module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        super().compile(task)

    @override
    def use_tf32(self, wanted: bool) -> None:
        accelerator.use_tf32(wanted)

    @override
    def start_profiler(self, rank_facts: Mapping[str, object]) -> Profiler:
        from hvdtrain.adapters.pytorch.profiler import TorchProfiler

        return TorchProfiler(rank_facts)


FRAMEWORK = PyTorchFramework


def check_saved(tensors: Mapping[str, Any]) -> None:
    """Raise ``UsageError``, naming the first, if something of a model cannot be saved."""
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            raise UsageError(
                f"{name} of the model is a {type(value).__name__}: checkpoints hold only tensors, "
                "also as get_extra_state() returns them"
            )
        if not _is_in_numpy(value.dtype):
            raise UsageError(
                f"{name} of the model is {value.dtype}, which NumPy, and so a checkpoint, does not "
                "have: keep it in float32 and compute under torch.autocast"
            )


@functools.cache
def _is_in_numpy(kind: torch.dtype) -> bool:
    try:
        torch.empty(0, dtype=kind).numpy()
    except (TypeError, RuntimeError):
        return False
    return True


@functools.cache  # for several optimizers
def warn_once(text: str) -> None:
    """Log a warning, once in this process."""
    log.warning(text)


def array_of(value: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the tensor as an array, which may share its memory."""
    return value.detach().cpu().contiguous().numpy()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
    """Return the parameters of an optimizer, numbered as in its ``state_dict``."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def optimizer_tensors(optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """Return the optimizer state by name; without an optimizer nothing.

    ``3/momentum_buffer`` is of the fourth parameter, numbered as ``state_dict`` does.
    """
    if optimizer is None:
        return {}
    return {
        f"{index}/{key}": _as_tensor(f"{type(optimizer).__name__}: {key}", value)
        for index, entries in sorted(optimizer.state_dict()["state"].items())
        for key, value in entries.items()
        if value is not None
    }


def _as_tensor(name: str, value: Any) -> torch.Tensor:
    if not isinstance(value, (list, tuple)):
        with suppress(RuntimeError, TypeError, ValueError):
            return torch.as_tensor(value)
    raise UsageError(
        f"{name} of the optimizer's state is a {type(value).__name__}: checkpoints hold only "
        "tensors and numbers; save_checkpoint and broadcast_state take None as the optimizer"
    )


def tensor_of(value: Any) -> torch.Tensor:
    """Return a copy of an array, or of one read from a file, as a tensor."""
    return torch.from_numpy(np.array(value))
