"""A task: model, data, loss and metrics, which a class per framework trains; and its workload.

The update itself is in ``training_step_FRAMEWORK.py``: passes, clipping, learning rate, optimizer.
"""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.tasks.augmented import augmented
from hvdtrain.tasks.columns import CLASSES, Columns
from hvdtrain.tasks.dataset import Batch, Dataset
from hvdtrain.tasks.metrics import Accuracy, Consumer, Metric, ReadOutput

Losses = Callable[[Any, Any], Any]
"""(output, y) -> the loss of each sample, shape (n,), or two such tensors: sums of losses, and of
their weights or number, e.g. of its tokens. The loss of a batch is then their quotient."""


@dataclass(frozen=True)
class NotFinite:
    """Reason for which no rank has made an update: the global gradients are not finite."""

    parameter: str  # the first one whose gradient is not finite; the same on all ranks
    local: str  # cause on this rank, e.g. ``its loss is nan``; empty: unknown


@dataclass(frozen=True)
class LossScale:
    """The factor of the loss in fp16, which keeps small gradients from becoming zero.

    An update whose scaled gradients overflow is skipped, on all ranks, and the scale is halved.
    """

    scale: float
    updates: int  # number of updates since it changed


class Task(ABC):
    """Any network, trained on the mean of a loss, by default a classifier; for one process.

    A subclass is a framework. It makes the passes and the update, in its tensors; all else is here.

    Args:
        model: network of the framework's class, e.g. for images of shape (n, channels, height,
            width) in PyTorch, (n, height, width, channels) in TensorFlow. A Keras model is built,
            its weights are of ``weight_dtype(options)``.
        options: options of the trainer, with every default filled in.
        train: samples to train on.
        test: samples to evaluate on; None: no evaluation.
        scale: factor and offset from stored pixels to the network's input; numbers, or one per
            channel: in PyTorch a tensor of shape (channels, 1, 1). None: integers of 32 and 64
            bits, such as token ids, stay as they are, and other samples become floats.
        losses: function of the network's output and ``y`` that returns the loss of each sample,
            shape (n,); TensorFlow traces it. Or ``(losses, weights)``, both of this shape, for a
            loss that is a mean over something else than samples: the sum of the losses of all
            samples of a global batch, or of the test set, is divided by that of their weights.
            Default: the framework's ``cross_entropy``.
        metrics: metrics of an evaluation, in addition to the loss; the first determines the best
            checkpoint. Default: accuracy with the default ``losses``, otherwise none.
        columns: columns of the file of ``--predict``; default: class and probability.
        channels_last: whether images and convolutions of PyTorch have this memory format, which is
            faster for images of several channels; the network must use ``reshape`` instead of
            ``view``. Those of TensorFlow always have it.

    Attributes:
        optimizer: the optimizer, of the framework's class.
        notes: lines to show before the training.
        decoder: library that decodes the images; empty: the framework does, or there are none.
        speed_only: for a benchmark on random samples, the first of ``notes``, with ``{updates}``;
            empty: a training.
        collective_passes: whether other ranks wait in this rank's forward and backward passes.
        leave_out: function that begins (True) or ends (False) passes of a stand-in, whose samples
            are left out of the running statistics.
        no_sync: context in which a backward pass of PyTorch accumulates gradients locally; the
            next one outside of it sums them over the ranks.
        start_sum: function that starts to sum a tensor over the ranks, and returns one that
            returns the sum.
        batch_weight: sum of the weights of the last ``update``'s batch, a scalar tensor; None: each
            sample weighs 1.
        sum_shards: function that sums a tensor of results for this process's shard of parameters
            or gradients; if they are not sharded, it returns the tensor.
        share_weights: function that sends the weights that only this process has updated to the
            others, which have them, too.
        not_finite: reason for which the last ``update`` was not made; None: made or ``deferred``.
        may_defer: whether an update with gradients that are not finite may be reported later,
            which saves a synchronization with the device.
    """

    optimizer: Any
    notes: tuple[str, ...] = ()
    decoder = ""
    speed_only = ""
    collective_passes = False
    leave_out: Callable[[bool], None] = staticmethod(lambda stand_in: None)
    no_sync: Callable[[], AbstractContextManager[None]] = staticmethod(nullcontext)
    start_sum: Callable[[Any], Callable[[], Any]] = staticmethod(lambda values: lambda: values)
    batch_weight: Any = None
    sum_shards: Callable[[Any], Any] = staticmethod(lambda values: values)
    share_weights: Callable[[], None] = staticmethod(lambda: None)
    not_finite: NotFinite | None = None
    may_defer = False

    default_losses: Callable[..., Any]
    """The framework's ``cross_entropy``: (logits, classes, smoothing=0.0) -> losses."""
    _erased: Callable[[Any, Any], Any]
    """(images, edges in pixels) -> the images, a part of each set to 0; perhaps in place."""
    _mixed: Callable[[Any, Any, Any], Any]
    """(first, second, shares of the first) -> the weighted sum of each pair."""

    def __init__(
        self,
        model: Any,
        options: Options,
        train: Dataset,
        test: Dataset | None,
        scale: tuple[Any, Any] | None = None,
        *,
        losses: Losses | None = None,
        metrics: Sequence[Metric] | None = None,
        columns: Columns = CLASSES,
        channels_last: bool = False,
    ) -> None:
        classifies = losses is None or losses is self.default_losses
        self.model, self.options, self.columns = model, options, columns
        self.losses = self._training_losses = losses or self.default_losses
        if options.label_smoothing:
            smoothing = options.label_smoothing
            self._training_losses = functools.partial(self.default_losses, smoothing=smoothing)
        default = (Accuracy(),) if classifies else ()
        self.metrics: Sequence[Metric] = default if metrics is None else metrics
        self.train, self.test = augmented(train, options, classifies=classifies), test
        self._prepare(scale, channels_last=channels_last)

    # Implemented by a framework

    @abstractmethod
    def _prepare(self, scale: tuple[Any, Any] | None, *, channels_last: bool) -> None:
        """Move the model to its device, and make the optimizer."""

    @abstractmethod
    def update(self, batch: Batch, *, learning_rate: float, seed: int) -> Any:
        """Make one training step: forward, backward, optimizer.

        Args:
            batch: samples to train on, or a stand-in: all passes and the step are made with it.
            learning_rate: learning rate of this step.
            seed: seed of the dropout in this step.

        Returns:
            The mean loss over the batch, a scalar tensor (0 for a stand-in), asynchronous; see also
            ``batch_weight``.

        If the gradients are not finite, ``not_finite`` is set on every rank, and no rank has
        changed its weights or running statistics. (Loss scaling, of fp16, instead skips such steps
        and reduces the scale.)
        """

    @abstractmethod
    def _input(self, pixels: Any) -> Any:
        """Return the network's input, from stored samples."""

    @abstractmethod
    def _output(self, x: Any) -> Any:
        """Return the network's output in training, in the precision of the weights."""

    @abstractmethod
    def _check(self, losses: Any, y: Any) -> None:
        """Raise ``UsageError`` if ``losses`` are not one per sample of ``y``."""

    @abstractmethod
    def _evaluated(self, batch: Batch) -> tuple[float, float, ReadOutput]:
        """Return the sums of the losses and weights of a batch, and its ``ReadOutput``."""

    @abstractmethod
    def _set_weights(self, values: list[Any] | None = None) -> list[Any]:
        """Set the weights that have a moving average to it, or to ``values``; return the former."""

    @abstractmethod
    def parameter_norm(self) -> float:
        """Return the L2 norm over all trainable parameters, summed in float64."""

    @abstractmethod
    def loss_values(self, losses: list[Any]) -> list[float]:
        """Return results of ``update`` as numbers; synchronizes with the device."""

    def compile(self) -> None:
        """Compile the model to kernels, which the framework does when it first runs."""
        raise UsageError("--compile: this task has nothing to compile; omit it")

    @property
    def deferred(self) -> bool:
        """Whether skipped updates are reported by ``skipped_updates``, not ``not_finite``."""
        return False

    def skipped_updates(self) -> int:
        """Return how many of the latest updates were skipped; synchronizes with the device.

        These are the first one since the last call whose gradients are not finite, and all after
        it. Weights, optimizer state and running statistics are those before it.
        """
        raise NotImplementedError(f"{type(self).__name__} defers nothing")

    @property
    def loss_scale(self) -> LossScale | None:
        """The loss scale, the same on all ranks; None: the loss is not scaled."""
        return None

    def restore_loss_scale(self, saved: LossScale) -> None:  # noqa: B027 (Keras saves it)
        """Continue with the ``loss_scale`` of a checkpoint, unless the optimizer's state has it."""

    # The same in all frameworks

    @property
    def best(self) -> tuple[str, bool]:
        """Name of the value that determines the best checkpoint, and whether higher is better."""
        first = next(iter(self.metrics), None)
        return (first.names[0], first.higher_is_better) if first else ("loss", False)

    def _losses(self, losses: Losses, output: Any, y: Any) -> tuple[Any, Any]:
        """Return loss and weight of each sample; None: each weighs 1."""
        result = losses(output, y)
        each, weights = result if isinstance(result, tuple) else (result, None)
        self._check(each, y)
        if weights is not None:
            self._check(weights, y)
        return each, weights

    def _forward(self, batch: Batch) -> tuple[Any, Any]:
        """Make the forward pass of a training batch; return as ``_losses`` does.

        The loss of a mixture of two samples is linear in their labels.
        """
        x = self._input(batch.x)
        if batch.boxes is not None:
            x = self._erased(x, batch.boxes)
        losses = self._training_losses
        if batch.shares is None:
            return self._losses(losses, self._output(x), batch.y)
        output = self._output(self._mixed(x[:-1], x[1:], batch.shares))
        # Of a classifier, whose losses have no weights.
        first, second = (self._losses(losses, output, y)[0] for y in (batch.y[:-1], batch.y[1:]))
        return self._mixed(first, second, batch.shares), None

    def evaluate(self, batch: Batch, metrics: Sequence[Consumer]) -> tuple[float, float]:
        """Update ``metrics`` with the batch; return the sums of its losses and their weights."""
        loss, weight, read = self._evaluated(batch)
        if metrics:  # the output may be large
            output, labels = read()
            for metric in metrics:
                metric.update(Batch(batch.x, labels), output)
        return loss, weight

    @contextmanager
    def averaged_weights(self) -> Iterator[None]:
        """Replace the weights by their moving average within the block, if the options ask for one.

        All ranks must call it together. After an error the weights are not shared: the other ranks
        may still be computing.
        """
        if not self.options.ema:
            yield
            return
        before = self._set_weights()
        self.share_weights()
        try:
            yield
        except BaseException:
            self._set_weights(before)
            raise
        self._set_weights(before)
        self.share_weights()


@dataclass(frozen=True)
class LearningRates:
    """The default learning rate of a workload, by optimizer: Adam's step is scale-invariant.

    Its string is used in the help.
    """

    sgd: float
    adam: float
    adamw: float
    lars: float
    lamb: float

    def of(self, optimizer: str) -> float:
        """Return the learning rate for a value of ``--optimizer``."""
        return float(getattr(self, optimizer))

    def __str__(self) -> str:
        """Return e.g. ``0.03 for sgd, 0.001 for adam and adamw``."""
        by_rate: dict[float, list[str]] = {}
        for name, rate in dataclasses.asdict(self).items():
            by_rate.setdefault(rate, []).append(name)
        return ", ".join(f"{rate:g} for {' and '.join(names)}" for rate, names in by_rate.items())


@dataclass(frozen=True)
class Recipe:
    """The defaults of a workload, measured to keep its accuracy at any number of ranks."""

    batch_size: int  # samples per rank and step
    lr: LearningRates  # for one rank, or for ``lr_base_batch``; lars, lamb: for ``batch_size``
    epochs: int
    warmup_epochs: float
    lr_schedule: str  # after the warm-up
    weight_decay: float  # L2 penalty
    # Global batch for which ``lr`` holds, and scales; None: it scales with the number of ranks.
    lr_base_batch: int | None = None
    lr_milestones: tuple[float, ...] = ()  # of the schedule ``multistep``, in epochs


@dataclass(frozen=True)
class Workload:
    """A workload of the trainer: recipe, options and task."""

    name: str  # as in ``python -m hvdtrain.NAME``
    description: str  # for the help
    epilog: str  # end of the help: models, data, defaults, examples
    models: tuple[str, ...]  # the default first; empty: the task interprets ``--model``
    recipe: Callable[[Any], Recipe]  # the defaults, by the options
    build: Callable[[Any], Task]  # the task, by the options with every default filled in
    # Whether steps of a model take milliseconds: Horovod should poll more often.
    short_steps: Callable[[str], bool] = lambda model: False
    # Whether a model was measured to be faster in bf16 on devices that support it.
    prefers_bf16: Callable[[str], bool] = lambda model: False
    random_without_data: bool = False  # samples are random without ``--data``
    options: type[Options] = Options  # and those that the workload adds
    unit: str = "images"  # noun of its samples, in the plural
    program: str = ""  # as in ``python -m hvdtrain.PROGRAM``; empty: the name
    digest: str = ""  # of the user's file that defines it; empty: no such file
