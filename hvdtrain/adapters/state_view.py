"""State of a model as a rank holds it: what must be equal on all ranks, and what differs by rank.

Parameters and optimizer state are compared bit for bit; running statistics differ
(``rank_buffers.py``).
"""

from __future__ import annotations

import json
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from xxhash import xxh3_128

from hvdtrain.adapters.rank_buffers import separate_buffers
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import HvdtrainError, TrainingError, UsageError, escaped
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import (
    DAMAGE,
    Arrays,
    Checkpoint,
    State,
    Tensors,
    Written,
)
from hvdtrain.steps.integrity import rank_names
from hvdtrain.steps.tensor_file import ArraySpec
from hvdtrain.system.runtime.exit import agreed

DIFFERENT = (
    "nothing was saved. The ranks have made different updates (gradients or options of the "
    "optimizer were changed on some of them, or broadcast_state was not called at the start), or "
    "the memory of a host is faulty"
)


OPTIONS = "optimizer_options"  # in the state of a ``Checkpoint``
Groups = list[dict[str, object]]
"""Options of an optimizer (learning rate, momentum, ...) by name, for each parameter group."""


@dataclass(frozen=True)
class Contribution:
    """What a rank contributes to a checkpoint.

    Attributes:
        write: function that writes this rank's files into a directory; of copies it sends no
            messages, otherwise all ranks must call it together.
        digests: function that returns the digests of the state that this rank shares with others.
        sharded: whether each rank writes files; otherwise only rank 0.
    """

    write: Callable[[Path], list[Written]]
    digests: Callable[[], Mapping[str, bytes]]
    sharded: bool = False


Take = Callable[[str, str, Any], np.ndarray[Any, Any]]
"""kind of file, name and tensor of the framework -> an array with its values."""


class HostCopies:
    """Copies of tensors in host memory, which the next save reuses when this one is over."""

    def __init__(self) -> None:
        self._copies: Arrays = {}

    def copy(self, kind: str, name: str, value: Any) -> np.ndarray[Any, Any]:
        """Return a copy of ``value``, valid until the next one of this ``name`` and ``kind``.

        It is complete after ``finish``. ``value`` is an array, or a tensor of the framework.
        """
        key, layout = f"{kind} {name}", self.layout_of(value)
        kept = self._copies.get(key)
        if kept is None or ArraySpec.of(kept) != layout:
            kept = self._copies[key] = self.allocate(layout)
        self.fill(kept, value)
        return kept

    def layout_of(self, value: Any) -> ArraySpec:
        """Return type and shape of ``value``."""
        return ArraySpec.of(value)

    def nbytes(self, layout: ArraySpec) -> int:
        """Return the size in bytes of the memory that ``allocate`` takes."""
        return layout.nbytes

    def allocate(self, layout: ArraySpec) -> np.ndarray[Any, Any]:
        """Return a new array."""
        return np.empty(layout.shape, layout.dtype)

    def fill(self, copy: np.ndarray[Any, Any], value: Any) -> None:
        """Copy, or begin to copy, ``value``."""
        np.copyto(copy, value)

    def finish(self) -> None:
        """Wait until the copies are complete."""


class Connected(Protocol):
    """What a view needs of its adapter."""

    rank_buffers: Arrays  # of a loaded checkpoint, until this rank trains on

    @property
    def communicator(self) -> Communicator:
        """Communicator of all ranks."""


class StateView(ABC):
    """State of one model and its optimizer on this rank, which holds all of it.

    A framework exports and imports it. A strategy that shards the state makes another view of the
    model in step 5: of rows or of a share. All ranks must call the methods together.
    """

    def __init__(self, adapter: Connected, model: Any) -> None:
        self.adapter, self.model = adapter, model

    @abstractmethod
    def export(self, optimizer: Any, take: Take | None = None) -> Checkpoint:
        """Return the whole state; see ``StateAdapter.export_state``.

        ``take`` makes an array of each tensor; by default one that may share its memory.
        """

    def host_copies(self) -> HostCopies:
        """Return what ``contribute`` copies the state with."""
        return HostCopies()

    @abstractmethod
    def restore(self, optimizer: Any, state: Checkpoint) -> None:
        """Load what this rank holds of ``state``; see ``StateAdapter.import_state``."""

    def options(self, optimizer: Any) -> Groups:
        """Return the options of ``optimizer`` that change its updates, as JSON values."""
        return []

    def set_options(self, optimizer: Any, groups: Groups) -> None:  # noqa: B027 (none by default)
        """Set those of the ``options`` that ``groups`` has."""

    @abstractmethod
    def local_buffers(self) -> Arrays:
        """Return copies of the float buffers that differ by rank (running statistics)."""

    @abstractmethod
    def set_local_buffers(self, arrays: Arrays) -> None:
        """Restore the arrays returned by ``local_buffers``."""

    @abstractmethod
    def trained_names(self) -> set[str]:
        """Return the names in ``export`` of the parameters that are trained."""

    def replicated(self, optimizer: Any, take: Take | None = None) -> Checkpoint:
        """Return the part of the state that is identical on all ranks after each update."""
        return self._trained(self.export(optimizer, take))

    def digests(self, optimizer: Any) -> dict[str, bytes]:
        """Return the digests of ``replicated``; a device's tensors are copied one at a time."""
        tensors = self.replicated(optimizer, lambda _kind, _name, tensor: tensor)
        return digests_of(tensors, self.array)

    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return a tensor of the framework as an array, which may share its memory."""
        return np.asarray(tensor)

    def _trained(self, state: Checkpoint) -> Checkpoint:
        names = self.trained_names()
        return replace(state, model={k: v for k, v in state.model.items() if k in names})

    def broadcast(self, optimizer: Any) -> str:
        """Send rank 0's state to all ranks and compare it; return the common digest."""
        communicator = self.adapter.communicator
        if communicator.size > 1:
            mine = self.export(optimizer)
            # Names and shapes first: the others may lack some, e.g. an optimizer state.
            state = Checkpoint(
                model=communicator.broadcast_arrays(mine.model),
                training=communicator.broadcast_arrays(mine.training),
            )
            communicator.together(lambda: self.restore(optimizer, state))
        return compare(
            communicator,
            digests_of(self.export(optimizer)),
            "right after the broadcast: please report it; continuing would give wrong results",
        )

    def nbytes(self, optimizer: Any, copies: HostCopies) -> int:
        """Return the size in bytes of the ``copies`` of ``contribute`` on this rank."""
        if not self.adapter.communicator.is_root:
            return 0
        sizes: list[int] = []

        def measure(_kind: str, _name: str, value: Any) -> np.ndarray[Any, Any]:
            sizes.append(copies.nbytes(copies.layout_of(value)))
            return np.empty(0)

        self.export(optimizer, measure)
        return sum(sizes)

    def fill(self, optimizer: Any, copies: HostCopies) -> None:
        """Allocate ``copies`` by copying the state, as ``contribute`` does."""
        if self.adapter.communicator.is_root:
            self.export(optimizer, copies.copy)
            copies.finish()

    def contribute(
        self, optimizer: Any, state: State, ranks: Arrays, copies: HostCopies | None
    ) -> Contribution:
        """Return what this rank contributes to a checkpoint: rank 0 all, unless it is sharded.

        Args:
            optimizer: optimizer whose state is saved.
            state: JSON values to save.
            ranks: the local buffers of all ranks; the model has their mean.
            copies: copies to write, so that the training can continue; None: write without a copy.
        """
        if not self.adapter.communicator.is_root:  # it writes nothing, and needs no copies
            digests = self.digests(optimizer)
            return Contribution(lambda folder: [], lambda: digests)
        arrays = self.export(optimizer, copies.copy if copies else None)
        if copies:
            copies.finish()
        checkpoint = Checkpoint(arrays.model, {**arrays.training, **ranks}, state)

        def write(folder: Path) -> list[Written]:
            try:
                self.check_finite(checkpoint)
            except ValueError as error:
                raise TrainingError(
                    f"{error} after step {state['step']}: nothing was saved; the checkpoints on "
                    "disk are older"
                ) from error
            return checkpoints.write_files(folder, checkpoint)

        return Contribution(write, partial(digests_of, self._trained(arrays)))

    def check_finite(self, checkpoint: Checkpoint) -> None:
        """Raise ``ValueError`` naming a tensor that is not finite; masks may contain infinities."""
        names = self.trained_names()
        optimizer, ranks = separate_buffers(checkpoint)
        trained = {name: value for name, value in checkpoint.model.items() if name in names}
        others = {name: value for name, value in checkpoint.model.items() if name not in names}
        bad = (
            checkpoints.not_finite(trained)
            or checkpoints.not_finite(optimizer)
            or checkpoints.not_finite({**others, **ranks}, infinite=True)
        )
        if bad:
            raise ValueError(f"{bad} is not finite")

    def load(self, find: Callable[[], Checkpoint | None], optimizer: Any) -> State | None:
        """Load, only on rank 0, the checkpoint that ``find`` returns there.

        Returns the saved ``state``, with the checkpoint's ``path``, on every rank.
        """

        def load() -> Checkpoint | None:
            checkpoint = find()
            if checkpoint:
                with fitting(checkpoint):
                    training, ranks = separate_buffers(checkpoint)
                    self.restore(optimizer, replace(checkpoint, training=training))
                self.adapter.rank_buffers = ranks
            return checkpoint

        return self.share_state(load)

    def share_state(self, load: Callable[[], Checkpoint | None]) -> State | None:
        """Return on every rank the state and path of the checkpoint that rank 0 loads."""
        communicator = self.adapter.communicator
        loaded = communicator.on_root(load)
        message = json.dumps(loaded and {**loaded.state, "path": str(loaded.path)}).encode()
        return json.loads(communicator.broadcast_bytes(message))


@contextmanager
def fitting(checkpoint: Checkpoint) -> Iterator[None]:
    """Raise ``UsageError`` if a checkpoint with correct checksums has tensors of an odd kind."""
    try:
        yield
    except (*DAMAGE, RuntimeError) as error:  # the latter from PyTorch
        message = str(error).partition("\n")[0]
        raise UsageError(
            f"{checkpoint.path} does not fit this model and optimizer "
            f"({escaped(f'{type(error).__name__}: {message}')}). {checkpoints.RESTART}"
        ) from error


def check_names(tensors: Mapping[str, Any], arrays: Tensors, trouble: str) -> None:
    """Raise ``UsageError``, beginning with ``trouble``, if names or shapes differ."""
    wrong = [
        name
        for name in sorted(tensors.keys() | arrays.keys())
        if name not in tensors
        or name not in arrays
        or tuple(tensors[name].shape) != arrays[name].shape
    ]
    if wrong:
        raise UsageError(
            f"{trouble}: {len(wrong)} tensors differ in name or shape, the first is {wrong[0]}"
        )


def digests_of(
    state: Checkpoint, array: Callable[[Any], np.ndarray[Any, Any]] = np.asarray
) -> dict[str, bytes]:
    """Return the XXH3 digest of each tensor of ``state``, by a name for messages.

    ``array`` makes an array of a tensor.
    """
    digests = {
        f"{name} of group {number} of the optimizer": xxh3_128(repr(value).encode()).digest()
        for number, group in enumerate(state.state.get(OPTIONS, ()))
        for name, value in sorted(group.items())
    }
    digests |= {name: _digest(name, array(state.model[name])) for name in sorted(state.model)}
    for name in sorted(state.training):
        digests[f"{name} of the optimizer"] = _digest(name, array(state.training[name]))
    return digests


def compare(
    communicator: Communicator, digests: Mapping[str, bytes], reason: str, *, when: str = ""
) -> str:
    """Compare the state of all ranks by its ``digests_of``, and return the common digest.

    All ranks must call it together. The error message begins with ``when`` and ends with
    ``reason``: cause and remedy.

    Raises:
        HvdtrainError: on every rank, naming the ranks that differ, their hosts and the first
            tensor.
    """
    whole = xxh3_128(b"".join(digests.values())).digest()
    gathered = communicator.gather(whole)
    right = Counter(gathered).most_common(1)[0][0]  # of most ranks, or of rank 0
    if different := [rank for rank, digest in enumerate(gathered) if digest != right]:
        mine = {name: digest.hex() for name, digest in digests.items()}
        rows = communicator.gather_json([socket.gethostname(), mine])
        hosts, tensors = zip(*rows, strict=True)
        good, bad = tensors[gathered.index(right)], tensors[different[0]]
        first = next(name for name in {**good, **bad} if good.get(name) != bad.get(name))
        others = "the other ranks'" if 0 in different else "rank 0's"
        where = rank_names(different, dict(enumerate(hosts)))
        raise agreed(
            HvdtrainError(
                f"{when}the model of {where} differs from {others}, first in {first}: {reason}"
            )
        )
    return whole.hex()


def _digest(name: str, array: np.ndarray[Any, Any]) -> bytes:
    """Return the XXH3 digest of a tensor's name and bytes, which are not copied."""
    digest = xxh3_128(name.encode())
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return digest.digest()
