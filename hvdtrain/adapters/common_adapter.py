"""Framework-free base of all adapters: steps 1, 3, 4, 5 and 8 over a communicator."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from hvdtrain.adapters import preflight
from hvdtrain.adapters.profiler import Profiler
from hvdtrain.adapters.state import StateAdapter
from hvdtrain.collectives.base import Communicator
from hvdtrain.config.comm_options import CommOptions
from hvdtrain.config.strategies import STRATEGIES
from hvdtrain.errors import UsageError
from hvdtrain.steps import metrics
from hvdtrain.steps.integrity import Device, RankFacts
from hvdtrain.steps.learning_rate import LearningRate, scale_factor
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.steps.world import World
from hvdtrain.system.machine import gpus, network
from hvdtrain.system.machine.gpus import GpuMeter
from hvdtrain.system.machine.limits import peak_resident_bytes
from hvdtrain.system.machine.threads import RankCores, agreed_threads, oversubscription, own_cpus
from hvdtrain.system.output.text import rank_list
from hvdtrain.system.runtime import failure_detector
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import agreed, end_by_exceptions, process_status
from hvdtrain.system.runtime.spawn import end_with_launcher
from hvdtrain.system.runtime.tuning import set_defaults
from hvdtrain.system.runtime.waits import Waits, together

log = logging.getLogger(__name__)


class GradientSums(Protocol):
    """Sums of the gradients of one optimizer over the ranks."""

    @property
    def blocked_seconds(self) -> float | None:
        """Total seconds that this rank has waited for the sums; None: unknown."""

    @property
    def messages(self) -> dict[str, int] | None:
        """``count`` and ``bytes`` of the messages of a step; None: unknown."""

    @property
    def flags(self) -> Flags:
        """The flags of all ranks at the last step: whether any rank had set it."""


class Flags(NamedTuple):
    """What a rank sends with the gradients of each step; the sum is positive if any has set it."""

    stop: bool  # it wants to stop
    saving: bool  # it is still writing its part of a checkpoint


@dataclass(frozen=True)
class RankHooks:
    """What the gradient sums of an optimizer need to know of their rank.

    Attributes:
        weight: factor of this rank's gradients in this pass; 0 replaces any value by zero.
        flags: the flags of this rank.
        summed: called with the sums of all ranks' flags, a tensor, after each sum.
        waits: context of a wait for the other ranks, by the name of the call.
        part: number of parts begun, which every rank counts alike.
    """

    weight: Callable[[], float]
    flags: Callable[[], Flags] = lambda: Flags(stop=False, saving=False)
    summed: Callable[[Any], None] = lambda flags: None
    waits: Callable[[str], AbstractContextManager[None]] = lambda call: nullcontext()
    part: Callable[[], int] = lambda: 0


class CommonAdapter(StateAdapter):
    """An adapter over a ``Communicator``; a framework adds devices, optimizer and state."""

    runtime: str
    comm_options = CommOptions()
    device: Any = "cpu"
    has_gpu = False
    meter: GpuMeter | None = None  # of this rank's GPU, since `pin_device`
    threads = 0  # number of CPU compute threads, since `pin_device`
    collective_passes = False  # other ranks wait in this rank's forward and backward passes
    evaluates_together = False  # all ranks make the same number of forward passes in evaluation
    shards_class = Shards
    shards_state = False  # each rank holds a part of the state and writes a file of a checkpoint
    read_flags: Callable[[], Flags] | None = None  # of all ranks, if not the adapter sums gradients
    ranks: list[RankFacts]  # facts of all ranks, exchanged in step 1, by rank

    def __init__(self) -> None:
        super().__init__()
        self._detector: failure_detector.FailureDetector | None = None
        self._shards: Shards | None = None  # from which the last part was drawn
        self._distributed: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers
        self.parts_begun = 0

    def __getattr__(self, name: str) -> Any:
        if name in ("world", "communicator", "ranks"):
            raise UsageError("call initialize() first (step 1): the adapter is not connected")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    # Implemented by a framework or a strategy

    @abstractmethod
    def connect(self) -> Communicator:
        """Start the runtime and return its collectives."""

    def synchronize_batchnorm(self, task: Any) -> None:
        """Make the BatchNorm layers of the model use the statistics of the global batch."""

    def make_deterministic(self) -> None:
        """Select algorithms that are bit-reproducible from run to run, even if slower."""

    def compile(self, task: Any) -> None:
        """Compile the task's model to kernels of the framework."""
        task.compile()

    def use_tf32(self, wanted: bool) -> None:
        """Enable or disable TF32 for fp32 multiplications on a GPU."""

    def start_profiler(self) -> Profiler:
        """Start the framework's profiler on this rank."""
        raise NotImplementedError(f"{self.name} has no profiler")

    @property
    def gradient_sums(self) -> Sequence[GradientSums]:
        """Gradient sums, one per optimizer that is distributed over several ranks."""
        return ()

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally in PyTorch's backward passes within the block.

        The next pass outside of it sums the accumulated gradients over the ranks. Ranks may make
        different numbers of passes within.
        """
        return nullcontext()

    def share_weights(self) -> None:
        """Send the weights of this rank's share to the others, if they have them, too."""

    def sum_shards(self, values: Any) -> Any:
        """Return the sum over the ranks of per-shard results, e.g. squared norms.

        If they are not sharded, each rank has the whole result, and ``values`` is returned.
        """
        return values

    def check_state(self, model: Any, optimizer: Any) -> None:
        """Raise ``UsageError``, in step 5, if the two cannot be trained, sent or saved."""

    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return both, made to sum gradients over the ranks (two or more)."""
        raise NotImplementedError(f"{self.name} is for one process")

    def start_timeline(self, file: str) -> None:
        """Start recording Horovod's activity in ``file``, on rank 0; all ranks must call it."""
        raise NotImplementedError(f"{self.name} has no timeline")

    def stop_timeline(self) -> None:
        """Stop recording, and complete the file."""
        raise NotImplementedError(f"{self.name} has no timeline")

    # Results of the gradient sums

    @property
    def flags(self) -> Flags:
        """The flags of this rank."""
        return Flags(self.stop_wanted, self.is_saving)

    @property
    def flags_agreed(self) -> Flags:
        """For each flag, whether any rank had set it at the last step; equal on all ranks.

        Ranks that sum no gradients cannot know it: some may be saving.
        """
        if self.read_flags:
            return self.read_flags()
        if not self.gradient_sums:
            return Flags(self.stop_wanted, saving=self.is_saving or self.world.size > 1)
        agreed = [optimizer.flags for optimizer in self.gradient_sums]
        return Flags(*map(any, zip(*agreed, strict=True)))

    @property
    @override
    def saving_agreed(self) -> bool:
        return self.flags_agreed.saving

    @property
    def blocked_seconds(self) -> float | None:
        """Total seconds that this rank has waited for sums of gradients; None: unknown."""
        if self.world.size == 1:
            return 0.0
        waits = [sums.blocked_seconds for sums in self.gradient_sums]
        # With a GPU, the wait for the sums includes the wait for its computation.
        unknown = self.has_gpu or not waits or None in waits
        return None if unknown else sum(wait or 0.0 for wait in waits)

    @property
    def gradient_messages(self) -> dict[str, int] | None:
        """``count`` and ``bytes`` of the messages that sum a step's gradients.

        None if nothing is summed, or if they are unknown.
        """
        messages = (Counter(sums.messages) for sums in self.gradient_sums if sums.messages)
        return dict(sum(messages, Counter())) or None

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of this rank: of its GPU, on a CPU resident memory; 0: unknown.

        On a GPU, the framework counts the memory of its tensors.
        """
        return peak_resident_bytes()

    # The steps

    @override
    def initialize(self, *, short_steps: bool = False) -> World:
        end_with_launcher()
        launch = detect(os.environ)
        strategy = STRATEGIES[self.name]
        if launch.size > 1:
            set_defaults(strategy.variables(os.environ, short_steps=short_steps))
        preflight.check_libraries()
        self.communicator = self.connect()
        process_status.disconnect.append(self.communicator.close)
        if self.communicator.size > 1:
            end_by_exceptions()
        preflight.check_world(launch, self.communicator.size, self.runtime)
        self.ranks = preflight.exchange(self.communicator)
        rank, hosts = self.communicator.rank, [facts.host_id for facts in self.ranks]
        self.world = World(
            rank=rank,
            size=self.communicator.size,
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            host=self.ranks[rank].host,
            hosts=len(set(hosts)),
        )
        if self._detector is None:
            local = {facts.host_id: facts.addresses for facts in self.ranks}
            self._detector = failure_detector.start(
                rank, hosts, network.reachable_at(local.values()), self.communicator.gather
            )
            self.waits = Waits(rank, [name for name, _ in hosts], self._detector.report)
            self._detector.on_report = self.waits.take
            self._detector.on_end = self.waits.all_ended.set
            if self.world.size > 1:
                self.waits.watch()
                atexit.register(self.waits.finish)
        return self.world

    def cpu_threads(self) -> int:
        """Return this rank's share of the cores of its host, or the user's OMP_NUM_THREADS."""
        ranks = [facts for facts, _ in self._gather_threads(0)]
        return agreed_threads(ranks, self.world.rank)

    def check_threads(self) -> None:
        """Warn if a host has more threads of ranks than cores; all ranks must call it."""
        ranks, threads = zip(*self._gather_threads(self.threads), strict=True)
        if warning := oversubscription(ranks, threads):
            self.communicator.on_root(lambda: log.warning("%s", warning))

    def _gather_threads(self, threads: int) -> list[tuple[RankCores, int]]:
        mine = RankCores.here(self.world.host, os.environ)
        return self.communicator.gather_json((mine, threads), tuple[RankCores, int])

    def check_devices(self, name: str, index: int, visible: int) -> None:
        """Raise, on every rank, if local ranks share a GPU; all ranks must call it, also on a CPU.

        ``index`` is that of this rank's device among the ``visible`` GPUs; 0 visible: a CPU.
        """
        os.sched_setaffinity(0, own_cpus())  # this thread and workers, if OpenMP has bound it
        identity = gpus.identities(visible, os.environ)[index] if visible else ""
        self.meter = GpuMeter(identity) if visible else None
        preflight.check_devices(self.communicator, Device(name, identity, visible), self.ranks)

    @override
    def shard_data(
        self, samples: int, *, global_batch: int, seed: int = 0, digest: str | bytes = ""
    ) -> Shards:
        if digest:
            local = digest if isinstance(digest, bytes) else digest.encode()
            with self.waits.during("shard_data"):
                digests = self.communicator.gather(local)
            if others := [rank for rank, value in enumerate(digests) if value != digests[0]]:
                raise agreed(
                    UsageError(
                        f"shard_data: the digest of the data on {rank_list(others)} differs from "
                        "rank 0's: use the same data on every host, in the same order"
                    )
                )
        rank, size = self.world.rank, self.world.size
        self._shards = self.shards_class(
            samples, global_batch, seed, rank, size, on_begin=self.begin_part
        )
        self._shards.on_end = lambda: self.leave_out(False)
        return self._shards

    def begin_part(self, shards: Shards, part: Part) -> None:
        """Set ``part`` of ``shards`` as the one that the next gradients are computed on."""
        self._shards = shards
        self.parts_begun += 1
        self.samples_seen += part.count
        self.rank_buffers = {}  # also if this rank has only a stand-in: the others have samples
        self.leave_out(part.stand_in)

    def leave_out(self, stand_in: bool) -> None:
        """Leave the samples of the next passes out of the statistics if they are stand-ins."""

    @property
    def samples_seen(self) -> int:
        """Number of samples that this rank has trained on, including those before a resume."""
        return self._seen

    @samples_seen.setter
    def samples_seen(self, count: int) -> None:
        if count != self._seen:  # trained since loading: the loaded statistics are outdated
            self.rank_buffers = {}
        self._seen = count

    @property
    def current_part(self) -> Part | None:
        """The part that gradients are currently computed on; None without shards.

        Raises:
            UsageError: there are shards, but the current part is ambiguous.
        """
        return self._shards.use() if self._shards else None

    @property
    def part_weight(self) -> float:
        """The current part's share of its global batch; without shards, equal for all ranks."""
        part = self.current_part
        return part.weight if part else 1.0 / self.world.size

    @together
    @override
    def distribute_optimizer(self, model: Any, optimizer: Any = None) -> tuple[Any, Any]:
        if optimizer is None:
            raise UsageError(
                "distribute_optimizer takes the model and the optimizer, and returns both: "
                "model, optimizer = hvd.distribute_optimizer(model, optimizer)"
            )
        self.check_trained(model, optimizer)
        self.check_state(model, optimizer)
        if optimizer in self._distributed:
            raise UsageError("distribute_optimizer: this optimizer is distributed already")
        self.send_options(self.view(model), optimizer)  # step 6 may be called without optimizer
        several = self.world.devices > 1
        distributed = self.distribute(model, optimizer) if several else (model, optimizer)
        self._distributed.add(optimizer)  # only now: after an error the call may be repeated
        return distributed

    @override
    def scale_learning_rate(
        self, base: float, *, scaling: str = "linear", **schedule: Any
    ) -> LearningRate:
        return LearningRate(base, scale_factor(scaling, self.world.devices), **schedule)

    @together
    @override
    def average_metrics(self, count: float, **sums: float) -> tuple[dict[str, float], int]:
        total = self.communicator.sum(metrics.pack(sums, count))
        return metrics.unpack(total, list(sums))
