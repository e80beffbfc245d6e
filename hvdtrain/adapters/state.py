"""Steps 6 and 7 for every adapter: broadcast, save and load the state of a training."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from typing_extensions import override

from hvdtrain.adapters import buffers
from hvdtrain.adapters.base import Adapter
from hvdtrain.adapters.replicas import compare
from hvdtrain.collectives.base import Communicator
from hvdtrain.errors import TrainingError, UsageError
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps.checkpoint_files import Arrays, Checkpoint, Tensors
from hvdtrain.system.runtime.exit import process_status
from hvdtrain.system.runtime.outlive import surviving_kill
from hvdtrain.system.runtime.waits import Waits, together

DIFFERENT = (
    "nothing was saved. The ranks have made different updates: gradients were changed on some of "
    "them, or broadcast_state was not called at the start"
)
FILES = {".pt", ".pth", ".ckpt", ".bin", ".h5", ".keras", ".safetensors"}  # one model each


class StateAdapter(Adapter):
    """Broadcast and checkpoints over a ``Communicator``; a framework exports and imports state."""

    communicator: Communicator
    kinds: tuple[tuple[str, type], ...]  # name and class of the framework's models and optimizers

    def __init__(self) -> None:
        self._seen = 0  # samples that this rank has trained on, including those before a resume
        self.waits = Waits(0, [])  # until the world is known
        self._rank_buffers: Arrays = {}  # of a loaded checkpoint, until this rank trains on

    # Implemented by a framework

    @abstractmethod
    def export_state(self, model: Any, optimizer: Any) -> Checkpoint:
        """Return the state of model and optimizer as NumPy arrays by name.

        If the framework computes in host memory, they may share it: use them before it continues.
        """

    @abstractmethod
    def import_state(self, model: Any, optimizer: Any, state: Checkpoint) -> None:
        """Load ``state`` into model and optimizer.

        Raises:
            UsageError: names or shapes are not those of this model.
        """

    @abstractmethod
    def local_buffers(self, model: Any) -> Arrays:
        """Return copies of the float buffers that differ by rank (running statistics)."""

    @abstractmethod
    def set_local_buffers(self, model: Any, arrays: Arrays) -> None:
        """Restore the arrays returned by ``local_buffers``."""

    @abstractmethod
    def trained_names(self, model: Any) -> set[str]:
        """Return the names in ``export_state`` of the parameters that are trained."""

    @property
    def data_communicator(self) -> Communicator:
        """Communicator of the ranks that hold the same part of the model, each for other data."""
        return self.communicator

    def compare(self, model: Any, state: Checkpoint, reason: str, *, when: str = "") -> str:
        """Compare the ``state`` that ranks share of ``model``; see ``replicas.compare``."""
        return compare(self.communicator, state, reason, when=when)

    # The steps

    def check_trained(self, model: Any, optimizer: Any) -> None:
        """Raise ``UsageError`` if ``model`` or ``optimizer`` is of another class."""
        for role, value, (name, kind) in zip(
            ("model", "optimizer"), (model, optimizer), self.kinds, strict=True
        ):
            if not isinstance(value, kind) and (role == "model" or value is not None):
                raise UsageError(f"the {role} is a {type(value).__name__}, not a {name}")

    @together
    @override
    def broadcast_state(self, model: Any, optimizer: Any = None) -> str:
        self.check_trained(model, optimizer)
        digest = self.send_state(model, optimizer)
        ranks = self.communicator.broadcast_arrays(self._rank_buffers)
        row = buffers.rank_row(ranks, self.world.data_rank, self.world.data_size)
        if row:
            self.set_local_buffers(model, row[0])
            self._seen = row[1]
        return digest

    def send_state(self, model: Any, optimizer: Any) -> str:
        """Send rank 0's state to all ranks and compare it; strategies that shard it override this.

        Returns:
            The common SHA-256.
        """
        if self.world.size > 1:
            mine = self.export_state(model, optimizer)
            # Names and shapes first: the others may lack some, e.g. an optimizer state.
            state = Checkpoint(
                model=self.communicator.broadcast_arrays(mine.model),
                training=self.communicator.broadcast_arrays(mine.training),
            )
            self.communicator.together(lambda: self.import_state(model, optimizer, state))
        return self.compare(
            model,
            self.export_state(model, optimizer),
            "right after the broadcast: please report it; continuing would give wrong results",
        )

    @together
    def check_replicas(self, model: Any, optimizer: Any = None, *, step: int | None = None) -> str:
        """Compare trained parameters and optimizer state of all ranks, bit for bit.

        Neither running statistics, which are local to each rank in training, nor sharded state,
        of which each rank holds another part, are compared.

        Args:
            model: the trained model.
            optimizer: its optimizer.
            step: number of completed updates, for the message.

        Returns:
            The common SHA-256.

        Raises:
            HvdtrainError: on every rank, naming the ranks that differ, their hosts and the first
                tensor.
        """
        return self.compare(
            model,
            self.replicated(model, optimizer),
            "the ranks have made different updates, or the memory of a host is faulty. "
            f"{process_status.resume_hint()}; exclude a host that is named twice",
            when="" if step is None else f"after step {step} ",
        )

    def replicated(self, model: Any, optimizer: Any) -> Checkpoint:
        """Return the part of the state that is identical on all ranks after each update."""
        return self._trained(model, self.export_state(model, optimizer))

    def _trained(self, model: Any, state: Checkpoint) -> Checkpoint:
        names = self.trained_names(model)
        return Checkpoint({name: state.model[name] for name in names}, state.training)

    @together
    @override
    def save_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        state: dict[str, Any],
        keep: int = 3,
    ) -> Path:
        self.check_trained(model, optimizer)
        _check_saved(Path(directory), state)
        local = self.local_buffers(model)
        ranks = buffers.gather(self.data_communicator, local, self._seen) if local else {}
        kept = {**state, "world_size": self.world.size}
        with self.averaged_buffers(model):
            written = self.write_state(Path(directory), model, optimizer, kept, ranks, keep)
        process_status.checkpoint = os.fsdecode(
            self.communicator.broadcast_bytes(os.fsencode(str(written)))
        )
        return Path(process_status.checkpoint)

    def write_state(
        self,
        directory: Path,
        model: Any,
        optimizer: Any,
        state: dict[str, Any],
        ranks: Arrays,
        keep: int,
    ) -> Path | None:
        """Write a checkpoint: only on rank 0, unless a strategy shards the state.

        Args:
            directory: directory of the checkpoints.
            model: the model, with the mean of the ranks' buffers.
            optimizer: its optimizer, or None.
            state: JSON values.
            ranks: local buffers of all ranks.
            keep: number of recent checkpoints to keep, in addition to the best.

        Returns:
            The checkpoint, on rank 0.
        """
        arrays = self.export_state(model, optimizer)
        self.compare(model, self._trained(model, arrays), DIFFERENT)
        checkpoint = Checkpoint(arrays.model, {**arrays.training, **ranks}, state)

        def save() -> Path:
            return checkpoints.save(directory, checkpoint, keep)

        def write() -> Path:
            self._refuse_nan(model, checkpoint)
            with surviving_kill(save):
                path = save()
                # Recorded at once: if a rank is lost now, the error message names this path.
                process_status.checkpoint = str(path)
            return path

        return self.communicator.on_root(write)

    def _refuse_nan(self, model: Any, checkpoint: Checkpoint) -> None:
        try:
            self._check_finite(model, checkpoint)
        except ValueError as error:
            raise TrainingError(
                f"{error} after step {checkpoint.state['step']}: nothing was saved; the "
                "checkpoints on disk are older"
            ) from error

    def _check_finite(self, model: Any, checkpoint: Checkpoint) -> None:
        """Raise ``ValueError`` naming a tensor that is not finite; masks may contain infinities."""
        names = self.trained_names(model)
        optimizer, ranks = buffers.take_out(checkpoint.training)
        trained = {name: value for name, value in checkpoint.model.items() if name in names}
        others = {name: value for name, value in checkpoint.model.items() if name not in names}
        bad = (
            checkpoints.not_finite(trained)
            or checkpoints.not_finite(optimizer)
            or checkpoints.not_finite({**others, **ranks}, infinite=True)
        )
        if bad:
            raise ValueError(f"{bad} is not finite")

    @together
    def load_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        origin: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Load as ``resume`` does; only rank 0 has the state until ``broadcast_state``."""

        def find() -> Checkpoint | None:
            newest = checkpoints.load_newest(
                Path(directory), lambda checkpoint: self._check_finite(model, checkpoint)
            )
            if newest and origin is not None:
                checkpoints.check_origin(newest, origin)
            return newest

        loaded = self.load_state(find, model, optimizer)
        process_status.checkpoint = loaded["path"] if loaded else ""
        return loaded

    @together
    def load_weights(
        self, path: Path | str, model: Any, *, origin: dict[str, Any]
    ) -> dict[str, Any]:
        """Load the weights of one checkpoint; only rank 0 has them until ``broadcast_state``.

        Running statistics are the saved mean over the ranks that trained.

        Args:
            path: folder of a checkpoint, or directory of several: the newest is loaded.
            model: model of the same shapes as the saved one.
            origin: see ``resume``.

        Returns:
            The saved ``state``, with the checkpoint's ``path``, on every rank.

        Raises:
            UsageError: on every rank: no checkpoint can be read, or it is of another model.
        """

        def find() -> Checkpoint:
            checkpoint = checkpoints.load(Path(path), lambda read: self._check_finite(model, read))
            checkpoints.check_origin(checkpoint, origin, "checkpoint")
            return replace(checkpoint, training={})

        loaded = self.load_state(find, model, None)
        assert loaded is not None
        return loaded

    def load_state(
        self, find: Callable[[], Checkpoint | None], model: Any, optimizer: Any
    ) -> dict[str, Any] | None:
        """Load, only on rank 0, the checkpoint that ``find`` returns there; all ranks call it.

        Returns:
            The saved ``state``, with the checkpoint's ``path``, on every rank.
        """

        def load() -> Checkpoint | None:
            checkpoint = find()
            if checkpoint:
                training, self._rank_buffers = buffers.take_out(checkpoint.training)
                self.import_state(model, optimizer, replace(checkpoint, training=training))
            return checkpoint

        return self.share_state(load)

    def share_state(self, load: Callable[[], Checkpoint | None]) -> dict[str, Any] | None:
        """Return on every rank the state and path of the checkpoint that rank 0 loads."""
        loaded = self.communicator.on_root(load)
        message = json.dumps(loaded and {**loaded.state, "path": str(loaded.path)}).encode()
        state: dict[str, Any] | None = json.loads(self.communicator.broadcast_bytes(message))
        return state

    @together
    def resume(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        origin: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Load the newest intact checkpoint and broadcast it (step 6); all ranks must call it.

        If there is none, the current state of rank 0 is broadcast.

        Args:
            directory: directory of the checkpoints.
            model: model of the same shapes as the saved one.
            optimizer: its optimizer.
            origin: values that the checkpoint's origin must equal, key by key; None: not checked.

        Returns:
            The saved ``state``, on every rank; None if there is no checkpoint.

        Raises:
            UsageError: on every rank: no checkpoint can be read, or it is of another training.
        """
        self.check_trained(model, optimizer)
        state = self.load_checkpoint(directory, model, optimizer, origin=origin)
        self.broadcast_state(model, optimizer)
        return state

    @contextmanager
    def averaged_buffers(self, model: Any) -> Iterator[None]:
        """Replace the running statistics of ``model`` by the mean of all ranks within the block."""
        local = self.local_buffers(model)
        several = self.world.data_size > 1
        if several:
            with self.waits.during("averaged_buffers"):
                mean = buffers.average(self.data_communicator, local, self._seen) if local else {}
            self.set_local_buffers(model, mean)
        try:
            yield
        finally:
            if several:
                self.set_local_buffers(model, local)


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


def _check_saved(directory: Path, state: dict[str, Any]) -> None:
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UsageError(
            "save_checkpoint: state needs the number of completed updates, e.g. "
            f'state={{"step": 120}}, not step {step!r}'
        )
    for name, value in state.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"save_checkpoint: state[{name!r}] is no JSON value ({error}): use numbers, "
                "strings, lists or dicts, e.g. float(loss) or tensor.tolist()"
            ) from None
    if directory.suffix in FILES:
        raise UsageError(
            f"save_checkpoint: {directory} looks like a file; checkpoints are folders: specify the "
            f"directory that contains them, e.g. {directory.with_suffix('')}"
        )
