"""The eight steps from a script for one device to distributed training, as an interface.

This file is the table of contents of the project: one abstract method per step, in order. The
framework-free half stands in ``steps/``, each framework's half beside this file. A method says
what it guarantees on all ranks together; all ranks must call it, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.sharding import Shards
from hvdtrain.steps.world import World


class Adapter(ABC):
    """Eight steps, for one framework and one strategy. Call them in this order."""

    world: World

    @abstractmethod
    def initialize(self, *, short_steps: bool = False) -> World:
        """Step 1: join the other ranks.

        After it, all ranks know one ``World``. Environment variables that tune MPI and Horovod are
        set before either starts, and only those that the user has not set.

        Args:
            short_steps: steps of the training take a few milliseconds (MNIST), so that Horovod
                should look for work more often.

        Raises:
            UsageError: on every rank, within seconds, where the launcher started another number
                of processes than the runtime connected.
        """

    @abstractmethod
    def pin_device(self) -> str:
        """Step 2: give each local rank a device of its own; on a CPU, its share of the cores.

        Returns:
            The device in words, such as ``cuda:0`` or ``cpu, 4 threads``.

        Raises:
            UsageError: on every rank, where some host has fewer devices than local ranks.
        """

    @abstractmethod
    def shard_data(
        self, samples: int, *, global_batch: int, seed: int = 0, digest: str | bytes = ""
    ) -> Shards:
        """Step 3: cut out this rank's parts of the global batches of ``range(samples)``.

        Iterate over ``.epoch(number)``; each ``Part`` has ``indices``, and all ranks take the same
        number of steps. See ``steps/sharding.py``.

        Gradients are weighted by the part that is current: the one drawn last from ``epoch``. Where
        batches are read ahead, iterate over ``batches`` or compute ``with shards.step(part)``.

        Args:
            samples: size of the dataset, equal on all ranks.
            global_batch: samples of a step over all ranks.
            seed: seed of the order, equal on all ranks.
            digest: of the data, such as a SHA-256 of file names and labels in their order. Where
                it is given, on all ranks, it is compared: ranks with other samples of the same
                number would train without a word.

        Raises:
            UsageError: on every rank: the digests differ; names the ranks.
        """

    @abstractmethod
    def scale_learning_rate(
        self, base: float, *, scaling: str = "linear", **schedule: Any
    ) -> LearningRate:
        """Step 4: make the learning-rate schedule by epoch.

        Args:
            base: the learning rate that is right for one rank.
            scaling: ``linear``, ``sqrt`` or ``none``: how it grows with the world size.
            schedule: ``epochs``, ``warmup_epochs``, ``schedule``, ``milestones``, ``decay`` of
                ``LearningRate``.
        """

    @abstractmethod
    def distribute_optimizer(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Step 5: make updates use the mean gradient over the *global* batch from now on.

        The loss stays the mean over the rank's own part: gradients are weighted by the part's
        share of the global batch, so uneven parts, and empty ones, are right too. Which part that
        is, the shards of step 3 tell (``shards.current``); without shards all ranks weigh the same.

        With PyTorch the gradients are whole when ``backward()`` returns, to clip or to look at;
        several passes before a step add up, as in one process. With TensorFlow they are summed in
        ``optimizer.apply``. Every rank must make the same updates; several optimizers are
        distributed one by one, in the same order on all ranks.

        Returns:
            The model to call from now on, and the optimizer, which keeps its type and methods.

        Raises:
            UsageError: something else than a model and an optimizer, or one distributed already.
        """

    @abstractmethod
    def broadcast_state(self, model: Any, optimizer: Any = None) -> str:
        """Step 6: send parameters, buffers and optimizer state of rank 0 to all ranks, bit for bit.

        Returns:
            The SHA-256 of the state, which every rank has compared with all others.

        Raises:
            HvdtrainError: on every rank, naming the ranks whose state differs afterwards.
        """

    @abstractmethod
    def save_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        state: dict[str, Any],
        keep: int = 3,
    ) -> Path:
        """Step 7: let rank 0 write a checkpoint, complete or not at all.

        Args:
            directory: where checkpoints live; a shared file system where there are several hosts.
            state: JSON values to find again; ``step`` is required, a count that grows
                from save to save (updates, or epochs): the newest checkpoint has the largest.
            keep: how many of the newest stay, besides the best.

        Raises:
            CheckpointError: on every rank, if rank 0 could not write.
        """

    @abstractmethod
    def average_metrics(self, count: float, **sums: float) -> tuple[dict[str, float], int]:
        """Step 8: average metrics over all samples of all ranks.

        Args:
            count: samples that this rank's sums are over; 0 is fine.
            sums: sums over them, by name, such as ``loss=`` and ``correct=``.

        Returns:
            The means by name, and the count over all ranks.
        """
