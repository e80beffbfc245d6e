"""What a strategy is: how the model is held, how gradients are summed, how the state is seen.

The weight of a rank's gradients is its part's, ``Part.weight`` (``steps/sharding.py``), or that of
``weight_loss``. A strategy reads it as ``loss_weight`` of its adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from typing_extensions import override

from hvdtrain.adapters.framework import Rank
from hvdtrain.adapters.state_view import StateView
from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.steps.sharding import Part, Shards


class BaseStrategy(ABC):
    """A strategy of ``config/strategies.py``, on this rank; by default each rank has all of it.

    Args:
        adapter: the adapter that has it, for the rank's world, weight and waits.
    """

    name: str  # as in --strategy
    runtime: str
    gpus_per_rank = 1
    collective_passes = False  # other ranks wait in this rank's forward and backward passes
    evaluates_together = False  # all ranks make the same number of forward passes in evaluation
    shards_state = False  # each rank holds a part of the state and writes a file of a checkpoint

    def __init__(self, adapter: Rank) -> None:
        self.adapter = adapter

    @abstractmethod
    def connect(self) -> Communicator:
        """Start the runtime and return its collectives."""

    # How the model is held

    def check(self, model: Any, optimizer: Any) -> None:  # noqa: B027 (most can)
        """Raise ``UsageError``, in step 5, if it cannot distribute the two over several ranks."""

    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Return both, made to sum gradients over the ranks (two or more)."""
        raise NotImplementedError(f"{self.name} is for one process")

    def compile(self, task: Any) -> None:
        """Compile the task's model to kernels of the framework."""
        self.adapter.framework.compile(task)

    def synchronize_batchnorm(self, task: Any) -> None:
        """Make the BatchNorm layers of the model use the statistics of the global batch."""
        self.adapter.framework.synchronize_batchnorm(self.adapter, task, self.sum_tensor)

    # How gradients are summed

    @property
    def gradient_sums(self) -> Sequence[Any]:
        """Gradient sums, one per optimizer or model that is distributed over several ranks.

        Each has ``blocked_seconds``, this rank's total wait, and ``messages``, the ``count`` and
        ``bytes`` of those of a step; None: unknown.
        """
        return ()

    def begin_part(self, shards: Shards, part: Part) -> None:  # noqa: B027 (one process)
        """Expect the gradients of ``part`` of ``shards``."""

    def weigh(self, count: Any, optimizers: Iterable[Any]) -> None:
        """Weigh the loss of the next pass by ``count``; see ``CommonAdapter.weight_loss``."""
        self.adapter.framework.weigh(self.adapter, count, optimizers)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally in PyTorch's backward passes within the block.

        The next pass outside of it sums the accumulated gradients over the ranks. Ranks may make
        different numbers of passes within.
        """
        return nullcontext()

    def sum_tensor(self, values: Any, name: str) -> Any:
        """Return the sum of ``values`` over all ranks, not differentiable."""
        return self.adapter.communicator.sum_tensor(values, name)

    def start_sum(self, values: Any) -> Callable[[], Any]:
        """Start to sum ``values`` over all ranks, which call it in the same order.

        Returns:
            The function that waits for the sum; at most one may be under way.
        """
        total = self.sum_tensor(values, "weights")
        return lambda: total

    def start_timeline(self, file: str) -> None:
        """Start recording Horovod's activity in ``file``, on rank 0; all ranks must call it."""
        raise NotImplementedError(f"{self.name} has no timeline")

    def stop_timeline(self) -> None:
        """Stop recording, and complete the file."""
        raise NotImplementedError(f"{self.name} has no timeline")

    # How the state is seen

    def view(self, model: Any, optimizer: Any = None) -> StateView:
        """Return the view of the state; one that shards it returns that of step 5."""
        return self.adapter.framework.view(self.adapter, model)

    def share_weights(self) -> None:  # noqa: B027 (most have all)
        """Send the weights of this rank's share to the others, if they have them, too."""

    def sum_shards(self, values: Any) -> Any:
        """Return the sum over the ranks of per-shard results, e.g. squared norms.

        If they are not sharded, each rank has the whole result, and ``values`` is returned.
        """
        return values


class Single(BaseStrategy):
    """One process, without communication; for any framework."""

    name = "single"
    runtime = "the single strategy"

    @override
    def connect(self) -> Communicator:
        self.adapter.framework.claim_device(0, 1)
        return SingleRank()
