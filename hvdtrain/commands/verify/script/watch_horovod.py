"""What is seen of Horovod, and of hvdtrain's adapters where the script uses them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.commands.verify.hooks import Depth, after, quietly, replace
from hvdtrain.commands.verify.script.record import AVERAGED, KERAS_METRICS, Record
from hvdtrain.commands.verify.script.watch_tensorflow import run

BROADCASTS = (
    *("broadcast_parameters", "broadcast_variables", "broadcast_global_variables"),
    *("broadcast_optimizer_state", "broadcast_object"),
    *("broadcast", "broadcast_", "broadcast_async", "broadcast_async_"),
)
REDUCTIONS = ("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_")
GATHERS = ("allgather", "grouped_allgather", "allgather_object")
BEGINNINGS = (
    *("allreduce_async", "allreduce_async_"),
    *("grouped_allreduce_async", "grouped_allreduce_async_"),
)
OPERATIONS = (*BEGINNINGS, "_allreduce", "_grouped_allreduce")
# How Horovod calls the first argument.
FIRST = ("tensor", "tensors", "obj", "value", "params", "variables")
SMALL = 64  # values; what is larger is no metric
SCALED = "scale_learning_rate"


class Watch:
    """Horovod's modules, each from when the script imports it."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.gradients = Depth()  # open reductions of gradients
        self.reductions = Depth()  # open reductions that the script asked for
        self.begun: dict[Any, tuple[Any, list[Any]]] = {}  # by handle: reductions not waited for

    def operations(self, module: Any) -> None:
        """Count all reductions, whoever asks for them: ``mpi_ops`` of either framework."""
        for name in OPERATIONS:
            after(module, name, lambda a, k, r: self.record.reduced())

    def calls(self, module: Any) -> None:
        """Watch what a script calls: ``horovod.torch``, ``horovod.tensorflow`` and Keras'."""
        after(module, "init", lambda a, k, r: self.record.joined(_world(module)))
        for names, watched in (
            (BROADCASTS, self._broadcast),
            (REDUCTIONS, self._reduction),
            (GATHERS, self._gather),
            (BEGINNINGS, self._beginning),
        ):
            for name in names:
                replace(module, name, watched)
        after(module, "synchronize", self._waited)
        told = f"{module.__name__}.DistributedOptimizer"
        adasum = getattr(module, "Adasum", "no such operation")  # Keras' module has none
        after(
            module,
            "DistributedOptimizer",
            lambda a, k, r: self.record.call(told, adasum=k.get("op") == adasum),
        )
        replace(module, "_make_allreduce_grads_fn", self._maker)

    def adapters(self, module: Any) -> None:
        """Watch ``hvdtrain.adapters.common``."""
        owner = module.CommonAdapter
        after(owner, "initialize", lambda a, k, world: self._initialized(world))
        after(owner, "shard_data", lambda a, k, shards: self._sharded(shards))
        after(owner, SCALED, lambda a, k, rate: self._scaled(rate))
        after(owner, AVERAGED, self._averaged)
        replace(owner, "broadcast_state", self._broadcast)

    def keras_data(self, module: Any) -> None:
        """Watch ``hvdtrain.keras.data``."""
        chosen = module.session.chosen
        after(module, "shard", lambda a, k, r: self._cut(chosen(k.get("process_set")).world))

    def keras_callbacks(self, module: Any) -> None:
        """Watch ``hvdtrain.keras.callbacks``."""
        replace(module.MetricAverageCallback, "average", self._keras_metrics)

    def _broadcast(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        with self.record.waiting(name):
            result = original(*args, **kwargs)
        # On other ranks an object is what comes back; what is begun gives back a handle.
        given = result if name == "broadcast_object" else _given(args, kwargs)
        values = quietly(_count, given) or 0
        _note(lambda *_: self.record.broadcast(name, values))
        return result

    def _maker(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the function that Horovod's tape and optimizers for TensorFlow reduce with."""
        reduce = original(*args, **kwargs)

        def reduced(*grads: Any, **more: Any) -> Any:
            with self.gradients:
                return reduce(*grads, **more)

        return reduced

    def _reduction(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a reduction by the script; one of a few values that are no gradient is a metric."""
        with self.reductions as level:
            own = level == 1 and not self.gradients.value
            before = quietly(self._few, _given(args, kwargs)) if own else None
            result = original(*args, **kwargs)
        if before is not None:
            quietly(self._metric, kwargs.get("name") or original.__name__, before, result)
        return result

    def _gather(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Note what the ranks gather, which is the same on all, if it may be a metric."""
        with self.reductions as level:
            own = level == 1 and not self.gradients.value
            result = original(*args, **kwargs)
        if own and quietly(self._few, result):
            before = [_copy(leaf) for leaf in _leaves(_given(args, kwargs))]
            quietly(self._metric, kwargs.get("name") or original.__name__, before, result)
        return result

    def _beginning(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Note a reduction that goes on while the script does something else."""
        before = quietly(self._few, _given(args, kwargs))
        handle = original(*args, **kwargs)
        if before is not None:
            self.begun[handle] = kwargs.get("name") or original.__name__, before
        return handle

    def _waited(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if begun := self.begun.pop(args[0] if args else kwargs["handle"], None):
            self._metric(*begun, result)

    def _keras_metrics(self, original: Any, callback: Any) -> Any:
        own = quietly(type(callback.model).get_metrics_result, callback.model) or {}
        result = original(callback)
        names = sorted(own.keys() & result.keys())
        values = [[_copy(found[name]) for name in names] for found in (own, result)]
        quietly(self.record.metric, f"{KERAS_METRICS} ({', '.join(names)})", values[0], values[1])
        return result

    def _metric(self, name: Any, before: list[Any], result: Any) -> None:
        after = [_copy(leaf) for leaf in _leaves(result)]

        def note(*parts: Any) -> None:
            self.record.metric(str(name), parts[: len(before)], parts[len(before) :])

        _note(note, [*before, *after])

    def _few(self, value: Any) -> list[Any] | None:
        """Copy what is to be reduced if that may be a metric; return None otherwise."""
        leaves = _leaves(value)
        sizes = [_size(leaf) for leaf in leaves]
        if None in sizes or not 0 < sum(filter(None, sizes)) <= SMALL:
            return None
        if any(self.record.is_gradient(leaf) for leaf in leaves):
            return None
        return [_copy(leaf) for leaf in leaves]

    def _initialized(self, world: Any) -> None:
        self.record.data["hvdtrain"] = True
        self.record.joined(_world(lambda name: getattr(world, name)))

    def _sharded(self, shards: Any) -> None:
        size, rank = getattr(shards, "size", None), getattr(shards, "rank", None)
        self.record.call("shard_data", shards=size, shard=rank)

    def _cut(self, world: Any) -> None:
        self.record.call("hvd.shard", shards=world.size, shard=world.rank)

    def _scaled(self, rate: Any) -> None:
        base, factor = getattr(rate, "base", None), getattr(rate, "factor", None)
        self.record.call(SCALED, base=base, factor=factor)

    def _averaged(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        count = args[1] if len(args) > 1 else kwargs["count"]
        names = sorted(name for name in kwargs if name != "count")
        before = [float(kwargs[name]) / count if count else 0.0 for name in names]
        means, total = result
        after = [means[name] for name in names]
        self.record.metric(f"{AVERAGED} over {total} samples", before, after)


def checkpoints(module: Any, record: Record, *, fresh: bool) -> None:
    """Watch ``hvdtrain.steps.checkpoint``: whether one is loaded; none is if ``fresh``."""

    def load(original: Any, *args: Any, **kwargs: Any) -> Any:
        found = None if fresh else original(*args, **kwargs)
        record.data["resumed"] |= found is not None
        return found

    replace(module, "load_newest", load)


def _world(source: Any) -> dict[str, int]:
    """Return rank, size, local rank and local size of a module or a world."""
    names = ("rank", "size", "local_rank", "local_size")
    if callable(source):
        return {name: int(source(name)) for name in names}
    return {name: int(getattr(source, name)()) for name in names}


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function of Horovod's was given to work on."""
    return args[0] if args else next((kwargs[name] for name in FIRST if name in kwargs), None)


def _leaves(value: Any) -> list[Any]:
    """Return the tensors, arrays and numbers in ``value``, whatever holds them."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in _leaves(one)]
    if hasattr(value, "shape") or isinstance(value, bool | int | float):
        return [value]
    return []


def _size(leaf: Any) -> int | None:
    """Return how many values are in it; None where a graph does not know that yet."""
    shape = tuple(getattr(leaf, "shape", ()))
    return None if None in shape else math.prod(shape)


def _count(value: Any) -> int:
    return sum(_size(leaf) or 0 for leaf in _leaves(value))


def _copy(leaf: Any) -> Any:
    """Return what it holds now; in a graph, a tensor that will tell."""
    tf = sys.modules.get("tensorflow")
    if tf is not None and tf.is_tensor(leaf):
        return tf.identity(leaf)
    if hasattr(leaf, "detach"):
        leaf = leaf.detach().cpu().double().numpy()
    return np.array(leaf)


def _note(note: Callable[..., None], values: Sequence[Any] = ()) -> None:
    """Call ``note`` with arrays: now, or whenever the graph that is being traced is run."""
    if "tensorflow" in sys.modules:
        run(note, values)
    else:
        note(*values)
