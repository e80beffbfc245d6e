"""What all adapters share: steps 1, 3, 4, 5 and 8 over a communicator, without a framework."""

from __future__ import annotations

import itertools
import json
import logging
import os
import weakref
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Protocol

from typing_extensions import override

from hvdtrain.adapters import preflight
from hvdtrain.adapters.state import StateAdapter
from hvdtrain.collectives.base import Communicator
from hvdtrain.config.levers import BUCKET_BYTES, Levers, check_adasum
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.steps import metrics
from hvdtrain.steps.integrity import Device, RankFacts
from hvdtrain.steps.learning_rate import LearningRate, scale_factor
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.steps.summary import Bubble, StepSplit
from hvdtrain.steps.world import World
from hvdtrain.system.machine import gpus, network
from hvdtrain.system.machine.gpu_meter import GpuMeter
from hvdtrain.system.machine.limits import peak_resident_bytes
from hvdtrain.system.machine.threads import RankCores, agreed_threads, oversubscription
from hvdtrain.system.output.text import rank_list
from hvdtrain.system.runtime import failure_detector
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import agreed, process_status
from hvdtrain.system.runtime.tuning import set_defaults
from hvdtrain.system.runtime.waits import Waits, together

log = logging.getLogger(__name__)


def in_buckets(
    gradients: Sequence[tuple[object, int]], full: int = BUCKET_BYTES
) -> list[list[int]]:
    """Group gradients, given by kind and bytes, in buckets of one kind; return their places.

    A bucket of ``full`` bytes or more takes no other gradient.

    Backward reaches the last layers first, so the buckets go from the back to the front.
    """
    groups: list[list[int]] = []
    size, kind = 0, None
    for place, (this, nbytes) in reversed(list(enumerate(gradients))):
        if not groups or size >= full or this != kind:
            groups.append([])
            size, kind = 0, this
        groups[-1].append(place)
        size += nbytes
    return groups


def in_a_row(costs: Sequence[int], number: int) -> list[range]:
    """Cut layers in a row into ``number`` stages, so that the most costly one costs least.

    Of cuts that are as good the last one is taken: behind layers that cost nothing, such as a
    pooling, which makes what is sent smaller.

    Args:
        costs: of each layer.
        number: of stages, at most one per layer.

    Returns:
        The places of the layers of each stage, one or more.
    """
    ends = [*itertools.accumulate(costs, initial=0)]
    # The least cost of the most costly stage, and its cuts, by the number of layers before them.
    best: list[tuple[int, list[int]]] = [(end, [0]) for end in ends]
    for stage in range(1, number):
        before = best
        best = [
            min(
                (
                    (max(before[cut][0], ends[end] - ends[cut]), -cut, [*before[cut][1], cut])
                    for cut in range(stage, end)
                ),
                default=(0, 0, []),
            )[::2]
            for end in range(len(ends))
        ]
    cuts = [*best[-1][1], len(costs)]
    return [range(*pair) for pair in itertools.pairwise(cuts)]


def in_parts(sizes: Sequence[int], number: int) -> list[int]:
    """Give each of ``sizes`` to one of ``number`` ranks so that their totals are about the same.

    The largest first, each to the rank that has least so far (Graham, "Bounds on Multiprocessing
    Timing Anomalies", 1969: at most 4/3 of the best).

    Returns:
        The rank of each.
    """
    totals, owners = [0] * number, [0] * len(sizes)
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        owners[place] = min(range(number), key=totals.__getitem__)
        totals[owners[place]] += sizes[place]
    return owners


class GradientSums(Protocol):
    """What sums the gradients of one optimizer over the ranks."""

    @property
    def blocked_seconds(self) -> float | None:
        """Seconds that this rank has waited for the sums, in all; None: not known."""

    @property
    def messages(self) -> dict[str, int] | None:
        """``count`` and ``bytes`` of the messages of a step; None: not known."""

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank had ``stop_wanted`` at the last step; the same answer on all ranks."""


class CommonAdapter(StateAdapter):
    """An adapter over a ``Communicator``; a framework adds devices, optimizer and its state."""

    name: str  # of the strategy, as the user spells it
    runtime: str
    levers = Levers()
    device: Any = "cpu"
    has_gpu = False
    meter: GpuMeter | None = None  # of this rank's GPU, since `pin_device`
    threads = 0  # that compute on a CPU, since `pin_device`
    needs_empty_forward = False  # also a part without samples takes a forward and a backward pass
    evaluates_together = False  # all ranks make the same number of forward passes to evaluate, too
    shards_state = False  # ranks hold parts of the state, and each writes a file of a checkpoint
    ranks: list[RankFacts]  # what all ranks told of themselves in step 1, by rank

    def __init__(self) -> None:
        super().__init__()
        self.stop_wanted = False
        self._detector: failure_detector.FailureDetector | None = None
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

    def compile(self, task: Any) -> None:
        """Let the framework make kernels for the task's model, for the passes to come."""
        task.compile()

    def check_precision(self, precision: str) -> None:
        """Raise ``UsageError``, on every rank, where the strategy cannot train in ``precision``."""

    def use_tf32(self, wanted: bool) -> None:
        """Let a GPU multiply fp32 in TF32, or not, whatever its framework does by default."""

    @property
    def gradient_sums(self) -> Sequence[GradientSums]:
        """One per optimizer that is distributed over several ranks."""
        return ()

    def no_sync(self) -> AbstractContextManager[None]:
        """Let backward passes of PyTorch within add to this rank's own gradients.

        The next pass outside of it sums what has come together over the ranks. Ranks may make
        different numbers of passes within.
        """
        return nullcontext()

    def sum_shards(self, values: Any) -> Any:
        """Sum a tensor of what each rank found in its part of parameters or gradients.

        Where no strategy shards them, a rank has found all, and ``values`` are returned.
        """
        return values

    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return both so that gradients are summed over the ranks; there are two or more."""
        raise NotImplementedError(f"{self.name} is for one process")

    def start_timeline(self, file: str) -> None:
        """Let rank 0 record in ``file`` what Horovod does from now on; all ranks call it."""
        raise NotImplementedError(f"{self.name} has no timeline")

    def stop_timeline(self) -> None:
        """End the record; its file is complete then."""
        raise NotImplementedError(f"{self.name} has no timeline")

    # What the sums of the gradients tell

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank had ``stop_wanted`` at the last step; the same answer on all ranks."""
        sums = self.gradient_sums
        return any(one.stop_agreed for one in sums) if sums else self.stop_wanted

    @property
    def blocked_seconds(self) -> float | None:
        """Seconds that this rank has waited for sums of gradients, in all; None: not known."""
        if self.world.size == 1:
            return 0.0
        waits = [one.blocked_seconds for one in self.gradient_sums]
        # With a GPU the wait for the sums is also one for what it still computes.
        unknown = self.has_gpu or not waits or None in waits
        return None if unknown else sum(wait or 0.0 for wait in waits)

    @property
    def gradient_messages(self) -> dict[str, int] | None:
        """``count`` and ``bytes`` of the messages in which a step's gradients are summed.

        None where nothing is summed, or where it is not known.
        """
        known = [one.messages for one in self.gradient_sums if one.messages]
        return (
            {key: sum(one[key] for one in known) for key in ("count", "bytes")} if known else None
        )

    def bubble(self, split: StepSplit | None) -> Bubble | None:
        """Return how long the stages of a model wait for one another; None: it has none.

        Args:
            split: of the mean step; None: it is not known.
        """
        return None

    @property
    def peak_memory_bytes(self) -> int:
        """The most that this rank has taken so far: of its GPU's memory, else resident; 0: unknown.

        A framework counts what tensors take of a GPU.
        """
        return peak_resident_bytes()

    # The steps

    @override
    def initialize(self, *, short_steps: bool = False) -> World:
        launch = detect(os.environ)
        strategy = STRATEGIES[self.name]
        if launch.size > 1:
            set_defaults(self.levers.environment(strategy, short_steps=short_steps))
        preflight.check_libraries()
        self.communicator = self.connect()
        process_status.disconnect.append(self.communicator.close)
        preflight.check_world(launch, self.communicator.size, self.runtime)
        self.ranks = preflight.exchange(self.communicator)
        rank, hosts = self.communicator.rank, [facts.place for facts in self.ranks]
        self.world = World(
            rank=rank,
            size=self.communicator.size,
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            host=self.ranks[rank].host,
            hosts=len(set(hosts)),
        )
        if self.levers.autotune:
            said = "--autotune: Horovod chooses by timings, so no run is bit-equal to another"
            self.communicator.on_root(lambda: log.warning(said))
        if self._detector is None:
            self._detector = failure_detector.start(
                rank, hosts, network.addresses(), self.communicator.gather
            )
            self.waits = Waits(rank, [name for name, _ in hosts], self._detector.report)
            self._detector.on_report = self.waits.take
            if self.world.size > 1:
                self.waits.watch()
        return self.world

    def cpu_threads(self) -> int:
        """Return this rank's share of its host's cores, or the user's OMP_NUM_THREADS."""
        ranks = [facts for facts, _ in self._gather_threads(0)]
        return agreed_threads(ranks, self.world.rank)

    def check_threads(self) -> None:
        """Warn of ranks that have more threads than their host has cores; all ranks call it."""
        ranks, threads = zip(*self._gather_threads(self.threads), strict=True)
        if warning := oversubscription(ranks, threads):
            self.communicator.on_root(lambda: log.warning("%s", warning))

    def _gather_threads(self, threads: int) -> list[tuple[RankCores, int]]:
        mine = asdict(RankCores.here(self.world.host, os.environ))
        ranks = self.communicator.gather(json.dumps([mine, threads]).encode())
        return [(RankCores(**facts), number) for facts, number in map(json.loads, ranks)]

    def check_devices(self, name: str, place: int, visible: int) -> None:
        """Raise on every rank where local ranks share a GPU; all ranks call it, also on a CPU.

        Args:
            name: of this rank's device.
            place: its place among the GPUs that this rank sees.
            visible: how many it sees; 0: this rank computes on the CPU.
        """
        identity = gpus.identities(visible, os.environ)[place] if visible else ""
        self.meter = GpuMeter(identity) if visible else None
        preflight.check_devices(self.communicator, Device(name, identity, visible), self.ranks)

    @together
    @override
    def shard_data(
        self, samples: int, *, global_batch: int, seed: int = 0, digest: str | bytes = ""
    ) -> Shards:
        if digest:
            given = digest if isinstance(digest, bytes) else digest.encode()
            everyone = self.communicator.gather(given)
            if others := [rank for rank, other in enumerate(everyone) if other != everyone[0]]:
                raise agreed(
                    UsageError(
                        f"shard_data: the digest of the data on {rank_list(others)} is not rank "
                        "0's: give every host the same data, in the same order"
                    )
                )
        rank, size = self.world.data_rank, self.world.data_size
        self._shards = Shards(samples, global_batch, seed, rank, size, on_begin=self.begin_part)
        self._shards.on_end = self.end_part
        return self._shards

    def begin_part(self, shards: Shards, part: Part) -> None:
        """Note that ``part`` of ``shards`` is what the next gradients are computed on."""
        self._shards = shards
        self.samples_seen += part.count
        self._rank_buffers = {}  # also where this rank's part is empty: the others' are not

    def end_part(self) -> None:
        """Take part in the sums that other ranks wait for, before anything else that all do."""

    @property
    def samples_seen(self) -> int:
        """Samples that this rank has trained on, with those before a resume."""
        return self._seen

    @samples_seen.setter
    def samples_seen(self, count: int) -> None:
        if count != self._seen:  # this rank has trained on: its statistics are not those loaded
            self._rank_buffers = {}
        self._seen = count

    @together
    def check_updates(self, model: Any, optimizer: Any, text: str) -> None:
        """Compare the trained parameters and the optimizer state of all ranks, bit for bit.

        Raises:
            HvdtrainError: on every rank: names those that differ, and says ``text``.
        """
        self.compare(model, self.replicated(model, optimizer), text)

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
        return part.weight if part else 1.0 / self.world.data_size

    @override
    def distribute_optimizer(self, model: Any, optimizer: Any = None) -> tuple[Any, Any]:
        if optimizer is None:
            raise UsageError(
                "distribute_optimizer takes the model and the optimizer, and returns both: "
                "model, optimizer = hvd.distribute_optimizer(model, optimizer)"
            )
        try:
            check_adasum(self.levers, self.world.size, gpu=self.has_gpu)
        except UsageError as error:
            raise agreed(error) from None  # every rank sees the same
        self.check_trained(model, optimizer)
        if optimizer in self._distributed:
            raise UsageError("distribute_optimizer: this optimizer is distributed already")
        several = self.world.devices > 1
        distributed = self.distribute(model, optimizer) if several else (model, optimizer)
        self._distributed.add(optimizer)  # what was refused may be given again
        return distributed

    @override
    def scale_learning_rate(
        self, base: float, *, scaling: str = "linear", **schedule: Any
    ) -> LearningRate:
        return LearningRate(base, scale_factor(scaling, self.world.shares), **schedule)

    @together
    @override
    def average_metrics(self, count: float, **sums: float) -> tuple[dict[str, float], int]:
        total = self.data_communicator.sum(metrics.pack(sums, count))
        return metrics.unpack(total, list(sums))
