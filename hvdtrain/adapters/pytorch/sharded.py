"""Steps 6 and 7 for strategies that shard the state: each rank saves a part.

A checkpoint has a file of each kind per rank. Each tensor is whole in one of them: the rank of that
file gathers it, writes it, and frees it before the next one. To resume, each rank reads its part
of each tensor, independent of the strategy and the number of ranks that wrote it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.adapters.base import JsonValues
from hvdtrain.adapters.pytorch.adapter import TorchView, array_of
from hvdtrain.adapters.rank_buffers import separate_buffers
from hvdtrain.adapters.state_view import Contribution, HostCopies, digests_of, fitting
from hvdtrain.errors import HvdtrainError, TrainingError, UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import (
    DAMAGE,
    TRAINING_FILE,
    Arrays,
    Checkpoint,
    Written,
    file_of,
    unchecked,
)
from hvdtrain.steps.tensor_file import ArraySpec, TensorFile
from hvdtrain.steps.world import World


@dataclass(frozen=True)
class Piece:
    """A tensor of the state, as it is written to a checkpoint.

    Attributes:
        kind: ``MODEL_FILE`` or ``TRAINING_FILE``.
        name: name in that file.
        layout: layout of the whole tensor.
        owner: the rank that writes it.
        fetch: function that returns the whole tensor, or an array of it, on the owner, None on
            other ranks; all ranks must call it together.
        infinite: whether it may contain infinities.
    """

    kind: str
    name: str
    layout: ArraySpec
    owner: int
    fetch: Callable[[], torch.Tensor | NDArray[Any] | None]
    infinite: bool = False

    @property
    def order(self) -> tuple[str, int, str]:
        """Sort key of pieces: large elements first, so that all are aligned in the file."""
        return self.kind, -self.layout.dtype.itemsize, self.name


class ShardedView(TorchView):
    """Sharded state, saved and loaded in pieces."""

    @property
    def world(self) -> World:
        """World of this rank."""
        return self.adapter.world

    @abstractmethod
    def pieces(self, optimizer: Any) -> Iterator[Piece]:
        """Yield the tensors of the state that this rank writes or helps to gather."""

    @override
    def nbytes(self, optimizer: Any, copies: HostCopies) -> int:
        mine = (p.layout for p in self.pieces(optimizer) if p.owner == self.world.rank)
        sizes = [copies.nbytes(layout) for layout in mine]

        def measure(_kind: str, _name: str, value: torch.Tensor) -> NDArray[Any]:
            sizes.append(copies.nbytes(copies.layout_of(value)))
            return np.empty(0)

        self.replicated(optimizer, measure)
        return sum(sizes)

    @override
    def fill(self, optimizer: Any, copies: HostCopies) -> None:
        self.replicated(optimizer, copies.copy)
        list(self._copied(list(self.pieces(optimizer)), copies))
        copies.finish()

    @override
    def contribute(
        self, optimizer: Any, state: JsonValues, ranks: Arrays, copies: HostCopies | None
    ) -> Contribution:
        replicated = self.replicated(optimizer, copies.copy if copies else None)
        pieces = list(self.pieces(optimizer))
        if self.world.is_writer:
            pieces += (
                Piece(
                    TRAINING_FILE,
                    name,
                    ArraySpec.of(value),
                    0,
                    lambda value=value: value,  # type: ignore[misc]
                    infinite=True,
                )
                for name, value in ranks.items()
            )
        if copies:
            pieces = list(self._copied(pieces, copies))
            copies.finish()
        return Contribution(
            lambda folder: self._write(folder, state["step"], pieces),
            partial(digests_of, replicated),
            sharded=True,
        )

    def _copied(self, pieces: Sequence[Piece], copies: HostCopies) -> Iterator[Piece]:
        """Yield this rank's ``pieces`` with copies; all ranks gather them together."""
        for piece in sorted(pieces, key=lambda piece: piece.order):
            value = piece.fetch()
            if value is not None and piece.owner == self.world.rank:
                copy = copies.copy(piece.kind, piece.name, value)
                yield replace(piece, fetch=partial(np.asarray, copy))

    def _write(self, folder: Path, step: int, pieces: Sequence[Piece]) -> list[Written]:
        """Write this rank's files, in the common order in which all ranks gather the pieces."""
        pieces = sorted(pieces, key=lambda piece: piece.order)
        mine = [piece for piece in pieces if piece.owner == self.world.rank]
        files = {
            kind: file_of(kind, self.world.rank, self.world.size)
            for kind in dict.fromkeys(piece.kind for piece in mine)
        }
        writer = Writer(folder, step, files, mine)
        for piece in pieces:
            value = piece.fetch()
            if value is not None:
                array = array_of(value) if isinstance(value, torch.Tensor) else value
                writer.write(piece, array)
        return writer.close()

    @override
    def load(self, find: Callable[[], Checkpoint | None], optimizer: Any) -> JsonValues | None:
        state = self.share_state(find)
        if state:
            self.adapter.communicator.together(lambda: self._read(state, optimizer))
        return state

    def _read(self, state: JsonValues, optimizer: Any) -> None:
        """Read this rank's part of the checkpoint that rank 0 has found and checked."""
        path = Path(state["path"])
        try:
            checkpoint = unchecked(path, state)
        except DAMAGE as error:
            raise UsageError(
                f"{path}: cannot be read on this host ({error}): --strategy "
                f"{self.adapter.name} needs a checkpoint directory that all hosts share"
            ) from error
        with fitting(checkpoint):
            training, ranks = separate_buffers(checkpoint)
            self.restore(optimizer, replace(checkpoint, training=training))
        if optimizer is not None:
            self.adapter.rank_buffers = ranks


class Writer:
    """Writes one rank's files of a checkpoint.

    After an error nothing more is written, but the rank continues to gather tensors with the
    others, which wait for it; ``close`` raises the error.
    """

    def __init__(
        self, folder: Path, step: int, files: dict[str, str], pieces: Sequence[Piece]
    ) -> None:
        self._folder, self._step = folder, step
        self._trouble: HvdtrainError | None = None
        self._files: dict[str, TensorFile] = {}
        self._layouts: dict[str, dict[str, ArraySpec]] = {kind: {} for kind in files}
        for piece in pieces:
            self._layouts[piece.kind][piece.name] = piece.layout
        with self._noted():
            opened = checkpoints.partial_folder(folder)
            for kind, name in files.items():
                self._files[kind] = TensorFile(opened, name, self._layouts[kind])

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._trouble = checkpoints.not_written(self._folder.parent, self._step, error)
        except HvdtrainError as error:
            self._trouble = error

    def write(self, piece: Piece, array: NDArray[Any]) -> None:
        """Append a tensor to the file of its kind."""
        if self._trouble:
            return
        with self._noted():
            if checkpoints.not_finite({piece.name: array}, infinite=piece.infinite):
                raise TrainingError(
                    f"{piece.name} is not finite after step {self._step}: nothing was saved; the "
                    "checkpoints on disk are older"
                )
            self._files[piece.kind].write(piece.name, array)

    def close(self) -> list[Written]:
        """Flush the files to disk, and return their contents' names and sizes."""
        written = []
        for kind, file in self._files.items():
            if self._trouble:
                file.abandon()
                continue
            with self._noted():
                sizes = {name: layout.nbytes for name, layout in self._layouts[kind].items()}
                written.append(Written(file.name, file.close(), sizes))
        if self._trouble:
            raise self._trouble
        return written
