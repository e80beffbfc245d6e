"""The adapter: the eight steps, with a framework and a strategy (steps 6 and 7: ``state.py``)."""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from typing_extensions import override

from hvdtrain.adapters import preflight
from hvdtrain.adapters.framework import Flags, Framework, Profiler
from hvdtrain.adapters.state import StateAdapter
from hvdtrain.adapters.strategy import BaseStrategy
from hvdtrain.config.strategies import STRATEGIES, CommOptions
from hvdtrain.errors import UsageError
from hvdtrain.steps import metrics
from hvdtrain.steps.integrity import Device, RankFacts
from hvdtrain.steps.learning_rate import LearningRate, scale_factor
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.steps.world import World
from hvdtrain.system.machine import gpus, network
from hvdtrain.system.machine.gpus import GpuMeter, gpu_of_rank
from hvdtrain.system.machine.limits import peak_resident_bytes
from hvdtrain.system.machine.threads import RankCores, agreed_threads, oversubscription, own_cpus
from hvdtrain.system.output.text import plural, rank_list
from hvdtrain.system.runtime import failure_detector
from hvdtrain.system.runtime.detect import detect
from hvdtrain.system.runtime.exit import agreed, end_by_exceptions, process_status
from hvdtrain.system.runtime.spawn import end_with_launcher
from hvdtrain.system.runtime.tuning import set_defaults
from hvdtrain.system.runtime.waits import Waits, together

log = logging.getLogger(__name__)

DEFAULTS = CommOptions()


class CommonAdapter(StateAdapter):
    """The eight steps over a ``Communicator``, with a framework and a strategy.

    Args:
        framework: class of the framework.
        strategy: class of the strategy.
        comm_options: communication options.
    """

    has_gpu = False
    meter: GpuMeter | None = None  # of this rank's GPU, since `pin_device`
    threads = 0  # number of CPU compute threads, since `pin_device`
    read_flags: Callable[[], Flags] | None = None  # returns those of all ranks at the last step
    ranks: list[RankFacts]  # facts of all ranks, exchanged in step 1, by rank

    def __init__(
        self,
        framework: type[Framework],
        strategy: type[BaseStrategy],
        comm_options: CommOptions = DEFAULTS,
    ) -> None:
        super().__init__()
        self.framework, self.strategy = framework(), strategy(self)
        self.name, self.comm_options = strategy.name, comm_options
        self.device: Any = self.framework.cpu
        self.models: weakref.WeakSet[Any] = weakref.WeakSet()  # that are trained
        self.shards: Shards | None = None  # from which the last part was drawn
        self.parts_begun = 0  # which every rank counts alike
        self.pass_weight: Any = None  # of `weight_loss`, for the next backward pass
        self._on_stand_in = False  # the current part is one
        self._detector: failure_detector.FailureDetector | None = None
        self._distributed: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers

    def __getattr__(self, name: str) -> Any:
        if name in ("world", "communicator", "ranks"):
            raise UsageError("call initialize() first (step 1): the adapter is not connected")
        raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally in PyTorch's backward passes within the block.

        Raises:
            UsageError: after ``weight_loss``.
        """
        if self.pass_weight:
            raise UsageError("weight_loss() cannot be combined with no_sync(): omit no_sync()")
        return self.strategy.no_sync()

    def weight_loss(self, count: Any) -> None:
        """Weigh the loss of the next backward pass, a mean over ``count`` items of this rank.

        All ranks must call it before each backward pass, in TensorFlow before each ``apply``, if
        the loss is a mean over something else than samples: tokens that are no padding, valid
        pixels, boxes, the sum of the weights of classes. The gradients are then those of one
        process: the sum over passes and ranks of count times gradient, divided by the sum of the
        counts, since the last step or ``zero_grad``. So do not divide the loss by the number of
        passes. One message more is sent, which overlaps with the computation until the first
        gradient.

        Args:
            count: number of items, or a scalar tensor, which a GPU's host does not read. On a
                stand-in any count is 0. If it is 0 on all ranks, the gradients are 0.

        Raises:
            UsageError: the count is negative or not finite (on a GPU the gradients are nan), or,
                from a backward pass: some passes of an update have no weight, or were made within
                ``no_sync``.
        """
        self.strategy.weigh(count, self._distributed)

    @together
    def total(self, **numbers: float) -> dict[str, float]:
        """Return the sums of numbers over all ranks, by name; all ranks must call it.

        Those of a stand-in are not counted. For a loss with several denominators, see
        docs/own.md.
        """
        values = [0.0 if self._on_stand_in else float(value) for value in numbers.values()]
        sums = self.communicator.sum(np.array(values))
        return dict(zip(numbers, sums.tolist(), strict=True))

    def start_profiler(self) -> Profiler:
        """Start the framework's profiler on this rank."""
        rank, size = self.world.rank, self.world.size  # as torch.distributed has them
        return self.framework.start_profiler(
            {"backend": self.name, "rank": rank, "world_size": size}
        )

    # Results of the gradient sums

    @property
    def flags(self) -> Flags:
        """The flags of this rank."""
        return Flags(self.stop_wanted, self.is_saving)

    @property
    @override
    def flags_agreed(self) -> Flags:
        if self.read_flags:
            return self.read_flags()
        # Ranks that sum no gradients cannot know it: some may be saving.
        return Flags(self.stop_wanted, saving=self.is_saving or self.world.size > 1)

    @property
    def blocked_seconds(self) -> float | None:
        """Total seconds that this rank has waited for sums of gradients; None: unknown."""
        if self.world.size == 1:
            return 0.0
        waits = [sums.blocked_seconds for sums in self.strategy.gradient_sums]
        # With a GPU, the wait for the sums includes the wait for its computation.
        unknown = self.has_gpu or not waits or None in waits
        return None if unknown else sum(wait or 0.0 for wait in waits)

    @property
    def gradient_messages(self) -> dict[str, int] | None:
        """``count`` and ``bytes`` of the messages that sum a step's gradients.

        None if nothing is summed, or if they are unknown.
        """
        messages = (Counter(sums.messages) for sums in self.strategy.gradient_sums if sums.messages)
        return dict(sum(messages, Counter())) or None

    @property
    def peak_memory_bytes(self) -> int:
        """Peak memory of this rank: of its GPU, on a CPU resident memory; 0: unknown.

        On a GPU, the framework counts the memory of its tensors.
        """
        return self.framework.peak_memory(self.device) if self.has_gpu else peak_resident_bytes()

    # The steps

    @override
    def initialize(self, *, short_steps: bool = False) -> World:
        end_with_launcher()
        launch = detect(os.environ)
        if launch.size > 1:
            variables = STRATEGIES[self.name].variables(os.environ, short_steps=short_steps)
            set_defaults(variables)
        preflight.check_libraries()
        self.communicator = self.strategy.connect()
        process_status.disconnect.append(self.communicator.close)
        if self.communicator.size > 1:
            end_by_exceptions()
        preflight.check_world(launch, self.communicator.size, self.strategy.runtime)
        self.ranks = preflight.exchange(self.communicator)
        rank, hosts = self.communicator.rank, [facts.host_id for facts in self.ranks]
        self.world = World(
            rank=rank,
            size=self.communicator.size,
            local_rank=hosts[:rank].count(hosts[rank]),
            local_size=hosts.count(hosts[rank]),
            host=self.ranks[rank].host,
            hosts=len(set(hosts)),
            gpus_per_rank=self.strategy.gpus_per_rank,
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

    @override
    def pin_device(self) -> str:
        count = self.framework.gpus()
        index = gpu_of_rank(self.world.local_rank, count)
        name = self.framework.gpu_name(index) if count else "cpu"
        self.check_devices(name, index, count)
        if not count:
            self.threads = self.framework.use_threads(self.cpu_threads)
            self.check_threads()
            return f"cpu, {plural(self.threads, 'thread')}"
        self.has_gpu = True
        self.device, label = self.framework.use_gpu(index)
        if self.world.devices > self.world.size:
            self.meter = None  # of one GPU
            return f"{plural(self.world.devices, 'GPU')} ({name} first)"
        return f"{label} ({name})"

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
        self.shards = self.framework.shards(
            samples, global_batch, seed, rank, size, on_begin=self.begin_part
        )
        self.shards.on_end = self._end_part
        return self.shards

    def begin_part(self, shards: Shards, part: Part) -> None:
        """Set ``part`` of ``shards`` as the one that the next gradients are computed on."""
        self.shards = shards
        self.parts_begun += 1
        self.pass_weight = None
        self._on_stand_in = part.stand_in
        self.samples_seen += part.count
        self.rank_buffers = {}  # also if this rank has only a stand-in: the others have samples
        self.leave_out(part.stand_in)
        self.strategy.begin_part(shards, part)

    def _end_part(self) -> None:
        self._on_stand_in = False
        self.leave_out(False)

    def leave_out(self, stand_in: Any) -> None:
        """Leave the samples of the next passes out of the statistics if they are stand-ins."""
        self.framework.leave_out(self.models, stand_in)

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
        return self.shards.use() if self.shards else None

    @property
    def loss_weight(self) -> Any:
        """The weight of this rank's loss: that of ``weight_loss``, or else the part's share.

        Without shards all ranks have the same. None: the part is a stand-in.
        """
        part = self.current_part
        if part and part.stand_in:
            return None
        if self.pass_weight:
            return self.pass_weight.share
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
        several = self.world.devices > 1
        if several:
            self.strategy.check(model, optimizer)
        self.framework.prepare(self, model, optimizer)
        if optimizer in self._distributed:
            raise UsageError("distribute_optimizer: this optimizer is distributed already")
        self.send_options(self.view(model), optimizer)  # step 6 may be called without optimizer
        both = self.strategy.distribute(model, optimizer) if several else (model, optimizer)
        self._distributed.add(optimizer)  # only now: after an error the call may be repeated
        self.models.add(model)
        return both

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
