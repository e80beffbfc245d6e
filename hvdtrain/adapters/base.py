"""The eight steps from a script for one device to distributed training, as an interface.

This file is the table of contents of the project: one abstract method per step, in order. The
framework-free half is in ``steps/``, each framework's half in this package. Each docstring states
what holds on all ranks afterwards; all ranks must call every method, in the same order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from hvdtrain.steps.learning_rate import LearningRate
from hvdtrain.steps.sharding import Shards
from hvdtrain.steps.world import World

if TYPE_CHECKING:
    from hvdtrain.adapters.save import Save

JsonValues = dict[str, Any]
"""JSON values by name, as the ``state`` of a checkpoint has them."""


class Adapter(ABC):
    """The eight steps for one framework and one strategy, to be called in this order."""

    world: World

    @abstractmethod
    def initialize(self, *, short_steps: bool = False) -> World:
        """Step 1: connect to the other ranks.

        Afterwards all ranks share one ``World``. Environment variables that tune MPI and Horovod
        are set before either starts, unless the user has set them.

        Args:
            short_steps: whether a training step takes only a few milliseconds (MNIST), so that
                Horovod should poll more often.

        Raises:
            UsageError: on every rank, within seconds, if the number of processes started by the
                launcher differs from the number connected by the runtime.
        """

    @abstractmethod
    def pin_device(self) -> str:
        """Step 2: assign a separate device to each local rank; on a CPU, its share of the cores.

        Returns:
            A description of the device, e.g. ``cuda:0 (NVIDIA H100)`` or ``cpu, 4 threads``.

        Raises:
            UsageError: on every rank, if a host with GPUs has fewer than local ranks (unless
                sharing is allowed), or if only some ranks see a GPU.
        """

    @abstractmethod
    def shard_data(
        self, samples: int, *, global_batch: int, seed: int = 0, digest: str | bytes = ""
    ) -> Shards:
        """Step 3: select this rank's part of each global batch of ``range(samples)``.

        Iterate over ``.epoch(number)``; each ``Part`` has ``indices``, and all ranks take the same
        number of steps. See ``steps/sharding.py``.

        Gradients are weighted by the current part: the last one drawn from ``epoch``. If batches
        are read ahead, iterate over ``batches`` or compute ``with shards.step(part)``. Those of
        PyTorch also make the loader of a dataset, see ``adapters/pytorch/loader.py``.

        Args:
            samples: size of the dataset, equal on all ranks.
            global_batch: number of samples per step over all ranks.
            seed: seed of the order, equal on all ranks.
            digest: digest of the data, e.g. the SHA-256 of file names and labels in order. If
                provided (on all ranks), it is compared: ranks that have the same number of
                different samples would otherwise train unnoticed.

        Raises:
            UsageError: on every rank, naming the ranks whose digests differ.
        """

    @abstractmethod
    def scale_learning_rate(
        self, base: float, *, scaling: str = "linear", **schedule: Any
    ) -> LearningRate:
        """Step 4: create the learning-rate schedule, by epoch.

        Args:
            base: the learning rate for one rank.
            scaling: growth with the number of model replicas, which is the world size unless a
                strategy splits the model: ``linear``, ``sqrt`` or ``none``.
            schedule: ``epochs``, ``warmup_epochs``, ``schedule``, ``milestones``, ``decay`` of
                ``LearningRate``.
        """

    @abstractmethod
    def distribute_optimizer(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Step 5: make all further updates use the mean gradient over the *global* batch.

        The loss remains the mean over the rank's local part: gradients are weighted by the part's
        share of the global batch, so uneven parts are handled correctly. The part is
        ``shards.current`` of step 3; without shards all ranks have the same weight.

        With PyTorch the gradients are complete when ``backward()`` returns and can be clipped or
        inspected; several passes before a step accumulate, as in one process. With TensorFlow they
        are summed in ``optimizer.apply``. Every rank must make the same updates; several optimizers
        are distributed one at a time, in the same order on all ranks.

        Returns:
            The model to call from now on, and the optimizer, which keeps its type and methods.

        Raises:
            UsageError: not a model and an optimizer, or the optimizer is distributed already.
        """

    @abstractmethod
    def broadcast_state(self, model: Any, optimizer: Any = None) -> str:
        """Step 6: broadcast parameters, buffers and optimizer state of rank 0, bit for bit.

        The optimizer's options (learning rate, momentum etc.) are those of rank 0, as in step 5.

        Returns:
            The digest of the state, verified to be equal on all ranks.

        Raises:
            HvdtrainError: on every rank, naming the ranks whose state differs afterwards.
        """

    @overload
    def save_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        state: JsonValues,
        keep: int = 3,
        wait: Literal[True] = True,
    ) -> Path: ...

    @overload
    def save_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        state: JsonValues,
        keep: int = 3,
        wait: Literal[False],
    ) -> Save: ...

    @abstractmethod
    def save_checkpoint(
        self,
        directory: Path | str,
        model: Any,
        optimizer: Any,
        *,
        state: JsonValues,
        keep: int = 3,
        wait: bool = True,
    ) -> Path | Save:
        """Step 7: write a checkpoint atomically; all ranks call it.

        Rank 0 writes; with ``zero`` and ``fsdp`` every rank.

        Args:
            directory: directory of the checkpoints, in which rank 0 reads and writes; all ranks do
                with ``zero``, ``fsdp`` and if torchrun restarts ranks.
            model: model whose parameters and buffers are saved.
            optimizer: optimizer whose state is saved.
            state: JSON values to restore. ``step`` (int) is required and must grow from save to
                save, e.g. a count of updates or epochs. ``metrics``, numbers by name, and ``best``,
                a name and whether higher is better (``["accuracy", True]``), determine the best
                checkpoint; without metrics there is none. ``format``, ``digests``, ``world_size``,
                ``optimizer_options`` and ``path`` are set by hvdtrain.
            keep: number of recent checkpoints to keep, in addition to the best.
            wait: whether to wait for the disk. If not, the state is copied to host memory and
                written in the background; a previous save is waited for.

        Returns:
            The directory of the checkpoint, or without ``wait`` the ``Save``: on all ranks call its
            ``poll()`` after updates, and its ``result()`` before the program ends. A checkpoint
            that was not completed by one of them, or by the next save, is lost.

        Raises:
            CheckpointError: on every rank, if any rank could not write; without ``wait`` it is
                raised by ``Save.result``, or else by the next call, which then saves nothing.
            TrainingError: on every rank, if a tensor is not finite; as above without ``wait``.
            HvdtrainError: on every rank, if the replicas differ; as above without ``wait``.
            UsageError: on every rank, if ``state`` lacks ``step``, is not JSON, or has keys that
                are not text, or ``directory`` has the suffix of a file.
        """

    @abstractmethod
    def average_metrics(self, count: float, **sums: float) -> tuple[dict[str, float], int]:
        """Step 8: average metrics over all samples of all ranks.

        Args:
            count: number of samples in this rank's sums; may be 0.
            sums: sums over these samples by name, e.g. ``loss=`` and ``correct=``.

        Returns:
            The means by name, and the number of samples of all ranks.
        """
