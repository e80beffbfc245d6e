"""Watch PyTorch: optimizers, gradients, samples, loaders, and files of ``torch.save``.

``torch`` is an argument, because it must only be imported by the script.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.commands.verify.hooks import Depth, after, best_effort, replace
from hvdtrain.commands.verify.script.record import Array, Loader, ScriptRecorder
from hvdtrain.commands.verify.script.watch_horovod import leaves
from hvdtrain.system.machine.gpus import pytorch_processor

INSPECTED = 3  # samples of a dataset that show whether two ranks have the same dataset


def watch(torch: Any, recorder: ScriptRecorder) -> None:
    """Watch PyTorch from now on."""
    updates = OptimizerWatch(torch, recorder)
    recorder.gradient_tests.append(updates.is_gradient)
    steps = importlib.import_module("torch.optim.optimizer")
    steps.register_optimizer_step_pre_hook(partial(best_effort, updates.before))
    steps.register_optimizer_step_post_hook(partial(best_effort, updates.after))
    after(torch.optim.Optimizer, "add_param_group", lambda r, owner, *a, **k: updates.listen(owner))
    recorder.listen = updates.listen
    replace(torch.Tensor, "backward", updates.backward)
    forward = InputWatch(torch, recorder, updates)
    modules = torch.nn.modules.module
    modules.register_module_forward_pre_hook(partial(best_effort, forward.before))
    seen = partial(best_effort, forward.after)
    modules.register_module_forward_hook(seen, with_kwargs=True, always_call=True)
    loaders = LoaderWatch(torch, recorder)
    recorder.inspect = loaders.inspect
    data = torch.utils.data.dataloader
    after(data.DataLoader, "__iter__", lambda r, loader: setattr(r, LoaderWatch.BEGUN, loader))
    after(data._BaseDataLoaderIter, "__next__", lambda r, iterator: loaders.drawn(iterator))
    # Called by `save`, which may be pickled by its name.
    after(torch.serialization, "_open_zipfile_writer", lambda r, file: recorder.wrote(file))
    name = "set_num_threads"
    after(torch, name, lambda r, number: recorder.call(f"torch.{name}", threads=int(number)))


class OptimizerWatch:
    """Record each step of each optimizer, outside and inside of Horovod's wrapper."""

    def __init__(self, torch: Any, recorder: ScriptRecorder) -> None:
        self.torch, self.recorder = torch, recorder
        self.depth = 0  # open steps: the step of Horovod's optimizer contains another
        self.open = False  # whether the step is not counted yet
        self.gradients: dict[int, Any] = {}  # by parameter: sum over the backward passes
        self.waiting = False  # whether there was a backward pass since the last step
        self.parameters: dict[int, Any] = {}  # those that have a hook
        self.trained: list[Any] = []  # parameters of the outermost optimizer
        self.start: tuple[list[Array], list[Array]] | None = None  # their values, and its state
        self.applied: list[Array] | None = None  # gradients of the step that is about to end

    def listen(self, optimizer: Any) -> None:
        """Collect the gradients that backward passes add to the parameters of ``optimizer``."""
        for parameter in _parameters(optimizer):
            if parameter.requires_grad and id(parameter) not in self.parameters:
                self.parameters[id(parameter)] = parameter
                hook = partial(best_effort, self._collector(id(parameter)))
                parameter.register_hook(self.torch.utils.hooks.unserializable_hook(hook))

    def _collector(self, key: int) -> Any:
        def collect(gradient: Any) -> None:
            self.waiting = True
            if self.recorder.detailed and not self.recorder.ignored:
                value = gradient.detach().to_dense() if gradient.is_sparse else gradient.detach()
                held = self.gradients.get(key)
                self.gradients[key] = value.clone() if held is None else held + value

        return collect

    def backward(self, original: Any, loss: Any, *args: Any, **kwargs: Any) -> None:
        """Record the loss of a backward pass, to be added to those since the last step."""
        self.recorder.sample_weight = best_effort(_sample_weight, loss, self.recorder.batch)
        original(loss, *args, **kwargs)
        if self.recorder.detailed and not self.recorder.ignored and loss.numel() == 1:
            self.recorder.loss = (self.recorder.loss or 0.0) + loss.item()

    def trains(self, module: Any) -> bool:
        """Return whether an optimizer holds parameters of ``module``."""
        return any(id(parameter) in self.parameters for parameter in module.parameters())

    def is_gradient(self, value: Any) -> bool:
        """Return whether ``value`` is a parameter's gradient, or was computed from one."""
        if not self.torch.is_tensor(value):
            return False
        if self.waiting and value.dim():
            return value.shape in {parameter.shape for parameter in self.parameters.values()}
        gradients = [parameter.grad for parameter in self.parameters.values()]
        pointers = {gradient.data_ptr() for gradient in gradients if gradient is not None}
        return value.data_ptr() in pointers

    def before(self, optimizer: Any, *_: Any) -> None:
        """Record that a step begins, or the step within Horovod's."""
        self.depth += 1
        if self.depth > 1:
            return
        self.open = not self.recorder.ignored
        if self.open:
            group = optimizer.param_groups[0]
            rate = float(group.get("lr", 0.0))
            self.recorder.rate(rate, float(group.get("initial_lr", rate)))
        if not self.open or not self.recorder.detailed:
            return
        # That of ZeRO contains one of a part of the parameters.
        parameters = self.trained = _parameters(optimizer)
        record = self.recorder.record
        if wrapped := set(map(id, self.recorder.wrapped)):
            record.foreign = sum(p.requires_grad and id(p) not in wrapped for p in parameters)
        record.processor = record.processor or pytorch_processor(self.torch, parameters[0].device)
        state = [
            _array(value)
            for parameter in parameters
            for _, value in sorted(optimizer.state.get(parameter, {}).items())
            if self.torch.is_tensor(value)
        ]
        self.start = [_array(parameter) for parameter in parameters], state

    def after(self, optimizer: Any, *_: Any) -> None:
        """Record that the step within Horovod's has ended, or the step itself."""
        if self.start:
            parameters, (before, state) = self.trained, self.start
            self.recorder.local = [_gradient(p, self.gradients.get(id(p))) for p in parameters]
            self.applied = [_gradient(p, p.grad) for p in parameters]
            record = self.recorder.record
            record.graded = record.graded or any(p.grad is not None for p in parameters)
            self.recorder.update(before, self.applied, state)
        elif self.open:
            self.recorder.count()
        self.start, self.open, self.waiting = None, False, False
        self.gradients.clear()
        self.depth -= 1
        if not self.depth and self.applied:
            self.recorder.applied(self.applied, lambda: [_array(p) for p in self.trained])
            self.applied = None
        # Adasum steps within the backward pass, in which the ranks are not synchronized.
        if not self.depth and self.torch._C._current_graph_task_id() < 0:
            self.recorder.end_if_enough()


class InputWatch:
    """Record the model's input: that of the outermost module with parameters of an optimizer.

    It is the first argument, or the largest tensor of a batch in a container or in keywords. Other
    modules are ignored: torchvision's transforms are modules too.
    """

    def __init__(self, torch: Any, recorder: ScriptRecorder, updates: OptimizerWatch) -> None:
        self.torch, self.recorder, self.updates = torch, recorder, updates
        self.depth = Depth()

    def before(self, module: Any, *_: Any) -> None:
        """Record that a module is called, but not to compute activations again for gradients."""
        recomputed = self.torch._C._current_graph_task_id() >= 0
        if self.depth.value or (self.updates.trains(module) and not recomputed):
            self.depth.__enter__()

    def after(self, module: Any, arguments: Any, named: Any = None, *_: Any) -> None:
        """Record the arguments of a module that has returned; nothing of one that raised."""
        if not self.depth.value:
            return
        self.depth.__exit__()
        if self.depth.value or not isinstance(named, dict):
            return
        if not any(part.training for part in module.modules()):  # a wrapper's own may be outdated
            return
        first = [leaf for leaf in arguments[:1] if self._is_batch(leaf)]
        inputs = first or [leaf for leaf in leaves([*arguments, named]) if self._is_batch(leaf)]
        if inputs:  # in a dict the labels may come first
            self.recorder.samples(_array(max(inputs, key=lambda tensor: tensor.numel())))

    def _is_batch(self, value: Any) -> bool:
        return self.torch.is_tensor(value) and value.dim() > 0


class LoaderWatch:
    """Record the training loader: the last one that began an epoch before the first update."""

    BEGUN = "_begun"  # attribute of an iterator: its loader, until a batch is drawn

    def __init__(self, torch: Any, recorder: ScriptRecorder) -> None:
        self.torch, self.recorder = torch, recorder
        self.dataset: Any = None

    def drawn(self, iterator: Any) -> None:
        """Record that a loader begins an epoch, with its first batch: not all ranks may draw."""
        loader = vars(iterator).pop(self.BEGUN, None)
        if loader is not None:
            self.begun(loader)

    def begun(self, loader: Any) -> None:
        """Record that a loader begins an epoch."""
        if self.recorder.ignored:
            return
        batches = loader.batch_sampler  # may be a user's class, with or without a sampler
        sampler = loader.sampler if batches is None else getattr(batches, "sampler", batches)
        if not self.recorder.done:
            whole = batches is None or type(batches) is self.torch.utils.data.BatchSampler
            self._first(loader.dataset, sampler, counts=whole)
        elif loader.dataset is not self.dataset:
            return
        if getattr(sampler, "shuffle", False) and hasattr(sampler, "set_epoch"):
            known = self.recorder.record.loader
            if known:
                known.epochs.append((int(sampler.epoch), self.recorder.done))

    def _first(self, dataset: Any, sampler: Any, *, counts: bool) -> None:
        """Record ``dataset`` and ``sampler``; ``counts``: all that it yields is drawn.

        Another class of batches than PyTorch's may be a shard of the sampler, or yield batches.
        """
        sized = hasattr(dataset, "__len__") and hasattr(sampler, "__len__")
        self.dataset = dataset
        self.recorder.record.loader = Loader(
            sampler=type(sampler).__name__,
            replicas=getattr(sampler, "num_replicas", None),
            rank=getattr(sampler, "rank", None),
            drawn=len(sampler) if sized and counts else None,
            samples=len(dataset) if sized else None,
        )

    def inspect(self) -> None:
        """Record digests of some samples at the end, to compare the ranks' datasets."""
        record = self.recorder.record
        if not record.loader or not record.loader.samples:
            return
        indices = np.linspace(0, record.loader.samples - 1, INSPECTED).astype(int).tolist()
        with contextlib.suppress(Exception):  # the dataset may be of any type
            probes, again = (self._marks(indices) for _ in range(2))
            record.loader = dataclasses.replace(record.loader, probes=probes, fixed=probes == again)

    def _marks(self, indices: list[int]) -> list[str]:
        """Return digests of samples, drawn with the same random numbers on all ranks."""
        random.seed(0)
        np.random.seed(0)
        self.torch.manual_seed(0)
        return [mark(self.dataset[index]) for index in indices]


def mark(value: Any) -> str:
    """Return a digest of a sample of any type."""
    if isinstance(value, tuple | list):
        return "".join(mark(part) for part in value)
    if isinstance(value, Mapping):
        return mark(list(value.values()))
    array = _array(value) if hasattr(value, "detach") else np.asarray(value)
    # Of other objects, e.g. images, an array has only their addresses.
    data = type(value).__name__.encode() if array.dtype.hasobject else array.tobytes()
    return hashlib.blake2b(data, digest_size=8).hexdigest()


def _parameters(optimizer: Any) -> list[Any]:
    return [value for group in optimizer.param_groups for value in group["params"]]


def _sample_weight(loss: Any, samples: int) -> float | None:
    """Return the factor, without sign, of the loss of each of ``samples`` in ``loss``.

    Of a sum it is the factor of the sum; of a mean 1 / ``samples`` of its factor. None if the graph
    does not show it.
    """
    factor, node = 1.0, loss.grad_fn
    while (name := type(node).__name__).startswith(("Div", "Mul", "Neg", "ToCopy")):
        operand = getattr(node, "_saved_other", 1.0)
        if operand is None or getattr(operand, "ndim", False):
            return None
        factor *= 1 / float(operand) if name.startswith("Div") else float(operand)
        node = node.next_functions[0][0]
    reduction = getattr(node, "_saved_reduction", 0)  # of a loss function: 1 mean, 2 sum
    summed = name.startswith("Sum") or reduction == 2
    if not summed and not name.startswith("Mean") and not reduction:
        return None
    sizes = getattr(node, "_saved_self_sym_sizes", None) or node._saved_self.shape
    if not samples or not sizes or sizes[0] % samples:  # over something else
        return None
    return abs(factor) / (1 if summed else samples)


def _gradient(parameter: Any, value: Any) -> Array:
    """Return a gradient; zeros if the parameter has none."""
    return np.zeros(tuple(parameter.shape)) if value is None else _array(value)


def _array(tensor: Any) -> Array:
    tensor = tensor.detach()
    if hasattr(tensor, "full_tensor"):  # of FSDP; all ranks make the step
        tensor = tensor.full_tensor()
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    if tensor.dtype.is_floating_point and tensor.dtype.itemsize < 4:
        tensor = tensor.float()  # NumPy has no bfloat16
    array: Array = tensor.cpu().numpy()
    return np.array(array)
