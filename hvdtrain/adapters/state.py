"""Steps 6 and 7 for every adapter: broadcast, save and load the state of a training."""

from __future__ import annotations

import atexit
import json
import logging
import sys
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from hvdtrain.adapters.base import Adapter, JsonValues
from hvdtrain.adapters.digests import OPTIONS, Groups, compare
from hvdtrain.adapters.framework import Flags, Framework
from hvdtrain.adapters.rank_buffers import (
    buffers_of_rank,
    different_buffers,
    gather_buffers,
    mean_buffers,
)
from hvdtrain.adapters.save import Save, Status
from hvdtrain.adapters.state_view import HostCopies, StateView
from hvdtrain.adapters.strategy import BaseStrategy
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import Arrays, Checkpoint, check_keys
from hvdtrain.system.machine.limits import GIB, available_memory
from hvdtrain.system.runtime.exit import process_status
from hvdtrain.system.runtime.waits import Waits, together

log = logging.getLogger(__name__)

RATES = {"lr", "learning_rate"}  # a function of the position in the training, or a scheduler's
FILES = {".pt", ".pth", ".ckpt", ".bin", ".h5", ".keras", ".safetensors"}  # one model each


class StateAdapter(Adapter):
    """Broadcast and checkpoints over a ``Communicator``, by the view of the model's state."""

    name: str  # of the strategy, as in --strategy
    communicator: Communicator
    framework: Framework
    strategy: BaseStrategy
    stop_wanted = False  # whether a stop was requested, e.g. by a signal

    def __init__(self) -> None:
        self._seen = 0  # samples that this rank has trained on, including those before a resume
        self.waits = Waits(0, [])  # until the world is known
        self.rank_buffers: Arrays = {}  # of a loaded checkpoint, until this rank trains on
        self._save: Save | None = None  # the newest
        self._warns = False  # whether `_warn_unfinished` is called when the program ends
        self._copies: HostCopies | None = None
        self._is_short = False  # the memory of a host, for the copies
        # Options of each optimizer at its step 5 or 6.
        self._initial_options: weakref.WeakKeyDictionary[Any, Groups] = weakref.WeakKeyDictionary()

    def view(self, model: Any, optimizer: Any = None) -> StateView:
        """Return the view of the state; a strategy that shards it returns that of step 5."""
        return self.strategy.view(model, optimizer)

    def export_state(self, model: Any, optimizer: Any) -> Checkpoint:
        """Return the whole state as NumPy arrays by name: if it is sharded, to inspect a small one.

        If the framework computes in host memory, they may share it: use them before it continues.
        """
        return self.view(model, optimizer).export(optimizer)

    def import_state(self, model: Any, optimizer: Any, state: Checkpoint) -> None:
        """Load ``state``; ``UsageError`` if names or shapes are not those of this model."""
        self.view(model, optimizer).restore(optimizer, state)

    # The steps

    def check_trained(self, model: Any, optimizer: Any) -> None:
        """Raise ``UsageError`` if ``model`` or ``optimizer`` is of another class."""
        for role, value, (name, kind) in zip(
            ("model", "optimizer"), (model, optimizer), self.framework.kinds, strict=True
        ):
            if not isinstance(value, kind) and (role == "model" or value is not None):
                raise UsageError(f"the {role} is a {type(value).__name__}, not a {name}")

    @together
    @override
    def broadcast_state(self, model: Any, optimizer: Any = None) -> str:
        self.check_trained(model, optimizer)
        view = self.view(model, optimizer)
        self.send_options(view, optimizer)
        digest = view.broadcast(optimizer)
        ranks = self.communicator.broadcast_arrays(self.rank_buffers)
        row = buffers_of_rank(ranks, self.world.rank, self.world.size)
        if row:
            view.set_local_buffers(row[0])
            self._seen = row[1]
        return digest

    def send_options(self, view: StateView, optimizer: Any) -> None:
        """Set rank 0's options of ``optimizer`` on all ranks."""
        if options := view.options(optimizer):
            sent: Groups = self.communicator.gather_json(options)[0]
            self.communicator.together(lambda: view.set_options(optimizer, sent))
            self._initial_options.setdefault(optimizer, sent)

    @together
    def check_replicas(self, model: Any, optimizer: Any = None, *, step: int | None = None) -> str:
        """Compare trained parameters and optimizer state of all ranks, bit for bit.

        Neither running statistics, which are local to each rank in training, nor sharded state,
        of which each rank holds another part, are compared. Returns the common digest.

        Raises:
            HvdtrainError: on every rank, naming the ranks that differ, their hosts and the first
                tensor; after ``step`` updates.
        """
        return self._compare(
            model,
            optimizer,
            "the ranks have made different updates, or the memory of a host is faulty. "
            f"{process_status.resume_hint()}; exclude a host that is named twice",
            when="" if step is None else f"after step {step} ",
        )

    @together
    def check_updates(self, model: Any, optimizer: Any, text: str) -> None:
        """As ``check_replicas``, but the message ends with ``text``."""
        self._compare(model, optimizer, text)

    def _compare(self, model: Any, optimizer: Any, text: str, *, when: str = "") -> str:
        digests = self.view(model, optimizer).digests(optimizer)
        return compare(self.communicator, digests, text, when=when)

    @together
    @override
    def save_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        state: JsonValues,
        keep: int = 3,
        wait: bool = True,
    ) -> Any:
        self.check_trained(model, optimizer)
        directory = Path(directory)
        _check_saved(directory, state, keep)
        if self._save and self._save.status is not Status.OVER:  # one at a time
            self._save.result()
        view = self.view(model, optimizer)
        copies = None if wait else self._room_for_copies(view, optimizer)
        self.communicator.wait_for_all()  # nothing is written if some ranks do not make this call
        state = {**state, "world_size": self.world.size}
        if options := view.options(optimizer):
            state[OPTIONS] = [self._initial_options.get(optimizer, options), options]
        with self.averaged_buffers(model, all_rows=True) as ranks:
            write = view.contribute(optimizer, state, ranks, copies)
            in_background = copies is not None
            save = Save(
                self,
                directory,
                write,
                state,
                keep,
                sharded=view.sharded,
                in_background=in_background,
            )
        self._save = save
        if in_background and not self._warns:
            self._warns = True
            atexit.register(self._warn_unfinished)
        return save.result() if wait else save

    def _restore_options(
        self, view: StateView, optimizer: Any, before: Groups, now: Groups
    ) -> None:
        """Restore options with which this run began as the saved one, which has changed them.

        Schedulers change e.g. the momentum; what the user has set anew is kept.
        """
        first = self._initial_options.setdefault(optimizer, view.options(optimizer))
        if len(before) == len(now) == len(first):
            same = [
                {k: new[k] for k in here.keys() & new.keys() - RATES if here[k] == old.get(k)}
                for here, old, new in zip(first, before, now, strict=True)
            ]
            view.set_options(optimizer, same)

    def reserve_copies(self, model: Any, optimizer: Any) -> None:
        """Allocate the memory for saving in the background; all ranks must call it.

        Otherwise the first save does, which then takes twice as long. Call it after an update, with
        which an optimizer has all of its state. It has no effect while a checkpoint is being saved,
        or if the memory is allocated already.
        """
        in_use = self._save is not None and self._save.status is Status.PENDING
        if in_use or self._copies or self._is_short:
            return
        view = self.view(model, optimizer)
        if copies := self._room_for_copies(view, optimizer):
            view.fill(optimizer, copies)

    def _room_for_copies(self, view: StateView, optimizer: Any) -> HostCopies | None:
        """Return the copies of this rank; None, on all ranks, if the memory of a host is short."""
        if self._copies is None and not self._is_short:
            copies = view.host_copies()
            mine = [self.world.host, view.nbytes(optimizer, copies), available_memory()]
            with self.waits.during("reserve_copies"):
                rows = self.communicator.gather_json(mine)
            sums: Counter[str] = Counter()
            for host, size, _ in rows:
                sums[host] += size
            short = [(host, sums[host], free) for host, _, free in rows if sums[host] > free]
            if not short:
                self._copies = copies
            else:
                host, needed, available = short[0]
                warning = (
                    f"saving in the background needs {needed / GIB:.1f} GiB of memory on {host}, "
                    f"which has {available / GIB:.1f} GiB: the training waits for each checkpoint"
                )
                self.communicator.on_root(lambda: log.warning(warning))
                self._is_short = True
        return self._copies

    def _warn_unfinished(self) -> None:
        has_failed = hasattr(sys, "last_value")
        pending = self._save and self._save.status is not Status.OVER
        if self._save and pending and not has_failed and self.communicator.is_root:
            log.warning(
                "the checkpoint of step %s was not completed: call its result() before the program "
                "ends",
                self._save.step,
            )

    @property
    def is_saving(self) -> bool:
        """Whether this rank is still writing a checkpoint in the background."""
        return self._save is not None and self._save.is_busy

    @property
    @abstractmethod
    def flags_agreed(self) -> Flags:
        """For each flag, whether any rank had set it at the last step; equal on all ranks."""

    @together
    def load_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        origin: JsonValues | None = None,
    ) -> JsonValues | None:
        """Load as ``resume`` does; only rank 0 has the state until ``broadcast_state``."""
        self.rank_buffers = {}  # of another model, if it was not trained after loading
        view = self.view(model, optimizer)

        def find() -> Checkpoint | None:
            newest = checkpoints.load_newest(Path(directory), view.check_finite)
            if newest and origin is not None:
                checkpoints.check_origin(newest, origin)
            return newest

        loaded = view.load(find, optimizer)
        process_status.checkpoint = loaded["path"] if loaded else ""
        if loaded and (saved := loaded.pop(OPTIONS, None)) and view.options(optimizer):
            self._restore_options(view, optimizer, *saved)
        return loaded

    @together
    def load_weights(
        self, path: Path | str, model: Any, optimizer: Any = None, *, origin: JsonValues
    ) -> JsonValues:
        """Load the weights of one checkpoint; only rank 0 has them until ``broadcast_state``.

        With an ``optimizer`` its state is loaded, too.

        Of a directory of several, the newest is loaded; for ``origin`` and the result see
        ``resume``. Running statistics are the saved mean over the ranks that trained.

        Raises:
            UsageError: on every rank: no checkpoint can be read, or it is of another model.
        """
        view = self.view(model, optimizer)

        def find() -> Checkpoint:
            checkpoint = checkpoints.load(Path(path), view.check_finite)
            checkpoints.check_origin(checkpoint, origin, "checkpoint")
            return checkpoint if optimizer is not None else replace(checkpoint, training={})

        loaded = view.load(find, optimizer)
        assert loaded is not None
        return loaded

    @together
    def resume(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        origin: JsonValues | None = None,
    ) -> JsonValues | None:
        """Load the newest intact checkpoint and broadcast it (step 6); all ranks must call it.

        If there is none, the current state of rank 0 is broadcast.

        Args:
            directory: directory of the checkpoints.
            model: model of the same shapes as the saved one.
            optimizer: its optimizer.
            origin: values that the checkpoint's origin must equal, key by key; None: not checked.

        Returns:
            The saved ``state`` and the ``path`` of the checkpoint, on every rank; None if there is
            no checkpoint.

        Raises:
            UsageError: on every rank: no checkpoint can be read, or it is of another training.
        """
        self.check_trained(model, optimizer)
        state = self.load_checkpoint(directory, model, optimizer, origin=origin)
        self.broadcast_state(model, optimizer)
        return state

    @contextmanager
    def averaged_buffers(self, model: Any, *, all_rows: bool = False) -> Iterator[Arrays]:
        """Replace the running statistics of ``model`` by the mean of all ranks within the block.

        Yields those of all ranks, see ``gather_buffers``: if not ``all_rows``, only what differs.
        """
        view = self.view(model)
        local, ranks = view.local_buffers(), {}
        averages = self.world.size > 1 and bool(local)
        if averages or (local and all_rows):
            with self.waits.during("averaged_buffers"):
                sent = local if all_rows else different_buffers(self.communicator, local)
                ranks = gather_buffers(self.communicator, sent, self._seen)
        if averages:
            view.set_local_buffers(mean_buffers(ranks))
        try:
            yield ranks
        finally:
            if averages:
                view.set_local_buffers(local)


def _check_saved(directory: Path, state: JsonValues, keep: int) -> None:
    if keep < 1:
        raise UsageError(f"save_checkpoint: keep={keep} would delete what is saved: use at least 1")
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UsageError(
            "save_checkpoint: state needs 'step', an int that grows from save to save (updates or "
            f'epochs), e.g. state={{"step": 120}}, not {step!r}'
        )
    for name, value in state.items():
        try:
            json.dumps(value)
            if name != "metrics":  # for reading only
                check_keys({name: value})
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"save_checkpoint: state[{name!r}] is not a JSON value ({error}): use numbers, "
                "strings, lists or dicts with text keys, e.g. float(loss) or tensor.tolist()"
            ) from None
    if directory.suffix in FILES:
        raise UsageError(
            f"save_checkpoint: {directory} looks like a file; checkpoints are folders: specify the "
            f"directory that contains them, e.g. {directory.with_suffix('')}"
        )
