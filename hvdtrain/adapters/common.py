"""What all adapters share: steps 1, 3, 4 and 8 over a communicator, without a framework."""

from __future__ import annotations

import json
import logging
import os
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hvdtrain.adapters import launch_check
from hvdtrain.adapters.communicator import Communicator
from hvdtrain.adapters.state import StateAdapter
from hvdtrain.environment import gpus
from hvdtrain.launch import lifeline
from hvdtrain.launch.detect import detect
from hvdtrain.launch.tuning import runtime_variables, set_defaults
from hvdtrain.steps import metrics
from hvdtrain.steps.integrity import Device, RankFacts
from hvdtrain.steps.learning_rate import LearningRate, scale_factor
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.steps.world import World, threads_per_rank

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
        self._part: Part | None = None

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
    def weigh(self, loss: Any, part: Part | None = None) -> Any:
        """``loss``, a mean over ``part``, times the part's share of the global batch.

        Tells the part where batches are fetched ahead, and weights what BatchNorm exchanges over
        the ranks too. Call it once a step, before the backward pass.
        """

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
    def part_weight(self) -> float:
        """The share of the part in hand in its global batch; without shards, one rank of size."""
        return self._part.weight if self._part else 1.0 / self.world.size

    def scale_learning_rate(
        self, base: float, *, scaling: str = "linear", **schedule: Any
    ) -> LearningRate:
        """See ``Adapter``."""
        return LearningRate(base, scale_factor(scaling, self.world.size), **schedule)

    def average_metrics(self, count: float, **sums: float) -> tuple[dict[str, float], int]:
        """See ``Adapter``."""
        total = self.communicator.sum(metrics.pack(sums, count))
        return metrics.unpack(total, list(sums))
