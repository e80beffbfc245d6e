"""Steps 6 and 7 for strategies that shard the state: each rank saves a part.

A checkpoint has a file of each kind per rank. Each tensor is whole in one of them: the rank of that
file gathers it, writes it, and frees it before the next one. To resume, each rank reads its part
of each tensor, independent of the strategy and the number of ranks that wrote it.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.adapters.base import JsonValues
from hvdtrain.adapters.common_adapter import Flags
from hvdtrain.adapters.pytorch.adapter import (
    TorchView,
    array_of,
    layout_of,
    optimizer_tensors,
    parameters_of,
)
from hvdtrain.adapters.pytorch.ddp import DdpAdapter, ModelSums
from hvdtrain.adapters.pytorch.sums import fill
from hvdtrain.adapters.rank_buffers import SEEN, separate_buffers
from hvdtrain.adapters.state_view import (
    DIFFERENT,
    Contribution,
    HostCopies,
    StateView,
    fitting,
)
from hvdtrain.errors import HvdtrainError, TrainingError, UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import (
    DAMAGE,
    MODEL_FILE,
    TRAINING_FILE,
    Arrays,
    Checkpoint,
    Written,
    file_of,
    unchecked,
)
from hvdtrain.steps.tensor_file import ArraySpec, TensorFile
from hvdtrain.steps.world import World
from hvdtrain.system.runtime.waits import SUM


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


class UpdateSums(ModelSums):
    """Sums of a model whose strategy sums the flags before each update."""

    def before_step(self) -> None:
        """Sum the flags of all ranks; before an update, on all of them."""
        sent = torch.empty(len(Flags._fields), device=self.adapter.device)
        fill(sent, self.adapter.flags)
        with self.blocked(SUM):
            dist.all_reduce(sent)
        self.adapter.sent = sent


class ShardedAdapter(DdpAdapter):
    """Each rank holds a part of the state, of which step 5 chooses the view."""

    shards_state = True

    def __init__(self) -> None:
        super().__init__()
        self._views: weakref.WeakKeyDictionary[Any, type[ShardedView]]
        self._views = weakref.WeakKeyDictionary()  # by model

    def register(self, model: Any, optimizer: Any, sums: Any, view: type[ShardedView]) -> None:
        """Use the ``sums`` of a distributed model before its updates, and the view of its state."""
        self.add_sums(sums)
        self._views[model] = view
        optimizer.register_step_pre_hook(lambda *_: self._check_pass())
        optimizer.register_step_pre_hook(lambda *_: sums.before_step())

    def check_optimizer(self, model: Any, optimizer: Any, reason: str) -> None:
        """Raise ``UsageError`` if ``optimizer`` has a state, or parameters of another model."""
        known = {id(value) for value in model.parameters()}
        if optimizer.state or any(id(value) not in known for value in parameters_of(optimizer)):
            raise UsageError(
                f"distribute_optimizer: --strategy {self.name} {reason}: use an optimizer of this "
                "model's parameters without state; resume loads one"
            )

    @override
    def view(self, model: Any, optimizer: Any = None) -> StateView:
        return self._views.get(model, self.whole_view)(self, model)


class ShardedView(TorchView):
    """Sharded state, saved and loaded in pieces."""

    @property
    def world(self) -> World:
        """World of this rank."""
        return self.adapter.world

    @property
    def writers(self) -> int:
        """Number of ranks, beginning at rank 0, that write a checkpoint."""
        return self.world.size

    @abstractmethod
    def pieces(self, optimizer: Any) -> Iterator[Piece]:
        """Yield the tensors of the state that this rank writes or helps to gather."""

    def local_pieces(self, tensors: Mapping[str, torch.Tensor], optimizer: Any) -> Iterator[Piece]:
        """Yield ``tensors`` of the model and the optimizer's, which this rank holds whole."""
        rank, trained = self.world.rank, self.trained_names()
        for name, value in tensors.items():
            infinite = name not in trained
            whole = partial(torch.Tensor.detach, value)
            yield Piece(MODEL_FILE, name, layout_of(value), rank, whole, infinite)
        for name, value in optimizer_tensors(optimizer).items():
            whole = partial(torch.Tensor.detach, value)
            yield Piece(TRAINING_FILE, name, layout_of(value), rank, whole)

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
        self,
        directory: Path,
        optimizer: Any,
        state: JsonValues,
        ranks: Arrays,
        keep: int,
        copies: HostCopies | None,
    ) -> Contribution:
        replicated = self.replicated(optimizer, copies.copy if copies else None)
        pieces = list(self.pieces(optimizer))
        rank = self.world.rank
        if not self.world.data_rank:
            pieces += (
                Piece(
                    TRAINING_FILE,
                    name,
                    ArraySpec.of(value),
                    rank,
                    lambda value=value: value,  # type: ignore[misc]
                    infinite=True,
                )
                for name, value in ranks.items()
                if name != SEEN or not rank
            )
        if copies:
            pieces = list(self._copied(pieces, copies))
            copies.finish()
        return Contribution(
            lambda folder: self._write(folder, state["step"], pieces),
            replicated,
            partial(self.compare, reason=DIFFERENT, when=f"after step {state['step']} "),
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
            kind: file_of(kind, self.world.rank, self.writers)
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


def broadcast(value: torch.Tensor) -> None:
    """Set ``value`` to rank 0's on all ranks; as bytes, since Gloo has no int16, for one."""
    sent = value.detach().contiguous()
    dist.broadcast(sent.view(-1).view(torch.uint8), src=0)
    value.data.copy_(sent)


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
            for kind, name in files.items():
                self._files[kind] = TensorFile(folder / name, self._layouts[kind])

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
                written.append(Written(file.path.name, file.close(), sizes))
        if self._trouble:
            raise self._trouble
        return written
