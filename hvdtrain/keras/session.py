"""Steps 1 and 2 for Keras: the adapter that all of this package stands on, one per process set.

Horovod's process sets are parts of the ranks that sum among themselves. A model trains in the set
that its ``DistributedOptimizer`` was given: what is done for that model is done by that set's own
adapter, whose ranks are numbered from 0, and by no other rank.
"""

from __future__ import annotations

import atexit
import functools
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import keras

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.adapters.select import adapter as select_adapter
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.system.runtime.detect import detect, is_elastic
from hvdtrain.system.runtime.exit import outlive_loss

_adapters: dict[int, CommonAdapter] = {}  # by process set; 0 is all ranks, there after ``init``
_known: dict[int, Any] = {}  # process sets, but for the global one
_fails = False  # the script has given ``sys.exit`` another code than 0
DYNAMIC = "HOROVOD_DYNAMIC_PROCESS_SETS"


def init(comm: Any = None, process_sets: Sequence[Any] | str | None = None) -> None:
    """Join the other ranks, and take a GPU or this rank's share of the cores; all ranks call it.

    It comes before TensorFlow computes anything. A second call does nothing.

    Args:
        comm: not known here.
        process_sets: the ``ProcessSet``s that will be used, the same on all ranks; ``dynamic``
            where ``add_process_set`` makes them later.

    Raises:
        UsageError: on every rank: launcher and Horovod count other processes, the ranks run other
            software, they share a GPU; a process set is none; or ``comm`` was given.
    """
    if comm is not None:
        raise UsageError(
            "init: comm is not known here: all ranks start together, and process_sets="
            "[hvd.ProcessSet([0, 1]), ...] lets some of them train a model of their own"
        )
    if keras.backend.backend() != "tensorflow" or int(keras.__version__.split(".")[0]) < 3:
        raise UsageError(
            f"hvdtrain.keras is for Keras 3 on TensorFlow, here is Keras {keras.__version__} on "
            f"{keras.backend.backend()}: TensorFlow 2.16 and later have it; leave ~/.keras/"
            "keras.json and TF_USE_LEGACY_KERAS out"
        )
    if _adapters:
        return
    sets: Sequence[Any] = ()
    if process_sets is not None and not isinstance(process_sets, str):
        sets = process_sets
    _check_sets(sets, detect(os.environ).size)
    made: Any = select_adapter("tensorflow")
    if process_sets:
        made.process_sets = process_sets
    with outliving_loss():
        made.initialize()
        made.pin_device()
    _adapters[0] = made
    _known.update((one.process_set_id, one) for one in sets)
    if made.world.size > 1:
        atexit.register(_part)
        sys.exit = _noted(sys.exit)


@contextmanager
def outliving_loss() -> Iterator[None]:
    """Start this rank anew where the block fails because another one is lost, if that is the way.

    Otherwise what the block raises is raised.
    """
    try:
        yield
    except HvdtrainError:  # of ours, none comes of a loss
        raise
    except Exception:
        if is_elastic(os.environ):
            outlive_loss()
        raise


def _check_sets(sets: Iterable[Any], size: int) -> None:
    """Raise ``UsageError`` where one of ``sets`` is none of ``size`` ranks, or is there twice.

    Horovod says nothing of use then, or ends the process.
    """
    there = [tuple(one.ranks) for one in _known.values()]
    for one in sets:
        ranks = getattr(one, "ranks", None)
        if not ranks:
            raise UsageError(f"process sets are given as hvd.ProcessSet([0, 1]), not as {one!r}")
        wrong = [rank for rank in ranks if not 0 <= rank < size]
        if wrong or len(set(ranks)) < len(ranks):
            raise UsageError(f"the process set of the ranks {ranks}: there are {size}, each once")
        if len(ranks) == size:
            raise UsageError(f"the process set of the ranks {ranks} is hvd.global_process_set")
        if tuple(ranks) in there:
            raise UsageError(f"the process set of the ranks {ranks} is there twice: use the first")
        there.append(tuple(ranks))


def add_process_set(process_set: Any) -> Any:
    """Make a process set after ``init``; all ranks call it, those of other sets too.

    Args:
        process_set: or a list of ranks.

    Returns:
        The process set.

    Raises:
        UsageError: Horovod was not started for it, or there is no such set.
    """
    from horovod.tensorflow import ProcessSet
    from horovod.tensorflow import add_process_set as add

    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    _check_sets([made], size())
    try:
        add(made)
    except ValueError as error:
        if DYNAMIC not in str(error):
            raise
        raise UsageError(
            f"add_process_set after init needs {DYNAMIC}=1, or hvd.init(process_sets='dynamic'); "
            "sets that are known at the start are given to hvd.init(process_sets=[...])"
        ) from None
    _known[made.process_set_id] = made
    return made


def remove_process_set(process_set: Any) -> bool:
    """Forget a process set; all ranks call it. Models that train in it train no more.

    Returns:
        Whether it was there.
    """
    from horovod.tensorflow import remove_process_set as remove

    number = process_set.process_set_id
    if number not in _known:
        return False
    _adapters.pop(number, None)
    del _known[number]
    return bool(remove(process_set))


def adapter(process_set: Any = None) -> CommonAdapter:
    """Return the adapter of a process set, of all ranks by default.

    Raises:
        UsageError: before ``init``; the set is not known, or this rank is none of its ranks.
    """
    if not _adapters:
        raise UsageError("call hvd.init() first: before it there is no rank and no size")
    number = number_of(process_set)
    if number in _adapters:
        return _adapters[number]
    if number not in _known:
        raise UsageError(
            f"the process set {process_set} is not known: give it to hvd.init(process_sets=[...])"
        )
    whole, ranks = _adapters[0], process_set.ranks
    if whole.world.rank not in ranks:
        raise UsageError(
            f"rank {whole.world.rank} is not in the process set of the ranks {ranks}: build and "
            "train its model under `if process_set.included():`"
        )
    _adapters[number] = made = _part_of(whole, process_set)
    return made


def chosen(process_set: Any) -> CommonAdapter:
    """Return the adapter of the set whose ranks share data; it is named where there are several.

    Raises:
        UsageError: there are process sets, and none is named: a model of one would see a part of
            its data.
    """
    if process_set is None and _known:
        raise UsageError(
            "shard: there are process sets, so name the one that trains on these data: "
            "process_set=..., or hvd.global_process_set for all ranks"
        )
    return adapter(process_set)


def number_of(process_set: Any) -> int | None:
    """Return Horovod's number of a process set, 0 for that of all ranks; None: it has none."""
    number: int | None = getattr(process_set, "process_set_id", 0)
    return number


def _part_of(whole: CommonAdapter, process_set: Any) -> CommonAdapter:
    """Return an adapter like ``whole`` for the ranks of ``process_set`` alone.

    Its calls are not counted for ``waits``: other sets make others, in their own time.
    """
    from hvdtrain.collectives.horovod_tf import HorovodTensorFlow

    made = type(whole)()
    made.communicator = HorovodTensorFlow(process_set)
    made.ranks = [whole.ranks[rank] for rank in process_set.ranks]
    made.world = replace(
        whole.world,
        rank=made.communicator.rank,
        size=made.communicator.size,
        hosts=len({facts.place for facts in made.ranks}),
    )
    made.device, made.has_gpu, made.threads = whole.device, whole.has_gpu, whole.threads
    return made


def shutdown() -> None:
    """Leave the other ranks; all ranks call it, and ``init`` begins anew."""
    if _adapters:
        _part()
        whole = _adapters[0]
        _adapters.clear()
        _known.clear()
        whole.communicator.close()


def _part() -> None:
    """Wait for all ranks where there are process sets: Horovod ends on all with the first rank.

    A rank that fails waits for nobody.
    """
    if _known and _adapters and not _fails and not hasattr(sys, "last_type"):
        _adapters[0].communicator.gather(b"")


def _noted(leave: Callable[..., NoReturn]) -> Callable[..., NoReturn]:
    """Return ``sys.exit`` so that ``_part`` knows of a failure: no exit code reaches ``atexit``."""

    @functools.wraps(leave)
    def noted(status: Any = None, /) -> NoReturn:
        global _fails
        _fails = status not in (None, 0)
        leave(status)

    return noted


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
