"""Steps 1 and 2 for Keras: the adapter that all of this package stands on, one per process."""

from __future__ import annotations

from typing import Any

import keras

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.adapters.select import adapter as select_adapter
from hvdtrain.errors import UsageError

_adapters: list[CommonAdapter] = []  # none before ``init``, then one


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the other ranks, and take a GPU or this rank's share of the cores; all ranks call it.

    It comes before TensorFlow computes anything. A second call does nothing.

    Raises:
        UsageError: on every rank: launcher and Horovod count other processes, the ranks run other
            software, they share a GPU; or it was asked for a part of the ranks.
    """
    if comm is not None or process_sets is not None:
        raise UsageError("init: comm and process_sets are not known here; all ranks train together")
    if keras.backend.backend() != "tensorflow" or int(keras.__version__.split(".")[0]) < 3:
        raise UsageError(
            f"hvdtrain.keras is for Keras 3 on TensorFlow, here is Keras {keras.__version__} on "
            f"{keras.backend.backend()}: TensorFlow 2.16 and later have it; leave ~/.keras/"
            "keras.json and TF_USE_LEGACY_KERAS out"
        )
    if not _adapters:
        made = select_adapter("tensorflow")
        made.initialize()
        made.pin_device()
        _adapters.append(made)


def adapter() -> CommonAdapter:
    """Return the adapter; raise ``UsageError`` before ``init``."""
    if not _adapters:
        raise UsageError("call hvd.init() first: before it there is no rank and no size")
    return _adapters[0]


def shutdown() -> None:
    """Leave the other ranks; all ranks call it, and ``init`` begins anew."""
    while _adapters:
        _adapters.pop().communicator.close()


def is_initialized() -> bool:
    """Return whether ``init`` was called."""
    return bool(_adapters)


def rank() -> int:
    """Return this process's number among all ranks."""
    return adapter().world.rank


def size() -> int:
    """Return the world size: how many ranks there are."""
    return adapter().world.size


def local_rank() -> int:
    """Return this process's number among the ranks of its host."""
    return adapter().world.local_rank


def local_size() -> int:
    """Return how many ranks this host has."""
    return adapter().world.local_size
