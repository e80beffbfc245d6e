"""Watch Horovod, and hvdtrain's adapters if the script uses them."""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from hvdtrain.commands.verify.hooks import Depth, after, replace
from hvdtrain.commands.verify.script.record import (
    AVERAGED,
    KERAS_METRICS,
    SCALED,
    HorovodWorld,
    ScriptRecorder,
)
from hvdtrain.commands.verify.script.watch_tensorflow import run

BROADCASTS = (
    "broadcast_parameters",
    "broadcast_variables",
    "broadcast_global_variables",
    "broadcast_optimizer_state",
    "broadcast_object",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
)
REDUCTIONS = ("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_")
GATHERS = ("allgather", "grouped_allgather", "allgather_object")
ASYNC = (
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
)
OPERATIONS = (  # of PyTorch, and of TensorFlow
    "_allreduce_async",
    "_grouped_allreduce_async",
    "sparse_allreduce_async",
    "_allreduce",
    "_grouped_allreduce",
)
# Names of the first parameter in Horovod's functions.
FIRST = ("tensor", "tensors", "obj", "value", "params", "variables")
SMALL = 64  # values; larger tensors are no metrics


class HorovodWatch:
    """Watch Horovod's modules, each from its import by the script."""

    def __init__(self, recorder: ScriptRecorder) -> None:
        self.recorder = recorder
        self.gradients = Depth()  # open reductions of gradients
        self.reductions = Depth()  # open reductions called by the script
        self.pending: dict[Any, tuple[Any, list[Any]]] = {}  # by handle

    def operations(self, module: Any) -> None:
        """Count all reductions, whatever calls them: ``mpi_ops`` of either framework."""
        for name in OPERATIONS:
            if function := getattr(module, name, None):
                listener = partial(self._reduced, inspect.signature(function), module.Adasum)
                after(module, name, listener)

    def _reduced(
        self, signature: inspect.Signature, adasum: Any, _: Any, *args: Any, **kwargs: Any
    ) -> None:
        self.recorder.record.reduced += 1
        op = signature.bind(*args, **kwargs).arguments.get("op")
        self.recorder.record.adasum |= op == adasum

    def calls(self, module: Any) -> None:
        """Watch the script's calls: ``horovod.torch``, ``horovod.tensorflow`` and Keras'."""
        self.recorder.record.judged = True
        after(module, "init", lambda *a, **k: self.recorder.joined(_world(module)))
        for names, watched in (
            (BROADCASTS, self._broadcast),
            (REDUCTIONS, self._reduction),
            (GATHERS, self._gather),
            (ASYNC, self._async_reduction),
        ):
            for name in names:
                replace(module, name, watched)
        after(module, "synchronize", self._synchronized)
        optimizer = f"{module.__name__}.DistributedOptimizer"
        after(module, "DistributedOptimizer", lambda *a, **k: self.recorder.call(optimizer))
        replace(module, "_make_allreduce_grads_fn", self._reducer)

    def adapters(self, module: Any) -> None:
        """Watch ``hvdtrain.adapters.common_adapter``."""
        self.recorder.record.judged = True
        owner = module.CommonAdapter
        call = self.recorder.call
        replace(owner, "initialize", self._initialize)
        after(owner, "shard_data", lambda r, *a, **k: self._sharded("shard_data", r))
        after(owner, "distribute_optimizer", self._distributed)
        after(owner, SCALED, lambda r, *a, **k: call(SCALED, base=r.base, factor=r.factor))
        after(owner, AVERAGED, self._averaged)
        replace(owner, "broadcast_state", self._broadcast)

    def keras_data(self, module: Any) -> None:
        """Watch ``hvdtrain.keras.data``."""

        def sharded(*_: Any, **__: Any) -> None:
            self._sharded("hvd.shard", module.session.adapter().world)

        after(module, "shard", sharded)

    def keras_callbacks(self, module: Any) -> None:
        """Watch ``hvdtrain.keras.callbacks``."""
        replace(module.MetricAverageCallback, "average", self._keras_metrics)

    def _broadcast(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        with self.recorder.waiting(name):
            result = original(*args, **kwargs)
        # Only the root passes an object; asynchronous functions return a handle.
        value = result if name == "broadcast_object" else first_argument(args, kwargs)
        values = count(value)
        _note(lambda *_: self.recorder.broadcast(name, values))
        return result

    def _reducer(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the function by which Horovod's tape and optimizers for TensorFlow reduce."""
        reduce = original(*args, **kwargs)

        def reduce_grads(*grads: Any, **more: Any) -> Any:
            with self.gradients:
                return reduce(*grads, **more)

        return reduce_grads

    def _reduction(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a reduction by the script; few values that are no gradient are a metric."""
        with self.reductions as level:
            by_script = level == 1 and not self.gradients.value
            before = self._candidates(first_argument(args, kwargs)) if by_script else None
            result = original(*args, **kwargs)
        if before is not None:
            self._metric(kwargs.get("name") or original.__name__, before, result)
        return result

    def _gather(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Record a gathered value, which is equal on all ranks, if it may be a metric."""
        with self.reductions as level:
            by_script = level == 1 and not self.gradients.value
            result = original(*args, **kwargs)
        if by_script and self._candidates(result):
            before = [copied(leaf) for leaf in leaves(first_argument(args, kwargs))]
            self._metric(kwargs.get("name") or original.__name__, before, result)
        return result

    def _async_reduction(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the start of an asynchronous reduction."""
        before = self._candidates(first_argument(args, kwargs))
        handle = original(*args, **kwargs)
        if before is not None:
            self.pending[handle] = kwargs.get("name") or original.__name__, before
        return handle

    def _synchronized(self, result: Any, handle: Any) -> None:
        if pending := self.pending.pop(handle, None):
            self._metric(*pending, result)

    def _keras_metrics(self, original: Any, callback: Any) -> Any:
        local = type(callback.model).get_metrics_result(callback.model)
        result = original(callback)
        names = sorted(local.keys() & result.keys())
        before, after = ([copied(metrics[name]) for name in names] for metrics in (local, result))
        self.recorder.metric(f"{KERAS_METRICS} ({', '.join(names)})", before, after)
        return result

    def _metric(self, name: Any, before: list[Any], result: Any) -> None:
        after = [copied(leaf) for leaf in leaves(result)]

        def note(*parts: Any) -> None:
            self.recorder.metric(str(name), parts[: len(before)], parts[len(before) :])

        _note(note, [*before, *after])

    def _candidates(self, value: Any) -> list[Any] | None:
        """Return a copy of the values to be reduced, or None if they cannot be a metric."""
        parts = leaves(value)
        sizes = [_size(leaf) for leaf in parts]
        if None in sizes or not 0 < sum(filter(None, sizes)) <= SMALL:
            return None
        if any(self.recorder.is_gradient(leaf) for leaf in parts):
            return None
        return [copied(leaf) for leaf in parts]

    def _initialize(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        self.recorder.record.hvdtrain = True
        world = original(*args, **kwargs)
        self.recorder.joined(
            HorovodWorld(world.rank, world.size, world.local_rank, world.local_size)
        )
        return world

    def _distributed(self, result: tuple[Any, Any], *_: Any, **__: Any) -> None:
        self.recorder.listen(result[1])  # FSDP replaces the parameters
        self.recorder.record.reduced += 1  # with most strategies not by Horovod's operations

    def _sharded(self, name: str, part: Any) -> None:
        self.recorder.shards = part
        self.recorder.call(name, shards=part.size, shard=part.rank)

    def _averaged(self, result: Any, adapter: Any, /, count: float, **sums: Any) -> None:
        means, total = result
        names = sorted(sums)
        before = [float(sums[name]) / count if count else 0.0 for name in names]
        after = [means[name] for name in names]
        self.recorder.metric(f"{AVERAGED} over {total} samples", before, after)
        self.recorder.averaged(count)


def checkpoints(module: Any, recorder: ScriptRecorder, *, fresh: bool) -> None:
    """Watch ``hvdtrain.steps.checkpoint`` for loads; ``fresh``: let them find no checkpoint."""

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        checkpoint = None if fresh else original(*args, **kwargs)
        recorder.record.resumed |= checkpoint is not None
        return checkpoint

    replace(module, "load_newest", load)


def _world(module: Any) -> HorovodWorld:
    return HorovodWorld(module.rank(), module.size(), module.local_rank(), module.local_size())


def first_argument(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the first argument of a function of Horovod."""
    return args[0] if args else next((kwargs[name] for name in FIRST if name in kwargs), None)


def leaves(value: Any) -> list[Any]:
    """Return the tensors, arrays and numbers in ``value``, a nested container."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = vars(value)
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for item in value for leaf in leaves(item)]
    if hasattr(value, "shape") or isinstance(value, bool | int | float):
        return [value]
    return []


def _size(leaf: Any) -> int | None:
    """Return the number of values; None if it is not yet known, in a graph."""
    shape = tuple(getattr(leaf, "shape", ()))
    return None if None in shape else math.prod(shape)


def count(value: Any) -> int:
    """Return the number of values in a nested container."""
    return sum(_size(leaf) or 0 for leaf in leaves(value))


def copied(leaf: Any) -> Any:
    """Return a copy of the current value; in a graph, a tensor of it."""
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(leaf):
        return tf.identity(leaf)
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu().double().numpy()
    return np.array(leaf)


def _note(note: Callable[..., None], values: Sequence[Any] = ()) -> None:
    """Call ``note`` with arrays: now, or each time the graph being traced is run."""
    if "tensorflow" in sys.modules:
        run(note, values)
    else:
        note(*values)
