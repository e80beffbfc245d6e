"""Steps 2, 6 and 7 for PyTorch: devices, state of model and optimizer as arrays, the profiler.

Precision, clipping and accumulation are in ``tasks/training_step_pytorch.py``.
"""

from __future__ import annotations

import functools
import json
import logging
import operator
import os
import weakref
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.profiler import RANK, STEP, Profiler, rank_facts
from hvdtrain.adapters.pytorch import batchnorm, elementwise
from hvdtrain.adapters.pytorch.loader import TorchShards
from hvdtrain.adapters.state_view import (
    Groups,
    HostCopies,
    StateView,
    check_names,
    compare,
    digests_of,
)
from hvdtrain.config.comm_options import NONE
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import MODEL_FILE, TRAINING_FILE, Arrays, Checkpoint
from hvdtrain.steps.tensor_file import ArraySpec
from hvdtrain.system.machine import accelerator
from hvdtrain.system.machine.gpus import gpu_of_rank
from hvdtrain.system.output.text import plural

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

    adapter: PyTorchAdapter

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


class TorchProfiler(Profiler):
    """torch.profiler, until ``stop``; ``facts`` of the rank, if torch.distributed has none."""

    def __init__(self, facts: Mapping[str, object]) -> None:
        # It would print a line at the start and the end of each profile.
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._profile = torch.profiler.profile()
        self._profile.start()
        if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
            self._profile.add_metadata_json(RANK, json.dumps(facts))

    @override
    def step(self, number: int) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(f"{STEP}#{number}")

    @override
    def mark(self, name: str) -> AbstractContextManager[Any]:
        return torch.profiler.record_function(name)

    @override
    def stop(self, path: Path) -> None:
        self._profile.stop()
        self._profile.export_chrome_trace(str(path))


class PyTorchAdapter(CommonAdapter):
    """PyTorch's part of an adapter; a strategy adds ``connect`` and step 5."""

    device: torch.device = torch.device("cpu")
    whole_view = TorchView
    shards_class = TorchShards
    kinds = (("torch.nn.Module", torch.nn.Module), ("torch.optim.Optimizer", torch.optim.Optimizer))
    unsummed: tuple[torch.dtype, ...] = ()  # types of gradients that the library cannot sum
    updates = ""  # the part of the model that a rank updates, if not the whole

    def __init__(self) -> None:
        super().__init__()
        self._models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._left_out: list[_BatchNorm] = []  # layers whose input is a stand-in

    @override
    def pin_device(self) -> str:
        count = accelerator.count()
        index = gpu_of_rank(self.world.local_rank, count)
        name = accelerator.name(index) if count else "cpu"
        self.check_devices(name, index, count)
        if count:
            self.device = accelerator.take(index)
            self.has_gpu = True
            return f"{self.device} ({name})"
        self.threads = self.cpu_threads()
        torch.set_num_threads(self.threads)
        self.check_threads()
        return f"cpu, {plural(self.threads, 'thread')}"

    @override
    def check_state(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for name, value in TorchView(self, model).tensors()[MODEL_FILE].items():
            if value.dtype == torch.complex128:  # buffers that are not saved may be
                raise UsageError(
                    f"{name} of the model is complex128, which safetensors, and so a checkpoint, "
                    "does not have: keep its real and imaginary parts (torch.view_as_real)"
                )
        check_saved(dict(unwrapped(model).named_buffers()))
        if self.world.devices > 1:
            self._check_types(model, optimizer)
        text = ""
        if self.updates and self.world.devices > 1:
            text = elementwise.check(optimizer, self.name, self.updates)
        if isinstance(optimizer, torch.optim.LBFGS):
            text = "LBFGS keeps lists, which no checkpoint holds: save with None as the optimizer"
        if text and self.communicator.is_root:
            _warn(text)
        if not any(map(IS_TRAINED, parameters_of(optimizer))):
            raise UsageError(
                "distribute_optimizer: no parameter of the optimizer has requires_grad, so nothing "
                "would be trained: freeze after this call what is to be trained later"
            )
        if isinstance(optimizer, torch.optim.SparseAdam) and self.world.devices > 1:
            raise UsageError(
                "distribute_optimizer: SparseAdam takes only sparse gradients, the sum over the "
                "ranks is dense: use torch.optim.Adam"
            )

    @override
    def distribute_optimizer(self, model: Any, optimizer: Any = None) -> tuple[Any, Any]:
        distributed = super().distribute_optimizer(model, optimizer)
        self._models.add(model)
        if not hasattr(optimizer, "synchronize"):  # as of a strategy that sums gradients itself
            optimizer.synchronize = lambda: None
        return distributed

    @override
    def leave_out(self, stand_in: bool) -> None:
        if stand_in == bool(self._left_out):
            return
        layers = (layer for model in self._models for layer in model.modules())
        changed = list(filter(batchnorm.tracks, layers)) if stand_in else self._left_out
        for layer in changed:
            batchnorm.leave_out(layer, stand_in)
        self._left_out = changed if stand_in else []

    def _check_types(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` if there are gradients of a type that cannot be summed."""
        compressed = () if self.comm_options.compression == NONE else (torch.complex64,)
        for value in (*model.parameters(), *parameters_of(optimizer)):
            if value.requires_grad and value.dtype in self.unsummed + compressed:
                raise UsageError(
                    f"distribute_optimizer: --strategy {self.name} cannot sum {value.dtype}, which "
                    "the model has: keep the parameters in float32 (complex ones as real and "
                    "imaginary parts), or use --strategy ddp without --compression"
                )

    @property
    @override
    def peak_memory_bytes(self) -> int:
        if not self.has_gpu:
            return super().peak_memory_bytes
        return accelerator.peak_memory()

    @override
    def synchronize_batchnorm(self, task: Any) -> None:
        self._models.add(task.model)
        if batchnorm.convert(task.model, self.sum_tensor, lambda: self.part_weight, self.world):
            task.collective_passes = True  # the other ranks wait in each BatchNorm layer

    def state_of_root(self, optimizer: torch.optim.Optimizer) -> Checkpoint:
        """Return rank 0's whole state of an ``optimizer`` that is not sharded yet."""
        mine = optimizer_tensors(optimizer if self.communicator.is_root else None)
        arrays = {name: array_of(value) for name, value in mine.items()}
        return Checkpoint({}, self.communicator.broadcast_arrays(arrays))

    def sum_tensor(self, values: torch.Tensor, name: str) -> torch.Tensor:
        """Return the sum of ``values`` over all ranks, not differentiable."""
        return self.communicator.sum_tensor(values.clone().contiguous(), name)

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
    def start_profiler(self) -> Profiler:
        return TorchProfiler(rank_facts(self.world, self.name))


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
def _warn(text: str) -> None:
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
