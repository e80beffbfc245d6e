"""Steps 6 and 7 for every adapter: the state of a training, sent to all ranks, saved and found."""

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
from hvdtrain.system.runtime.exit import outlived, process_status
from hvdtrain.system.runtime.waits import Waits, together

DIFFERENT = (
    "nothing was saved. The ranks have made different updates, from gradients that were changed on "
    "some of them, or without broadcast_state at the start"
)
FILES = {".pt", ".pth", ".ckpt", ".bin", ".h5", ".keras", ".safetensors"}  # one model each


class StateAdapter(Adapter):
    """Broadcast and checkpoint over a ``Communicator``; a framework tells what its state is."""

    communicator: Communicator
    kinds: tuple[tuple[str, type], ...]  # name and class of the framework's models and optimizers

    def __init__(self) -> None:
        self._seen = 0  # samples that this rank has trained on, with those before a resume
        self.waits = Waits(0, [])  # until the world is known
        self._rank_buffers: Arrays = {}  # of a loaded checkpoint, until this rank trains on

    # What a framework has to add

    @abstractmethod
    def export_state(self, model: Any, optimizer: Any) -> Checkpoint:
        """Return the state of model and optimizer as NumPy arrays by name.

        Where the framework computes in host memory they may share it: use them before it goes on.
        """

    @abstractmethod
    def import_state(self, model: Any, optimizer: Any, state: Checkpoint) -> None:
        """Put ``state`` into model and optimizer.

        Raises:
            UsageError: names or shapes are not those of this model.
        """

    @abstractmethod
    def local_buffers(self, model: Any) -> Arrays:
        """Return copies of the float buffers that differ by rank (running statistics)."""

    @abstractmethod
    def set_local_buffers(self, model: Any, arrays: Arrays) -> None:
        """Put back what ``local_buffers`` gave."""

    @abstractmethod
    def trained_names(self, model: Any) -> set[str]:
        """Return the names in ``export_state`` of the parameters that are trained."""

    @property
    def data_communicator(self) -> Communicator:
        """The ranks that have the same part of the model as this one, each other data."""
        return self.communicator

    def compare(self, model: Any, state: Checkpoint, why: str, *, when: str = "") -> str:
        """Compare what ranks should have alike of ``model``; see ``replicas.compare``."""
        return compare(self.communicator, state, why, when=when)

    # The steps

    def check_trained(self, model: Any, optimizer: Any) -> None:
        """Raise ``UsageError`` where ``model`` or ``optimizer`` is something else."""
        for what, given, (name, kind) in zip(
            ("model", "optimizer"), (model, optimizer), self.kinds, strict=True
        ):
            if not isinstance(given, kind) and (what == "model" or given is not None):
                raise UsageError(f"the {what} is a {type(given).__name__}, not a {name}")

    @together
    @override
    def broadcast_state(self, model: Any, optimizer: Any = None) -> str:
        self.check_trained(model, optimizer)
        digest = self.send_state(model, optimizer)
        ranks = self.communicator.broadcast_arrays(self._rank_buffers)
        own = buffers.own_row(ranks, self.world.data_rank, self.world.data_size)
        if own:
            self.set_local_buffers(model, own[0])
            self._seen = own[1]
        return digest

    def send_state(self, model: Any, optimizer: Any) -> str:
        """Send rank 0's state to all ranks, and compare it; a strategy that shards it has its own.

        Returns:
            The common SHA-256.
        """
        if self.world.size > 1:
            mine = self.export_state(model, optimizer)
            # Names and shapes first: what rank 0 has, an optimizer state for one, others may lack.
            state = Checkpoint(
                model=self.communicator.broadcast_arrays(mine.model),
                training=self.communicator.broadcast_arrays(mine.training),
            )
            self.communicator.together(lambda: self.import_state(model, optimizer, state))
        return self.compare(
            model,
            self.export_state(model, optimizer),
            "this is so right after the broadcast: report it, training on would be wrong",
        )

    @together
    def check_replicas(self, model: Any, optimizer: Any = None, *, step: int | None = None) -> str:
        """Compare trained parameters and optimizer state of all ranks, bit for bit.

        Running statistics are not compared: while it trains, each rank has its own. Nor is what a
        strategy shards, of which each rank has another part.

        Args:
            model: that is trained.
            optimizer: likewise.
            step: how many updates are done, for the message.

        Returns:
            The common SHA-256.

        Raises:
            HvdtrainError: on every rank, naming the ranks that differ, their hosts and the first
                tensor.
        """
        return self.compare(
            model,
            self.replicated(model, optimizer),
            "the ranks have made different updates, or the memory of a host has changed by itself. "
            f"{process_status.how_to_go_on()}; leave out a host that is named twice",
            when="" if step is None else f"after step {step} ",
        )

    def replicated(self, model: Any, optimizer: Any) -> Checkpoint:
        """Return what of the state is the same on all ranks after each update."""
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
        own = self.local_buffers(model)
        ranks = buffers.gather(self.data_communicator, own, self._seen) if own else {}
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
        """Write a checkpoint: by rank 0 alone, unless a strategy shards the state.

        Args:
            directory: where checkpoints live.
            model: with the mean of the ranks' buffers.
            optimizer: or None.
            state: JSON values.
            ranks: all ranks' own buffers.
            keep: how many stay.

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
            with outlived(save):
                path = save()
                # Known at once: if a rank is lost now, nobody learns more than this.
                process_status.checkpoint = str(path)
            return path

        return self.communicator.on_root(write)

    def _refuse_nan(self, model: Any, checkpoint: Checkpoint) -> None:
        try:
            self._check_finite(model, checkpoint)
        except ValueError as error:
            raise TrainingError(
                f"{error} after step {checkpoint.state['step']}: nothing was saved; the "
                "checkpoints on disk are of before"
            ) from error

    def _check_finite(self, model: Any, checkpoint: Checkpoint) -> None:
        """Raise ``ValueError`` naming a tensor that is not finite; a mask may hold infinities."""
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
        """Load as ``resume`` does; rank 0 alone has the state until ``broadcast_state``."""

        def find() -> Checkpoint | None:
            found = checkpoints.load_newest(
                Path(directory), lambda found: self._check_finite(model, found)
            )
            if found and origin is not None:
                checkpoints.check_origin(found, origin)
            return found

        loaded = self.load_state(find, model, optimizer)
        process_status.checkpoint = loaded["path"] if loaded else ""
        return loaded

    @together
    def load_weights(
        self, path: Path | str, model: Any, *, origin: dict[str, Any]
    ) -> dict[str, Any]:
        """Load the weights of one checkpoint; rank 0 alone has them until ``broadcast_state``.

        Running statistics are the mean over the ranks that trained, which the checkpoint holds.

        Args:
            path: the checkpoint's folder, or a directory of several, of which it is the newest.
            model: of the same shapes as the one that was saved.
            origin: see ``resume``.

        Returns:
            The ``state`` that was saved, with the checkpoint's ``path``, on every rank.

        Raises:
            UsageError: on every rank: none can be read, or it is another model's.
        """

        def find() -> Checkpoint:
            found = checkpoints.load(Path(path), lambda found: self._check_finite(model, found))
            checkpoints.check_origin(found, origin, "checkpoint")
            return replace(found, training={})

        loaded = self.load_state(find, model, None)
        assert loaded is not None
        return loaded

    def load_state(
        self, find: Callable[[], Checkpoint | None], model: Any, optimizer: Any
    ) -> dict[str, Any] | None:
        """Load, on rank 0 alone, the checkpoint that ``find`` returns to it; all ranks call it.

        Returns:
            The ``state`` that was saved, with the checkpoint's ``path``, on every rank.
        """

        def load() -> Checkpoint | None:
            found = find()
            if found:
                training, self._rank_buffers = buffers.take_out(found.training)
                self.import_state(model, optimizer, replace(found, training=training))
            return found

        return self.tell_state(load)

    def tell_state(self, load: Callable[[], Checkpoint | None]) -> dict[str, Any] | None:
        """Return on every rank the state and the path of what ``load`` returns on rank 0."""
        found = self.communicator.on_root(load)
        state = json.dumps(found and {**found.state, "path": str(found.path)}).encode()
        told: dict[str, Any] | None = json.loads(self.communicator.broadcast_bytes(state))
        return told

    @together
    def resume(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        origin: dict[str, Any] | None = None,
    ) -> dict[str, Any] | None:
        """Load the newest intact checkpoint and broadcast it (step 6); all ranks call it.

        Where there is none, what rank 0 has is broadcast.

        Args:
            directory: where checkpoints live.
            model: of the same shapes as the one that was saved.
            optimizer: likewise.
            origin: what made the checkpoint has to equal this, key by key; None: not looked at.

        Returns:
            The ``state`` that was saved, on every rank; None where there is no checkpoint.

        Raises:
            UsageError: on every rank: none can be read, or it is another training's.
        """
        self.check_trained(model, optimizer)
        state = self.load_checkpoint(directory, model, optimizer, origin=origin)
        self.broadcast_state(model, optimizer)
        return state

    @contextmanager
    def averaged_buffers(self, model: Any) -> Iterator[None]:
        """Make the running statistics of ``model`` the mean over all ranks within the block."""
        own = self.local_buffers(model)
        several = self.world.data_size > 1
        if several:
            with self.waits.during("averaged_buffers"):
                mean = buffers.average(self.data_communicator, own, self._seen) if own else {}
            self.set_local_buffers(model, mean)
        try:
            yield
        finally:
            if several:
                self.set_local_buffers(model, own)


def check_names(own: Mapping[str, Any], arrays: Tensors, trouble: str) -> None:
    """Raise ``UsageError``, which begins with ``trouble``, where names or shapes differ."""
    wrong = [
        name
        for name in sorted(own.keys() | arrays.keys())
        if name not in own or name not in arrays or tuple(own[name].shape) != arrays[name].shape
    ]
    if wrong:
        raise UsageError(
            f"{trouble}: {len(wrong)} tensors differ in name or shape, the first is {wrong[0]}"
        )


def _check_saved(directory: Path, state: dict[str, Any]) -> None:
    step = state.get("step")
    if not isinstance(step, int) or isinstance(step, bool) or step < 0:
        raise UsageError(
            "save_checkpoint: state needs the number of updates done, such as "
            f'state={{"step": 120}}, not step {step!r}'
        )
    for name, value in state.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"save_checkpoint: state[{name!r}] is no JSON value ({error}): give numbers, text, "
                "lists or dicts, such as float(loss) or tensor.tolist()"
            ) from None
    if directory.suffix in FILES:
        raise UsageError(
            f"save_checkpoint: {directory} looks like a file; checkpoints are folders, so give the "
            f"directory to keep them in, such as {directory.with_suffix('')}"
        )
