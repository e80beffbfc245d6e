"""What all adapters share: steps 1, 3, 4, 6, 7 and 8 over a communicator, without a framework."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import socket
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.adapters import buffers
from hvdtrain.adapters.base import Adapter
from hvdtrain.adapters.communicator import Communicator
from hvdtrain.errors import HvdtrainError, UsageError
from hvdtrain.launch.detect import detect
from hvdtrain.launch.ending import agreed
from hvdtrain.launch.tuning import runtime_variables, set_defaults
from hvdtrain.steps import checkpoint as checkpoints
from hvdtrain.steps import metrics
from hvdtrain.steps.checkpoint import Arrays, Checkpoint
from hvdtrain.steps.learning_rate import LearningRate, scale_factor
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.steps.world import World, check_launch, threads_per_rank

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WatchedShards(Shards):
    """Shards that tell their adapter which part is in hand, so that it can weigh the gradients."""

    adapter: CommonAdapter | None = None

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Part]:
        """See ``Shards``."""
        for part in super().epoch(epoch, consumed):
            if self.adapter:
                self.adapter.take(part)
            yield part


class CommonAdapter(Adapter):
    """An adapter over a ``Communicator``; a framework adds devices, optimizer and its state."""

    name: str  # of the strategy, as the user spells it
    runtime: str
    device: Any = "cpu"
    has_gpu = False
    communicator: Communicator

    def __init__(self) -> None:
        self.stop_wanted = False
        self._part: Part | None = None
        self._drawn = self._told = 0  # samples of this rank: drawn from shards, told to ``weigh``
        self._rank_buffers: Arrays = {}  # of a loaded checkpoint, until the broadcast

    # What a framework or a strategy has to add

    @abstractmethod
    def connect(self) -> Communicator:
        """Start the runtime and return its collectives."""

    @abstractmethod
    def export_state(self, model: Any, optimizer: Any) -> Checkpoint:
        """The state of model and optimizer as NumPy arrays by name (copies)."""

    @abstractmethod
    def import_state(self, model: Any, optimizer: Any, state: Checkpoint) -> None:
        """Put ``state`` into model and optimizer.

        Raises:
            UsageError: names or shapes are not those of this model.
        """

    def synchronize_batchnorm(self, task: Any) -> None:
        """Make the BatchNorm layers of the model use the statistics of the global batch."""

    def make_deterministic(self) -> None:
        """Choose algorithms that give the same bits from run to run, even if slower."""

    @abstractmethod
    def local_buffers(self, model: Any) -> Arrays:
        """The floating-point buffers of ``model`` that differ by rank (running statistics)."""

    @abstractmethod
    def set_local_buffers(self, model: Any, arrays: Arrays) -> None:
        """Put back what ``local_buffers`` gave."""

    @property
    @abstractmethod
    def stop_agreed(self) -> bool:
        """Whether any rank had ``stop_wanted`` at the last step; the same answer on all ranks."""

    @abstractmethod
    def weigh(self, loss: Any, part: Part | None = None) -> Any:
        """``loss``, a mean over ``part``, times the part's share of the global batch.

        Tells the part where batches are fetched ahead, and weights what BatchNorm exchanges over
        the ranks too. Call it once a step, before the backward pass.
        """

    # The steps

    def initialize(self, *, short_steps: bool = False) -> World:
        """See ``Adapter``."""
        place = detect(os.environ)
        set_defaults(runtime_variables(place, short_steps=short_steps))
        self.communicator = self.connect()
        check_launch(place, self.communicator.size, self.runtime)
        hosts = [host.decode() for host in self.communicator.gather(socket.gethostname().encode())]
        rank, mine = self.communicator.rank, hosts[self.communicator.rank]
        self.world = World(
            rank=rank,
            size=self.communicator.size,
            local_rank=hosts[:rank].count(mine),
            local_size=hosts.count(mine),
            host=mine,
            hosts=len(set(hosts)),
        )
        return self.world

    def cpu_threads(self) -> int:
        """Threads for this rank: its share of its host's cores, or what OMP_NUM_THREADS says."""
        cores = json.dumps(sorted(os.sched_getaffinity(0))).encode()
        everyone = zip(
            self.communicator.gather(self.world.host.encode()),
            self.communicator.gather(cores),
            strict=True,
        )
        host = self.world.host.encode()
        local = [frozenset(json.loads(cores)) for name, cores in everyone if name == host]
        asked = os.environ.get("OMP_NUM_THREADS", "")
        return (
            int(asked)
            if asked.isdecimal() and int(asked)
            else threads_per_rank(local, self.world.local_rank)
        )

    def check_devices(self, devices: int) -> None:
        """Raise on every rank where some host has fewer than one of ``devices`` a local rank."""

        def check() -> None:
            if devices < self.world.local_size:
                raise UsageError(
                    f"host {self.world.host} has {devices} GPU(s) for {self.world.local_size} "
                    f"ranks: start at most {devices} a host (mpirun --map-by ppr:{devices}:node), "
                    "or set CUDA_VISIBLE_DEVICES= to train on the CPU"
                )

        self.communicator.together(check)

    def shard_data(self, samples: int, *, global_batch: int, seed: int = 0) -> Shards:
        """See ``Adapter``."""
        world = self.world
        return WatchedShards(samples, global_batch, seed, world.rank, world.size, adapter=self)

    def take(self, part: Part, *, told: bool = False) -> None:
        """Note that ``part`` is what the next gradients are computed on.

        Args:
            part: this rank's part of the step.
            told: the training step itself says so; else it was drawn from the shards, perhaps
                ahead of the training.
        """
        self._part = part
        if told:
            self._told += part.count
        else:
            self._drawn += part.count

    @property
    def _seen(self) -> int:
        """Samples that this rank has trained on, with those before a resume."""
        return self._told or self._drawn

    @property
    def part_weight(self) -> float:
        """The share of the part in hand in its global batch; without shards, one rank of size."""
        return self._part.weight if self._part else 1.0 / self.world.size

    def scale_learning_rate(
        self, base: float, *, scaling: str = "linear", **schedule: Any
    ) -> LearningRate:
        """See ``Adapter``."""
        return LearningRate(base, scale_factor(scaling, self.world.size), **schedule)

    def broadcast_state(self, model: Any, optimizer: Any = None) -> str:
        """See ``Adapter``."""
        if self.world.size > 1:
            mine = self.export_state(model, optimizer)
            # Names and shapes first: what rank 0 has, an optimizer state for one, others may lack.
            state = Checkpoint(
                model=self._broadcast_arrays(mine.model),
                training=self._broadcast_arrays(mine.training),
            )
            self.communicator.together(lambda: self.import_state(model, optimizer, state))
        digest = self.check_replicas(model, optimizer)
        ranks = self._broadcast_arrays(self._rank_buffers)
        own = buffers.own_row(ranks, self.world.rank, self.world.size)
        if own:
            self.set_local_buffers(model, own[0])
            self._drawn = self._told = own[1]
        return digest

    def _broadcast_arrays(self, arrays: Arrays) -> Arrays:
        header = json.dumps([[k, v.dtype.str, v.shape] for k, v in arrays.items()]).encode()
        received: Arrays = {}
        for name, dtype, shape in json.loads(self.communicator.broadcast_bytes(header)):
            own = arrays[name].tobytes() if self.communicator.rank == 0 else b""
            data = self.communicator.broadcast_bytes(own)
            received[name] = np.frombuffer(data, dtype).reshape(shape)
        return received

    def check_replicas(self, model: Any, optimizer: Any = None) -> str:
        """Compare the digests of all ranks' model and optimizer state.

        Returns:
            The common SHA-256.

        Raises:
            HvdtrainError: on every rank, naming those that differ from rank 0.
        """
        state = self.export_state(model, optimizer)
        digest = hashlib.sha256()
        for arrays in (state.model, state.training):
            for name in sorted(arrays):
                digest.update(name.encode() + arrays[name].tobytes())
        digests = self.communicator.gather(digest.digest())
        different = [rank for rank, other in enumerate(digests) if other != digests[0]]
        if different:
            raise agreed(
                HvdtrainError(
                    f"the model of rank(s) {', '.join(map(str, different))} differs from rank 0's "
                    "after the broadcast: report this, training on would be wrong"
                )
            )
        return digest.hexdigest()

    def save_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        state: dict[str, Any],
        keep: int = 3,
    ) -> Path:
        """See ``Adapter``."""
        own = self.local_buffers(model)
        ranks = buffers.gather(self.communicator, own, self._seen) if own else {}
        with self.averaged_buffers(model):
            arrays = self.export_state(model, optimizer)
        state = {**state, "world_size": self.world.size}
        checkpoint = Checkpoint(arrays.model, {**arrays.training, **ranks}, state)
        written = self.communicator.on_root(
            lambda: checkpoints.save(Path(directory), checkpoint, keep)
        )
        return Path(self.communicator.broadcast_bytes(str(written).encode()).decode())

    def load_checkpoint(
        self, directory: Path | str, model: Any, optimizer: Any, *, origin: dict[str, Any]
    ) -> dict[str, Any] | None:
        """Resume: rank 0 reads the newest intact checkpoint; call ``broadcast_state`` after it.

        Args:
            directory: where checkpoints live.
            origin: what made the checkpoint has to equal this, key by key.

        Returns:
            The ``state`` that was saved, on every rank; None where there is no checkpoint.

        Raises:
            UsageError: on every rank: none can be read, or it is another training's.
        """

        def load() -> dict[str, Any] | None:
            found = checkpoints.load_newest(Path(directory))
            if found is None:
                return None
            checkpoints.check_origin(found, origin)
            training, self._rank_buffers = buffers.take_out(found.training)
            self.import_state(model, optimizer, Checkpoint(found.model, training, path=found.path))
            return {**found.state, "path": str(found.path)}

        state = json.dumps(self.communicator.on_root(load)).encode()
        loaded: dict[str, Any] | None = json.loads(self.communicator.broadcast_bytes(state))
        return loaded

    @contextmanager
    def averaged_buffers(self, model: Any) -> Iterator[None]:
        """Within it, the running statistics of ``model`` are the mean over all ranks."""
        own = self.local_buffers(model)
        if own and self.world.size > 1:
            self.set_local_buffers(model, buffers.average(self.communicator, own, self._seen))
        try:
            yield
        finally:
            if own and self.world.size > 1:
                self.set_local_buffers(model, own)

    def average_metrics(self, count: float, **sums: float) -> tuple[dict[str, float], int]:
        """See ``Adapter``."""
        total = self.communicator.sum(metrics.pack(sums, count))
        return metrics.unpack(total, list(sums))
