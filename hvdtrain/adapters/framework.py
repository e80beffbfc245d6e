"""What a framework provides: devices, tensors of the state, BatchNorm, profiler."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from hvdtrain.adapters.state_view import Connected, StateView
from hvdtrain.config.strategies import CommOptions
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.steps.world import World
from hvdtrain.system.runtime.waits import Waits

STEP = "ProfilerStep"
"""Name of the span of an update; ``#`` and its number follow, as torch.profiler writes it."""
RANK = "distributedInfo"
"""Key of the rank in a trace, by which HolisticTraceAnalysis and others match files to ranks."""


SumOverRanks = Callable[[Any, str], Any]
"""(tensor, name) -> its sum over all ranks, not differentiable; the name is the same on all."""


class Flags(NamedTuple):
    """What a rank sends with the gradients of each step; the sum is positive if any has set it."""

    stop: bool  # it wants to stop
    saving: bool  # it is still writing its part of a checkpoint


UNKNOWN = Flags(stop=False, saving=True)  # before the first step: a save is not over


class Rank(Connected, Protocol):
    """What a framework and a strategy know of their rank: its adapter."""

    world: World
    device: Any  # of the framework
    has_gpu: bool
    framework: Framework
    comm_options: CommOptions
    waits: Waits
    models: weakref.WeakSet[Any]  # that are trained
    shards: Shards | None  # from which the last part was drawn
    parts_begun: int  # which every rank counts alike
    read_flags: Callable[[], Flags] | None  # returns those of all ranks at the last step

    @property
    def flags(self) -> Flags:
        """The flags of this rank."""

    @property
    def current_part(self) -> Part | None:
        """The part that gradients are currently computed on; None without shards."""

    pass_weight: Any  # of the framework, since `weight_loss`; None: that of the current part

    @property
    def loss_weight(self) -> Any:
        """Factor of this rank's gradients in this pass; None: they are left out.

        A float; of ``pass_weight`` on a GPU a scalar of the framework.
        """


def not_a_count(count: object) -> UsageError:
    """Return the error of ``weight_loss`` for what is no number of items."""
    return UsageError(
        f"weight_loss({count}): the count must be a number that is not negative, e.g. that of the "
        "tokens over which the loss of this pass is a mean"
    )


class Profiler(ABC):
    """Records what the framework does on this rank, since it was created."""

    @abstractmethod
    def step(self, number: int) -> AbstractContextManager[Any]:
        """Return a context that is the span of update ``number`` in the trace."""

    @abstractmethod
    def mark(self, name: str) -> AbstractContextManager[Any]:
        """Return a context that is a span of this name."""

    @abstractmethod
    def stop(self, path: Path) -> None:
        """Stop recording, and write a gzipped trace in Chrome's JSON format."""


class Framework(ABC):
    """A framework, in this process."""

    kinds: tuple[tuple[str, type], tuple[str, type]]  # name and class of a model, an optimizer
    cpu: Any  # the device of a rank without a GPU
    shards = Shards  # class of the result of step 3

    # Devices

    def claim_device(self, local_rank: int, local_size: int) -> None:  # noqa: B027 (most need not)
        """Select the device already before the first collective, if that needs it."""

    @abstractmethod
    def gpus(self) -> int:
        """Return the number of GPUs that this rank sees."""

    @abstractmethod
    def gpu_name(self, index: int) -> str:
        """Return the product name of a GPU."""

    @abstractmethod
    def use_gpu(self, index: int) -> tuple[Any, str]:
        """Compute on a GPU; return the framework's device, and its name for the user."""

    @abstractmethod
    def use_threads(self, share: Callable[[], int]) -> int:
        """Compute with this rank's ``share`` of the cores; return the number of threads."""

    @abstractmethod
    def peak_memory(self, device: Any) -> int:
        """Return the peak memory in bytes of the tensors on a GPU."""

    # State of a model and its optimizer

    @abstractmethod
    def view(self, adapter: Rank, model: Any) -> StateView:
        """Return the view of a model that is whole on this rank."""

    @abstractmethod
    def prepare(self, adapter: Rank, model: Any, optimizer: Any) -> None:
        """Raise ``UsageError``, in step 5, if the two cannot be trained, sent or saved."""

    # Passes

    @abstractmethod
    def leave_out(self, models: Iterable[Any], stand_in: Any) -> None:
        """Leave the samples of the next passes out of statistics if they are stand-ins."""

    @abstractmethod
    def weigh(self, adapter: Rank, count: Any, optimizers: Iterable[Any]) -> None:
        """Weigh the loss of the next pass, in one process, by ``count``."""

    @abstractmethod
    def synchronize_batchnorm(self, adapter: Rank, task: Any, sum_tensor: SumOverRanks) -> None:
        """Make the BatchNorm layers of the model use the statistics of the global batch."""

    def compile(self, task: Any) -> None:
        """Compile the task's model to kernels of the framework."""
        task.compile()

    @abstractmethod
    def make_deterministic(self) -> None:
        """Select algorithms that are bit-reproducible from run to run, even if slower."""

    @abstractmethod
    def use_tf32(self, wanted: bool) -> None:
        """Enable or disable TF32 for fp32 multiplications on a GPU."""

    @abstractmethod
    def start_profiler(self, rank_facts: Mapping[str, object]) -> Profiler:
        """Start the profiler on this rank; ``rank_facts`` is the value of ``RANK``."""
