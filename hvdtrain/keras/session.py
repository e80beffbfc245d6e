"""Steps 1 and 2 for Keras: the adapter of the package, one per process set.

Horovod's process sets are groups of ranks that sum among themselves. A model trains in the set of
its ``DistributedOptimizer``: all operations on it use that set's adapter, whose ranks are numbered
from 0, and involve no other rank.
"""

from __future__ import annotations

import atexit
import builtins
import functools
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import keras

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.select import adapter as select_adapter
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.detect import detect

_adapters: dict[int, CommonAdapter] = {}  # by process set; 0: all ranks, created by ``init``
_known: dict[int, Any] = {}  # process sets, except for the global one
_fails = False  # the script has called ``sys.exit`` or ``exit`` with a code other than 0
DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Connect to the other ranks, and select a GPU or this rank's share of the cores.

    All ranks must call it, before TensorFlow computes anything. A second call has no effect.

    Args:
        comm: not supported.
        process_sets: the ``ProcessSet``s that will be used, the same on all ranks; ``dynamic`` if
            ``add_process_set`` creates them later.

    Raises:
        UsageError: on every rank: the process counts of launcher and Horovod or the software of
            the ranks differ, ranks share a GPU, a process set is invalid, or ``comm`` is set.
    """
    if comm is not None:
        raise UsageError(
            "init: comm is not supported: all ranks start together, and process_sets="
            "[hvd.ProcessSet([0, 1]), ...] lets groups of them train separate models"
        )
    if keras.backend.backend() != "tensorflow" or int(keras.__version__.split(".")[0]) < 3:
        raise UsageError(
            f"hvdtrain.keras is for Keras 3 on TensorFlow, here is Keras {keras.__version__} on "
            f"{keras.backend.backend()}: use TensorFlow 2.16 or later, without ~/.keras/keras.json "
            "and TF_USE_LEGACY_KERAS"
        )
    if _adapters:
        return
    sets: Sequence[Any] = () if isinstance(process_sets, str) else process_sets or ()
    _check_sets(sets, detect(os.environ).size)
    created: Any = select_adapter("tensorflow")
    if process_sets:
        created.process_sets = process_sets
    created.initialize()
    created.pin_device()
    _adapters[0] = created
    _known.update((process_set.process_set_id, process_set) for process_set in sets)
    if created.world.size > 1:
        atexit.register(_part)
        for module, name in ((sys, "exit"), (builtins, "exit"), (builtins, "quit")):
            if hasattr(module, name):  # not under python -S
                setattr(module, name, _noted(getattr(module, name)))


def _check_sets(sets: Iterable[Any], size: int) -> None:
    """Raise ``UsageError`` if one of ``sets`` is invalid for ``size`` ranks, or exists already.

    Horovod's message would not help, or it would end the process.
    """
    known = [tuple(process_set.ranks) for process_set in _known.values()]
    for process_set in sets:
        ranks = getattr(process_set, "ranks", None)
        if not ranks:
            raise UsageError(f"{process_set!r}: a process set must be an hvd.ProcessSet([0, 1])")
        wrong = [rank for rank in ranks if not 0 <= rank < size]
        if wrong or len(set(ranks)) < len(ranks):
            raise UsageError(f"the process set of the ranks {ranks}: there are {size}, each once")
        if len(ranks) == size:
            raise UsageError(f"the process set of the ranks {ranks} is hvd.global_process_set")
        if tuple(ranks) in known:
            raise UsageError(f"the process set of the ranks {ranks} exists twice: use the first")
        known.append(tuple(ranks))


def add_process_set(process_set: Any) -> Any:
    """Create a process set, also from ranks, after ``init``; all ranks must call it.

    Raises:
        UsageError: Horovod was started without dynamic process sets, or the set is invalid.
    """
    from horovod.tensorflow import ProcessSet
    from horovod.tensorflow import add_process_set as add

    new = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _check_sets([new], size())
    try:
        add(new)
    except ValueError as error:
        if DYNAMIC not in str(error):
            raise
        raise UsageError(
            f"add_process_set after init needs {DYNAMIC}=1, or hvd.init(process_sets='dynamic'); "
            "pass sets that are known at the start to hvd.init(process_sets=[...])"
        ) from None
    _known[new.process_set_id] = new
    return new


def remove_process_set(process_set: Any) -> bool:
    """Remove a process set, in which no model trains any more; return whether it existed.

    All ranks must call it.
    """
    from horovod.tensorflow import remove_process_set as remove

    number = process_set.process_set_id
    if number not in _known:
        return False
    _adapters.pop(number, None)
    del _known[number]
    return bool(remove(process_set))


def adapter(process_set: Any = None) -> CommonAdapter:
    """Return the adapter of a process set; default: of all ranks.

    Raises:
        UsageError: before ``init``; the set is unknown, or this rank is not in it.
    """
    if not _adapters:
        raise UsageError("call hvd.init() first: the ranks are not connected")
    number = number_of(process_set)
    if number in _adapters:
        return _adapters[number]
    if number not in _known:
        raise UsageError(
            f"the process set {process_set} is unknown: pass it to hvd.init(process_sets=[...])"
        )
    whole, ranks = _adapters[0], process_set.ranks
    if whole.world.rank not in ranks:
        raise UsageError(
            f"rank {whole.world.rank} is not in the process set of the ranks {ranks}: build and "
            "train its model under `if process_set.included():`"
        )
    _adapters[number] = part = _part_of(whole, process_set)
    return part


def adapters() -> list[CommonAdapter]:
    """Return the adapters of the process sets that this rank has used, in that order."""
    return list(_adapters.values())


def chosen(process_set: Any) -> CommonAdapter:
    """Return the adapter of the set whose ranks share data; with process sets it is required.

    Raises:
        UsageError: there are process sets, and none is specified: a model of one would be trained
            on only a part of its data.
    """
    if process_set is None and _known:
        raise UsageError(
            "shard: there are process sets, so specify the one that trains on these data: "
            "process_set=..., or hvd.global_process_set for all ranks"
        )
    return adapter(process_set)


def number_of(process_set: Any) -> int | None:
    """Return Horovod's number of a process set, 0 for that of all ranks; None: removed."""
    return getattr(process_set, "process_set_id", 0)


def _part_of(whole: CommonAdapter, process_set: Any) -> CommonAdapter:
    """Return an adapter like ``whole`` for only the ranks of ``process_set``.

    Its calls are not counted for ``waits``, since other sets make different calls.
    """
    from hvdtrain.collectives.horovod_tf import HorovodTensorFlow

    part = type(whole)()
    part.communicator = HorovodTensorFlow(process_set)
    part.ranks = [whole.ranks[rank] for rank in process_set.ranks]
    part.world = replace(
        whole.world,
        rank=part.communicator.rank,
        size=part.communicator.size,
        hosts=len({facts.host_id for facts in part.ranks}),
    )
    part.device, part.has_gpu, part.threads = whole.device, whole.has_gpu, whole.threads
    return part


def shutdown() -> None:
    """Disconnect from the other ranks; all ranks must call it. ``init`` may be called again."""
    if _adapters:
        _part()
        whole = _adapters[0]
        _adapters.clear()
        _known.clear()
        whole.communicator.close()


def _part() -> None:
    """Wait for all ranks if there are process sets: Horovod ends on all with the first rank.

    A rank that fails does not wait, unless by ``raise SystemExit``, which leaves no trace.
    """
    if _known and _adapters and not _fails and not hasattr(sys, "last_type"):
        _adapters[0].communicator.gather(b"")


def _noted(leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return an ``exit`` that records failures for ``_part``: ``atexit`` has no exit code."""

    @functools.wraps(leave)
    def noted(code: Any = None) -> NoReturn:
        global _fails
        _fails = code not in (None, 0)
        leave(code)

    return noted


def is_initialized() -> bool:
    """Return whether ``init`` was called."""
    return bool(_adapters)


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
