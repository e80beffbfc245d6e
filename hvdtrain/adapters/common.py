"""What all adapters share: steps 1, 3, 4 and 8 over a communicator, without a framework."""

from __future__ import annotations

import json
import logging
import os
import weakref
from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

from hvdtrain.adapters import launch_check
from hvdtrain.adapters.communicator import Communicator
from hvdtrain.adapters.state import StateAdapter
from hvdtrain.environment import gpus
from hvdtrain.errors import UsageError
from hvdtrain.launch import lifeline
from hvdtrain.launch.detect import detect
from hvdtrain.launch.ending import agreed
from hvdtrain.launch.tuning import runtime_variables, set_defaults
from hvdtrain.launch.waits import Waits, together
from hvdtrain.steps import metrics
from hvdtrain.steps.integrity import Device, RankFacts
from hvdtrain.steps.learning_rate import LearningRate, scale_factor
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.steps.world import World, threads_per_rank

log = logging.getLogger(__name__)


def total_messages(messages: Iterable[dict[str, int] | None]) -> dict[str, int] | None:
    """Add up the ``gradient_messages`` of several optimizers; None where none is known."""
    known = [one for one in messages if one]
    return {key: sum(one[key] for one in known) for key in ("count", "bytes")} if known else None


class CommonAdapter(StateAdapter):
    """An adapter over a ``Communicator``; a framework adds devices, optimizer and its state."""

    name: str  # of the strategy, as the user spells it
    runtime: str
    device: Any = "cpu"
    has_gpu = False
    ranks: list[RankFacts]  # what all ranks told of themselves in step 1, by rank

    def __init__(self) -> None:
        super().__init__()
        self.stop_wanted = False
        self._lifeline: lifeline.Lifeline | None = None
        self._shards: Shards | None = None  # those that a part was drawn from last
        self._distributed: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers

    def __getattr__(self, name: str) -> Any:
        if name in ("world", "communicator", "ranks"):
            raise UsageError("call initialize() first (step 1): before it there is no world")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    # What a framework or a strategy has to add

    @abstractmethod
    def connect(self) -> Communicator:
        """Start the runtime and return its collectives."""

    def synchronize_batchnorm(self, task: Any) -> None:
        """Make the BatchNorm layers of the model use the statistics of the global batch."""

    def make_deterministic(self) -> None:
        """Choose algorithms that give the same bits from run to run, even if slower."""

    @property
    @abstractmethod
    def stop_agreed(self) -> bool:
        """Whether any rank had ``stop_wanted`` at the last step; the same answer on all ranks."""

    @abstractmethod
    def check_trained(self, model: Any, optimizer: Any) -> None:
        """Raise ``UsageError`` where ``model`` or ``optimizer`` is something else."""

    def distribute(self, optimizer: Any) -> None:
        """Let an optimizer sum its gradients over the ranks; there are two ranks or more."""
        raise NotImplementedError(f"{self.name} is for one process")

    @property
    def blocked_seconds(self) -> float | None:
        """Seconds that this rank has waited for sums of gradients, in all; None: not known."""
        return 0.0 if self.world.size == 1 else None

    @property
    def gradient_messages(self) -> dict[str, int] | None:
        """``count`` and ``bytes`` of the messages in which a step's gradients are summed.

        None where nothing is summed, or where it is not known.
        """
        return None

    def start_timeline(self, file: str) -> None:
        """Let rank 0 record in ``file`` what Horovod does from now on; all ranks call it."""
        raise NotImplementedError(f"{self.name} has no timeline")

    def stop_timeline(self) -> None:
        """End the record; its file is complete then."""
        raise NotImplementedError(f"{self.name} has no timeline")

    # The steps

    def initialize(self, *, short_steps: bool = False) -> World:
        """See ``Adapter``."""
        place = detect(os.environ)
        set_defaults(runtime_variables(place, short_steps=short_steps))
        launch_check.check_libraries()
        self.communicator = self.connect()
        launch_check.check_world(place, self.communicator.size, self.runtime)
        self.ranks = launch_check.exchange(self.communicator)
        rank, hosts = self.communicator.rank, [facts.place for facts in self.ranks]
        self.world = World(
            rank=rank,
            size=self.communicator.size,
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            host=self.ranks[rank].host,
            hosts=len(set(hosts)),
        )
        if self._lifeline is None:
            self._lifeline = lifeline.hold(rank, hosts, self.communicator.gather)
            self.waits = Waits(rank, [name for name, _ in hosts], self._lifeline.report)
            self._lifeline.on_report = self.waits.take
            if self.world.size > 1:
                self.waits.watch()
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

    def check_devices(self, name: str, place: int, visible: int) -> None:
        """Raise on every rank where local ranks share a GPU; all ranks call it, also on a CPU.

        Args:
            name: of this rank's device.
            place: its place among the GPUs that this rank sees.
            visible: how many it sees; 0: this rank computes on the CPU.
        """
        identity = gpus.identities(visible, os.environ)[place] if visible else ""
        launch_check.check_devices(self.communicator, Device(name, identity, visible), self.ranks)

    @together
    def shard_data(
        self, samples: int, *, global_batch: int, seed: int = 0, digest: str | bytes = ""
    ) -> Shards:
        """See ``Adapter``."""
        if digest:
            given = digest if isinstance(digest, bytes) else digest.encode()
            everyone = self.communicator.gather(given)
            if others := [rank for rank, other in enumerate(everyone) if other != everyone[0]]:
                raise agreed(
                    UsageError(
                        f"shard_data: the digest of the data on rank(s) "
                        f"{', '.join(map(str, others))} is not rank 0's: give every host the same "
                        "data, in the same order"
                    )
                )
        rank, size = self.world.rank, self.world.size
        self._shards = Shards(samples, global_batch, seed, rank, size, on_begin=self.begin_part)
        return self._shards

    def begin_part(self, shards: Shards, part: Part) -> None:
        """Note that ``part`` of ``shards`` is what the next gradients are computed on."""
        self._shards = shards
        self._seen += part.count

    @property
    def current_part(self) -> Part | None:
        """The part that gradients are computed on now; None where there are no shards.

        Raises:
            UsageError: there are shards, but it is not clear which part is meant.
        """
        return self._shards.use() if self._shards else None

    @property
    def part_weight(self) -> float:
        """The share of the current part in its global batch; without shards, one rank of size."""
        part = self.current_part
        return part.weight if part else 1.0 / self.world.size

    def distribute_optimizer(self, model: Any, optimizer: Any = None) -> tuple[Any, Any]:
        """See ``Adapter``."""
        if optimizer is None:
            raise UsageError(
                "distribute_optimizer takes the model and the optimizer, and returns both: "
                "model, optimizer = hvd.distribute_optimizer(model, optimizer)"
            )
        self.check_trained(model, optimizer)
        if optimizer in self._distributed:
            raise UsageError("distribute_optimizer: this optimizer is distributed already")
        self._distributed.add(optimizer)
        if self.world.size > 1:
            self.distribute(optimizer)
        return model, optimizer

    def scale_learning_rate(
        self, base: float, *, scaling: str = "linear", **schedule: Any
    ) -> LearningRate:
        """See ``Adapter``."""
        return LearningRate(base, scale_factor(scaling, self.world.size), **schedule)

    @together
    def average_metrics(self, count: float, **sums: float) -> tuple[dict[str, float], int]:
        """See ``Adapter``."""
        total = self.communicator.sum(metrics.pack(sums, count))
        return metrics.unpack(total, list(sums))
