"""Steps 1 and 2 for Keras: the adapter of the package."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.select import adapter as select_adapter
from hvdtrain.errors import UsageError

_adapter: CommonAdapter | None = None  # created by ``init``
NO_SETS = "process sets are not supported: train each model in a job of its own"


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Connect to the other ranks, and select a GPU or this rank's share of the cores.

    All ranks must call it, before TensorFlow computes anything. A second call has no effect.

    Args:
        comm: not supported.
        process_sets: not supported.

    Raises:
        UsageError: on every rank: the process counts of launcher and Horovod or the software of
            the ranks differ, ranks share a GPU, or ``comm`` or ``process_sets`` is set.
    """
    global _adapter
    if comm is not None:
        raise UsageError("init: comm is not supported: all ranks start together")
    if process_sets:
        raise UsageError(f"init: {NO_SETS}")
    if keras.backend.backend() != "tensorflow" or int(keras.__version__.split(".")[0]) < 3:
        raise UsageError(
            f"hvdtrain.keras is for Keras 3 on TensorFlow, here is Keras {keras.__version__} on "
            f"{keras.backend.backend()}: use TensorFlow 2.16 or later, without ~/.keras/keras.json "
            "and TF_USE_LEGACY_KERAS"
        )
    if _adapter is None:
        created = select_adapter("tensorflow")
        created.initialize()
        created.pin_device()
        _adapter = created


def adapter() -> CommonAdapter:
    """Return the adapter of this process; ``UsageError`` before ``init``."""
    if _adapter is None:
        raise UsageError("call hvd.init() first: the ranks are not connected")
    return _adapter


def check_process_set(process_set: Any) -> None:
    """Raise ``UsageError`` if ``process_set`` is neither None nor that of all ranks."""
    if process_set is not None and getattr(process_set, "process_set_id", None) != 0:
        raise UsageError(f"process_set: {NO_SETS}")


def shutdown() -> None:
    """Disconnect from the other ranks; all ranks must call it. ``init`` may be called again."""
    global _adapter
    if _adapter is not None:
        former, _adapter = _adapter, None
        former.communicator.close()


def is_initialized() -> bool:
    """Return whether ``init`` was called."""
    return _adapter is not None


def rank() -> int:
    """Return this process's number among all ranks."""
    return adapter().world.rank


def size() -> int:
    """Return the world size: the number of ranks."""
    return adapter().world.size


def local_rank() -> int:
    """Return this process's number among the ranks of its host."""
    return adapter().world.local_rank


def local_size() -> int:
    """Return the number of ranks on this host."""
    return adapter().world.local_size
