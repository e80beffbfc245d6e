"""State of a model as a rank holds it: what must be equal on all ranks, and what is saved by whom.

The state is a sequence of pieces, a tensor each. Rank 0 writes all of them, unless a strategy
shards the state: then each piece has an owner, which gathers it, writes it to its own file, and
frees it before the next one. To resume, each rank reads its part of each tensor, independent of the
strategy and the number of ranks that wrote it.

Parameters and optimizer state are compared bit for bit, if each rank has them; running statistics
differ (``rank_buffers.py``).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from hvdtrain.adapters.digests import (
    OPTIONS,
    Digests,
    Groups,
    compare,
    digest_of,
    digests_of,
    ordered,
)
from hvdtrain.adapters.rank_buffers import separate_buffers
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import UsageError, escaped
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import (
    DAMAGE,
    MODEL_FILE,
    TRAINING_FILE,
    Arrays,
    Checkpoint,
    Piece,
    State,
    Tensors,
    Written,
    file_of,
    unchecked,
)
from hvdtrain.steps.tensor_file import ArraySpec

Write = Callable[[Path], tuple[list[Written], Digests]]
"""Writes this rank's files of a checkpoint into a directory; returns them, and the digests of what
all ranks have. Of copies it sends no messages, otherwise all ranks must call it together."""


class HostCopies:
    """Copies of tensors in host memory, which the next save reuses when this one is over."""

    def __init__(self) -> None:
        self._copies: dict[tuple[str, str], np.ndarray[Any, Any]] = {}

    def copy(self, piece: Piece, value: Any) -> np.ndarray[Any, Any]:
        """Return a copy of ``value``, valid until the next one of this ``piece``.

        It is complete after ``finish``. ``value`` is an array, or a tensor of the framework.
        """
        key = piece.kind, piece.name
        kept = self._copies.get(key)
        if kept is None or ArraySpec.of(kept) != piece.layout:
            kept = self._copies[key] = self.allocate(piece.layout)
        self.fill(kept, value)
        return kept

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

    name: str  # of the strategy
    rank_buffers: Arrays  # of a loaded checkpoint, until this rank trains on

    @property
    def communicator(self) -> Communicator:
        """Communicator of all ranks."""


class StateView(ABC):
    """State of one model and its optimizer on this rank, which holds all of it.

    A framework names its tensors and restores them. A strategy that shards the state makes another
    view of the model in step 5: of rows or of a share. All ranks must call the methods together.
    """

    sharded = False  # whether each rank writes and reads a part

    def __init__(self, adapter: Connected, model: Any) -> None:
        self.adapter, self.model = adapter, model

    @abstractmethod
    def tensors(self, optimizer: Any = None) -> Mapping[str, Tensors]:
        """Return the tensors (no copies) by name, for each kind of file of a checkpoint."""

    @abstractmethod
    def restore(self, optimizer: Any, state: Checkpoint) -> None:
        """Load what this rank holds of ``state``; see ``StateAdapter.import_state``."""

    @abstractmethod
    def local_buffers(self) -> Arrays:
        """Return copies of the float buffers that differ by rank (running statistics)."""

    @abstractmethod
    def set_local_buffers(self, arrays: Arrays) -> None:
        """Restore the arrays returned by ``local_buffers``."""

    @abstractmethod
    def trained_names(self) -> set[str]:
        """Return the names in ``export`` of the parameters that are trained."""

    def layout(self, tensor: Any) -> ArraySpec:
        """Return type and shape of the whole tensor."""
        return ArraySpec.of(tensor)

    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        """Return the whole tensor as an array, which may share its memory."""
        return np.asarray(tensor)

    def host_copies(self) -> HostCopies:
        """Return what ``contribute`` copies the state with."""
        return HostCopies()

    def options(self, optimizer: Any) -> Groups:
        """Return the options of ``optimizer`` that change its updates, as JSON values."""
        return []

    def set_options(self, optimizer: Any, groups: Groups) -> None:  # noqa: B027 (none by default)
        """Set those of the ``options`` that ``groups`` has."""

    def export(self, optimizer: Any) -> Checkpoint:
        """Return the whole state; see ``StateAdapter.export_state``."""
        model, training = (
            {name: self.array(value) for name, value in tensors.items()}
            for tensors in self.tensors(optimizer).values()
        )
        return Checkpoint(model, training, {OPTIONS: self.options(optimizer)})

    def pieces(self, optimizer: Any) -> Iterator[Piece]:
        """Yield the tensors that this rank has, writes, or helps to gather."""
        trained = self.trained_names()
        for kind, tensors in self.tensors(optimizer).items():
            for name, value in tensors.items():
                same = kind == TRAINING_FILE or name in trained
                fetch = partial(self.fetch, value)
                yield Piece(
                    kind, name, self.layout(value), fetch, infinite=not same, replicated=same
                )

    def fetch(self, tensor: Any) -> Any:
        """Return what ``HostCopies`` copies: a tensor of the framework, or an array."""
        return self.array(tensor)

    def digests(self, optimizer: Any) -> Digests:
        """Return the digests of what all ranks have; a GPU's tensors are copied one at a time."""
        return ordered(self.options(optimizer), self._digested(self.pieces(optimizer)))

    def _digested(self, pieces: Iterable[Piece]) -> Digests:
        return {
            piece.label: digest_of(piece.name, self.array(piece.fetch()))
            for piece in pieces
            if piece.replicated
        }

    def broadcast(self, optimizer: Any) -> str:
        """Send rank 0's state to all ranks and compare it; return the common digest."""
        communicator = self.adapter.communicator
        if communicator.size > 1:
            # Only rank 0's is read.
            mine = communicator.on_root(lambda: self.export(optimizer)) or Checkpoint({}, {})
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

    # Saving

    @property
    def _rank(self) -> int:
        return self.adapter.communicator.rank

    def nbytes(self, optimizer: Any, copies: HostCopies) -> int:
        """Return the size in bytes of the ``copies`` of ``contribute`` on this rank."""
        mine = (piece for piece in self.pieces(optimizer) if piece.owner == self._rank)
        return sum(copies.nbytes(piece.layout) for piece in mine)

    def fill(self, optimizer: Any, copies: HostCopies) -> list[Piece]:
        """Copy what this rank writes; return all pieces in the order of the files."""
        pieces = []
        for piece in sorted(self.pieces(optimizer), key=lambda piece: piece.order):
            if piece.owner == self._rank or self.sharded:  # other ranks gather it with this one
                value = piece.fetch()
                if piece.owner == self._rank:
                    piece = replace(piece, fetch=partial(np.asarray, copies.copy(piece, value)))
            pieces.append(piece)
        copies.finish()
        return pieces

    def contribute(
        self, optimizer: Any, state: State, ranks: Arrays, copies: HostCopies | None
    ) -> Write:
        """Return the function that writes what this rank contributes to a checkpoint.

        Args:
            optimizer: optimizer whose state is saved.
            state: JSON values to save.
            ranks: the local buffers of all ranks; the model has their mean.
            copies: copies to write, so that the training can continue; None: write without a copy.
        """
        digests, options = Digests(), self.options(optimizer)
        pieces = list(self.pieces(optimizer)) if copies is None else self.fill(optimizer, copies)
        if copies is None and not self.sharded and self._rank == 0:
            # Now: a copy of this process may have to write them, in which no framework works.
            pieces = [replace(p, fetch=partial(np.asarray, self.array(p.fetch()))) for p in pieces]
        if copies:  # what others write may change, and is not needed later
            digests |= self._digested(piece for piece in pieces if piece.owner != self._rank)
            pieces = [piece for piece in pieces if piece.owner == self._rank]
        for name, value in ranks.items():
            fetch = partial(np.asarray, value)
            pieces.append(Piece(TRAINING_FILE, name, ArraySpec.of(value), fetch, infinite=True))
        pieces.sort(key=lambda piece: piece.order)

        def write(folder: Path) -> tuple[list[Written], Digests]:
            files, written = self._write(folder, state["step"], pieces)
            return files, ordered(options, digests | written)

        return write

    def _write(self, folder: Path, step: int, pieces: list[Piece]) -> tuple[list[Written], Digests]:
        """Write this rank's files, in the common order in which all ranks gather the pieces."""
        mine = [piece for piece in pieces if piece.owner == self._rank]
        size, digests = self.adapter.communicator.size, {}
        if self.sharded:
            files = {piece.kind: file_of(piece.kind, self._rank, size) for piece in mine}
        else:
            files = {kind: kind for kind in (MODEL_FILE, TRAINING_FILE) if self._rank == 0}
        writer = checkpoints.Writer(folder, step, files, mine)
        for piece in pieces:
            is_mine = piece.owner == self._rank
            if not (is_mine or self.sharded or piece.replicated):
                continue
            value = piece.fetch()
            if is_mine or piece.replicated:
                array = self.array(value)
            if is_mine:
                writer.write(piece, array)
            if piece.replicated:
                digests[piece.label] = digest_of(piece.name, array)
        return writer.close(), digests

    # Loading

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
        """Load the checkpoint that ``find`` returns on rank 0: only there, unless it is sharded.

        Returns the saved ``state``, with the checkpoint's ``path``, on every rank.
        """
        communicator = self.adapter.communicator

        def load() -> Checkpoint | None:
            checkpoint = find()
            if checkpoint and not self.sharded:
                self._restore(checkpoint, optimizer)
            return checkpoint

        loaded = communicator.on_root(load)
        message = json.dumps(loaded and {**loaded.state, "path": str(loaded.path)}).encode()
        state: State | None = json.loads(communicator.broadcast_bytes(message))
        if state and self.sharded:
            communicator.together(lambda: self._restore(self._opened(state), optimizer))
        return state

    def _opened(self, state: State) -> Checkpoint:
        """Return the checkpoint that rank 0 has found and checked."""
        path = Path(state["path"])
        try:
            return unchecked(path, state)
        except DAMAGE as error:
            raise UsageError(
                f"{path}: cannot be read on this host ({error}): --strategy "
                f"{self.adapter.name} needs a checkpoint directory that all hosts share"
            ) from error

    def _restore(self, checkpoint: Checkpoint, optimizer: Any) -> None:
        with fitting(checkpoint):
            training, ranks = separate_buffers(checkpoint)
            self.restore(optimizer, replace(checkpoint, training=training))
        if optimizer is not None or not self.sharded:
            self.adapter.rank_buffers = ranks


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
