"""What the trainer asks of a task; one class per framework fulfils it for every workload."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.workloads.columns import CLASSES, Columns
from hvdtrain.workloads.data.dataset import Batch, Dataset
from hvdtrain.workloads.metrics import Consumer, Metric


@dataclass(frozen=True)
class NotFinite:
    """Why no rank has made an update: the gradients of the global batch are not finite.

    Attributes:
        parameter: the first one whose gradient is not finite; the same on all ranks.
        own: what this rank has contributed, such as ``its loss is nan``; empty: nothing known.
    """

    parameter: str
    own: str


class Task(ABC):
    """A model with its data, optimizer and loss; everything that happens in one process.

    Attributes:
        model: the network, in its framework's own class.
        optimizer: likewise.
        train: samples to train on.
        test: samples to evaluate on; None where there are none.
        options: what it was built with, every default filled in.
        metrics: of an evaluation, besides the loss; by the first the best checkpoint is kept.
        columns: what ``--predict`` writes of each sample.
        notes: lines that a user should see before the training.
        speed_alone: the first of them where the samples are random and nothing is learned, with
            ``{updates}`` in it: epochs and losses would mean nothing. Empty: it trains.
        needs_empty_forward: an empty batch takes the forward and backward pass too, because the
            other ranks wait in it.
        no_sync: within it a backward pass of PyTorch adds to this process's gradients alone; the
            next one outside of it sums them over the ranks.
        sum_shards: sums a tensor of what this process found in its part of the parameters or their
            gradients; where it has all of them, as alone, it returns the tensor.
        not_finite: why the last ``update`` changed nothing; None: it did, or it is ``deferred``.
        may_defer: an update whose gradients are not finite need not be told of at once, since the
            host would wait for the device.
    """

    model: Any
    optimizer: Any
    train: Dataset
    test: Dataset | None = None
    options: Options
    metrics: Sequence[Metric] = ()
    columns: Columns = CLASSES
    notes: tuple[str, ...] = ()
    speed_alone = ""
    needs_empty_forward = False
    no_sync: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    sum_shards: Callable[[Any], Any] = staticmethod(lambda values: values)
    not_finite: NotFinite | None = None
    may_defer = False

    @property
    def best(self) -> tuple[str, bool]:
        """What the best checkpoint is chosen by, and whether higher is better."""
        first = next(iter(self.metrics), None)
        return (first.names[0], first.higher_is_better) if first else ("loss", False)

    def compile(self) -> None:
        """Let the framework make kernels for the model; it does so when it first runs."""
        raise UsageError("--compile: this task has nothing to compile; leave it out")

    @property
    def deferred(self) -> bool:
        """Whether ``updates_left_out`` tells of an update that was not made, not ``not_finite``."""
        return False

    @abstractmethod
    def update(self, batch: Batch, *, learning_rate: float, seed: int) -> Any:
        """Take one training step: forward, backward, optimizer.

        Args:
            batch: what to train on; may be empty, and the optimizer takes its step all the same.
            learning_rate: of this step.
            seed: of the dropout in this step.

        Returns:
            The mean loss over the batch, a scalar tensor (0 for an empty batch); not waited for.

        Where the gradients are not finite, ``not_finite`` tells so on every rank, and none has
        changed its weights. (Loss scaling, of fp16, has its own way: it leaves such steps out and
        scales by less.)
        """

    def updates_left_out(self) -> int:
        """Return how many of the last updates were not made; waits for the device.

        These are the first since the last call whose gradients are not finite, and all after it.
        Weights, optimizer state and running statistics are those of before it.
        """
        raise NotImplementedError(f"{type(self).__name__} defers nothing")

    @abstractmethod
    def evaluate(self, batch: Batch, metrics: Sequence[Consumer]) -> float:
        """Update ``metrics`` with the batch; return the sum of its losses."""

    @abstractmethod
    def parameter_norm(self) -> float:
        """Return the L2 norm over all trainable parameters, summed in float64."""

    @abstractmethod
    def loss_values(self, losses: list[Any]) -> list[float]:
        """Return as numbers what ``update`` returned; waits for the device."""


@dataclass(frozen=True)
class LearningRates:
    """The default learning rate of a workload, by optimizer: Adam's step has no size of gradients.

    As text it is what the help says of it.
    """

    sgd: float
    adam: float
    adamw: float

    def of(self, optimizer: str) -> float:
        """Return that of the optimizer that ``--optimizer`` names."""
        return float(getattr(self, optimizer))

    def __str__(self) -> str:
        """Return such as ``0.03 for sgd, 0.001 for adam and adamw``."""
        by_rate: dict[float, list[str]] = {}
        for name, rate in dataclasses.asdict(self).items():
            by_rate.setdefault(rate, []).append(name)
        return ", ".join(f"{rate:g} for {' and '.join(names)}" for rate, names in by_rate.items())


@dataclass(frozen=True)
class Recipe:
    """The defaults of a workload, measured to keep its accuracy at any number of ranks.

    Attributes:
        batch_size: samples per rank and step.
        lr: learning rates for one rank, or for ``lr_batch``.
        epochs: length of the training.
        warmup_epochs: length of the warm-up, in epochs.
        lr_schedule: what follows it; ``lr_milestones``: of ``multistep``, in epochs.
        weight_decay: L2 penalty.
        lr_batch: the global batch that ``lr`` is for, in proportion to which it grows; None: it
            grows with the ranks.
    """

    batch_size: int
    lr: LearningRates
    epochs: int
    warmup_epochs: float
    lr_schedule: str
    weight_decay: float
    lr_batch: int | None = None
    lr_milestones: tuple[float, ...] = ()


@dataclass(frozen=True)
class Workload:
    """A trainer's subject.

    Attributes:
        name: as in ``python -m hvdtrain.NAME``.
        description: what it does, for the help.
        epilog: the end of the help: models, data, defaults, examples.
        models: names of its networks, the default first; none: ``--model`` is its own affair.
        recipe: its defaults, given the options.
        build: makes the task, given the options with every default filled in.
        options: ``Options`` and what the workload adds to them.
        unit: what its samples are, in the plural.
        program: as in ``python -m hvdtrain.PROGRAM``, where that is not the name.
        digest: of the file that defines it, where that is the user's.
        short_steps: steps take milliseconds, so Horovod should look for work more often.
        prefers_bf16: measured to be faster in bf16 where the device has it.
        default_steps: updates where the data has no end (synthetic); None: all epochs.
    """

    name: str
    description: str
    epilog: str
    models: tuple[str, ...]
    recipe: Callable[[Any], Recipe]
    build: Callable[[Any], Task]
    short_steps: Callable[[str], bool] = lambda model: False
    prefers_bf16: Callable[[str], bool] = lambda model: False
    default_steps: Callable[[Any], int | None] = lambda options: None
    options: type[Options] = Options
    unit: str = "images"
    program: str = ""
    digest: str = ""
