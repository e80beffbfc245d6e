"""Keras 3 on all ranks: a drop-in for ``horovod.keras`` and ``horovod.tensorflow.keras``.

    import hvdtrain.keras as hvd

Horovod's own wrapper sums nothing with Keras 3: N ranks train N models without a word. Here a plain
``model.compile`` and ``model.fit`` compute on N ranks what one computes on the union of their data:

- ``DistributedOptimizer`` sums the gradients of all ranks, before they are clipped, accumulated or
  looked at for an overflow;
- the callbacks make ready the model that they are given to: rank 0's state for all, batches
  weighted by their samples, metrics over all ranks before any callback sees them, XLA off;
- ``shard`` cuts each global batch among the ranks, uneven ones too.

All ranks make the same calls in the same order; ``rank``, ``size`` and the like are free.
"""

from __future__ import annotations

import importlib
import os

from hvdtrain.errors import UsageError
from hvdtrain.system.machine.frameworks import is_installed

_MODULES = {
    **dict.fromkeys(
        (
            *("init", "is_initialized", "local_rank", "local_size", "rank", "shutdown", "size"),
            *("add_process_set", "remove_process_set"),
        ),
        "hvdtrain.keras.session",
    ),
    **dict.fromkeys(
        (
            "DistributedOptimizer",
            "PartialDistributedOptimizer",
            "broadcast_global_variables",
            "load_model",
        ),
        "hvdtrain.keras.optimizer",
    ),
    "shard": "hvdtrain.keras.data",
    # What is Horovod's own, as it is: one process trains without it.
    **dict.fromkeys(
        (
            *("Adasum", "Average", "Compression", "Sum"),
            *("allgather", "allreduce", "broadcast", "reducescatter"),
            *("cross_rank", "cross_size", "ProcessSet", "global_process_set"),
            *("start_timeline", "stop_timeline"),
            *("ccl_built", "cuda_built", "ddl_built", "gloo_built", "mpi_built", "nccl_built"),
            *("gloo_enabled", "mpi_enabled", "mpi_threads_supported", "rocm_built"),
        ),
        "horovod.tensorflow",
    ),
}
__all__ = sorted(["callbacks", "elastic", *_MODULES])


def __getattr__(name: str) -> object:
    if name in ("callbacks", "elastic"):
        return importlib.import_module(f"hvdtrain.keras.{name}")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = _MODULES[name]
    if module == "horovod.tensorflow" and not is_installed("horovod.tensorflow.mpi_lib"):
        raise UsageError(f"{name} is Horovod's, which is not here: run `hvdtrain install-horovod`")
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
