"""What is seen of Horovod, and of hvdtrain's adapters where the script uses them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hvdtrain.environment.observation.record import Record
from hvdtrain.environment.observation.watch_tensorflow import run
from hvdtrain.environment.observation.wrap import Depth, after, replace

BROADCASTS = (
    "broadcast_parameters",
    "broadcast_variables",
    "broadcast_global_variables",
    "broadcast_optimizer_state",
    "broadcast_object",
)
REDUCTIONS = ("allreduce", "allreduce_", "grouped_allreduce", "grouped_allreduce_")
OPERATIONS = (
    "allreduce_async",
    "allreduce_async_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "_allreduce",
    "_grouped_allreduce",
)
SMALL = 64  # values; what is larger is no metric
SCALED, AVERAGED = "scale_learning_rate", "average_metrics"


class Watch:
    """Horovod's modules, each from when the script imports it."""

    def __init__(self, record: Record) -> None:
        self.record = record
        self.gradients = Depth()  # open reductions of gradients
        self.reductions = Depth()  # open reductions that the script asked for

    def operations(self, module: Any) -> None:
        """Count all reductions, whoever asks for them: ``mpi_ops`` of either framework."""
        for name in OPERATIONS:
            after(module, name, lambda a, k, r: self.record.reduced())

    def calls(self, module: Any) -> None:
        """Watch what a script calls: ``horovod.torch``, ``horovod.tensorflow`` and Keras'."""
        after(module, "init", lambda a, k, r: self.record.joined(_world(module)))
        for name in BROADCASTS:
            replace(module, name, self._broadcast)
        for name in REDUCTIONS:
            replace(module, name, self._reduction)
        told = f"{module.__name__}.DistributedOptimizer"
        after(module, "DistributedOptimizer", lambda a, k, r: self.record.call(told))
        replace(module, "_make_allreduce_grads_fn", self._maker)

    def adapters(self, module: Any) -> None:
        """Watch ``hvdtrain.adapters.common``."""
        owner = module.CommonAdapter
        after(owner, "initialize", lambda a, k, world: self._initialized(world))
        after(owner, "shard_data", lambda a, k, shards: self._sharded(shards))
        after(owner, SCALED, lambda a, k, rate: self._scaled(rate))
        after(owner, AVERAGED, self._averaged)
        replace(owner, "broadcast_state", self._broadcast)

    def _broadcast(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        name = original.__name__
        with self.record.waiting(name):
            result = original(*args, **kwargs)
        _note(lambda *_: self.record.call(name))
        return result

    def _maker(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The function that Horovod's tape and optimizers for TensorFlow reduce with."""
        reduce = original(*args, **kwargs)

        def reduced(*grads: Any, **more: Any) -> Any:
            with self.gradients:
                return reduce(*grads, **more)

        return reduced

    def _reduction(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """A reduction that the script asks for; of a few values that are no gradient: a metric."""
        with self.reductions as level:
            value = args[0] if args else kwargs.get("tensor")
            before = None if level > 1 or self.gradients.value else self._small(value)
            result = original(*args, **kwargs)
        if before is not None:
            name = str(kwargs.get("name") or original.__name__)
            _note(functools.partial(self.record.metric, name), [before, self._small(result)])
        return result

    def _small(self, value: Any) -> Any:
        """A copy of ``value`` if it may be a metric; None otherwise."""
        tf = sys.modules.get("tensorflow")
        if tf is not None and tf.is_tensor(value):
            count = value.shape.num_elements()
            return tf.identity(value) if count is not None and count <= SMALL else None
        if hasattr(value, "detach"):
            value = None if self.record.is_gradient(value) else value.detach().cpu().numpy()
        return np.array(value) if value is not None and np.size(value) <= SMALL else None

    def _initialized(self, world: Any) -> None:
        self.record.data["hvdtrain"] = True
        self.record.joined(_world(lambda name: getattr(world, name)))

    def _sharded(self, shards: Any) -> None:
        size, rank = getattr(shards, "size", None), getattr(shards, "rank", None)
        self.record.call("shard_data", shards=size, shard=rank)

    def _scaled(self, rate: Any) -> None:
        base, factor = getattr(rate, "base", None), getattr(rate, "factor", None)
        self.record.call(SCALED, base=base, factor=factor)

    def _averaged(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        count = args[1] if len(args) > 1 else kwargs["count"]
        names = sorted(name for name in kwargs if name != "count")
        before = [float(kwargs[name]) / count if count else 0.0 for name in names]
        means, total = result
        self.record.metric(f"{AVERAGED} over {total} samples", before, [means[n] for n in names])


def _world(source: Any) -> dict[str, int]:
    """Rank, size, local rank and size as a module or a world tells them."""
    names = ("rank", "size", "local_rank", "local_size")
    if callable(source):
        return {name: int(source(name)) for name in names}
    return {name: int(getattr(source, name)()) for name in names}


def _note(note: Callable[..., None], values: Sequence[Any] = ()) -> None:
    """Call ``note`` with arrays: now, or whenever the graph that is being traced is run."""
    if "tensorflow" in sys.modules:
        run(note, values)
    else:
        note(*values)
