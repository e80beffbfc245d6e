"""Keras 3 on all ranks: a drop-in for ``horovod.keras`` and ``horovod.tensorflow.keras``.

    import hvdtrain.keras as hvd

Horovod's wrapper sums nothing with Keras 3: N ranks silently train N models. Here a plain
``model.compile`` and ``model.fit`` on N ranks give the result of one rank on the union of the data:

- ``DistributedOptimizer`` sums the gradients of all ranks, before they are clipped, accumulated or
  checked for overflows;
- the callbacks prepare their model: rank 0's state on all ranks, batches weighted by their samples,
  metrics over all ranks before any callback sees them, XLA off;
- ``shard`` splits each global batch among the ranks, also unevenly.

All ranks must make the same calls in the same order, except for ``rank``, ``size`` and the like.
"""

from __future__ import annotations

import importlib
import os
from typing import Any, NoReturn

from hvdtrain.errors import UsageError
from hvdtrain.system.machine.frameworks import is_installed

_RANKS = ("init", "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size")
_OPTIMIZER = ("broadcast_global_variables", "DistributedOptimizer", "load_model")
# Re-exported from Horovod; one process trains without it.
_OPERATIONS = ("Adasum", "Average", "Compression", "Sum")
_COLLECTIVES = ("allgather", "allreduce", "broadcast", "reducescatter")
_WORLD = ("cross_rank", "cross_size", "global_process_set")
_TIMELINE = ("start_timeline", "stop_timeline")
_BUILT = ("ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built")
_ENABLED = ("gloo_enabled", "mpi_enabled", "mpi_threads_supported", "rocm_built")
_MODULES = {
    **dict.fromkeys(_RANKS, "hvdtrain.keras.session"),
    **dict.fromkeys(_OPTIMIZER, "hvdtrain.keras.optimizer"),
    "shard": "hvdtrain.keras.data",
    **dict.fromkeys(
        _OPERATIONS + _COLLECTIVES + _WORLD + _TIMELINE + _BUILT + _ENABLED, "horovod.tensorflow"
    ),
}
_REMOVED = {
    "elastic": "use callbacks.BackupAndRestore, which saves on a signal and near the walltime, and "
    "a chain of jobs that resume (hvdtrain submit --chain)",
    "PartialDistributedOptimizer": "use DistributedOptimizer, which trains all layers on all ranks",
    **dict.fromkeys(
        ("ProcessSet", "add_process_set", "remove_process_set"),
        "train each model in a job of its own",
    ),
}
__all__ = sorted(["callbacks", *_MODULES, *_REMOVED])


class _Removed:
    """A name of Horovod that is refused on use."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _refuse(self) -> NoReturn:
        raise UsageError(f"hvd.{self._name} is not supported: {_REMOVED[self._name]}")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):  # of Python or an editor
            raise AttributeError(name)
        self._refuse()

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        self._refuse()


def __getattr__(name: str) -> object:
    if name == "callbacks":
        return importlib.import_module(f"hvdtrain.keras.{name}")
    if name in _REMOVED:
        return _Removed(name)
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    if module == "horovod.tensorflow" and not is_installed("horovod.tensorflow.mpi_lib"):
        raise UsageError(
            f"{name} needs Horovod, which is not installed: `hvdtrain install-horovod`"
        )
    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return __all__


if (_backend := os.environ.get("KERAS_BACKEND", "tensorflow")) != "tensorflow":
    raise UsageError(
        f"KERAS_BACKEND={_backend}: hvdtrain.keras is for Keras on TensorFlow; unset the variable"
    )
if not is_installed("tensorflow"):
    raise UsageError("hvdtrain.keras needs TensorFlow: pip install 'hvdtrain[tensorflow]'")
importlib.import_module("hvdtrain.adapters.tensorflow")  # TensorFlow, without its banners
