"""Steps 4, 6, 7 and 8 for Keras: callbacks of ``model.fit``, the same on all ranks.

Each prepares its model (``model.py``): any Horovod script has at least
``BroadcastGlobalVariablesCallback``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.keras import data as shards
from hvdtrain.keras import session
from hvdtrain.keras.checkpoint import BackupAndRestore, BestModelCheckpoint, ModelCheckpoint
from hvdtrain.keras.data import Logs
from hvdtrain.keras.model import ModelCallback, first_sum, is_built, note_samples, step_sums
from hvdtrain.keras.optimizer import check_root
from hvdtrain.steps.checkpoint_files import Arrays

__all__ = [
    "BackupAndRestore",
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "ModelCheckpoint",
]

log = logging.getLogger(__name__)

NO_SUMS = (
    "MetricAverageCallback: the mean of the ranks' results, weighted by their samples, is reported "
    "for %s. If its state is a sum, derive it from a metric of Keras, e.g. keras.metrics.Mean"
)
REMEDY = (
    "Compile the model with hvd.DistributedOptimizer(...), and pass to fit, on every rank, "
    "hvd.callbacks.BroadcastGlobalVariablesCallback(0)"
)


class BroadcastGlobalVariablesCallback(ModelCallback):
    """Send rank 0's model and optimizer to all ranks before the first update, and verify them.

    After the first update and after each epoch all ranks compare their trained state: diverged
    replicas end the training, which would otherwise silently continue with N models.

    Args:
        root_rank: 0; others are refused.
        device: not used: the state is sent through host memory.
        local_variables: one variable or several that stay local to each rank. If there are any,
            the ranks differ, and nothing is compared.
    """

    def __init__(self, root_rank: int = 0, device: str = "", local_variables: Any = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        single = isinstance(local_variables, (tf.Variable, keras.Variable))
        self.local_variables = [local_variables] if single else list(local_variables or ())
        self._compared = False

    def register_local_var(self, var: Any) -> None:
        """Keep the value of ``var`` local to each rank."""
        self.local_variables.append(var)

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._compared = False
        reduction = first_sum(self.model)
        check_root(self.root_rank)
        if self.adapter.world.size == 1:
            return
        if is_built(self.model):
            self._broadcast()
        elif reduction is None:
            raise UsageError(
                "the model has no weights yet, so rank 0's cannot be sent: start it with "
                "keras.Input(shape), or call model.build(shape)"
            )
        else:  # in the first step, after the model is built
            reduction.before_first = self._broadcast

    def _broadcast(self) -> None:
        saved = [(variable, variable.numpy()) for variable in self.local_variables]
        optimizer = self.model.optimizer
        note_samples(first_sum(self.model))
        self.adapter.broadcast_state(self.model, optimizer)
        for reduction in step_sums(self.model):
            if reduction.optimizer is not optimizer:
                reduction.broadcast()
        for variable, value in saved:
            variable.assign(value)

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        if not self._compared and batch >= shards.left_out():
            self._compared = True
            self._compare("after the first update")

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        self._compare(f"after epoch {epoch + 1}")

    def _compare(self, when: str) -> None:
        if self.adapter.world.size > 1 and not self.local_variables:
            text = f"{when}: the ranks have made different updates. {REMEDY}"
            self.adapter.check_updates(self.model, self.model.optimizer, text)


class MetricAverageCallback(ModelCallback):
    """Compute the metrics of ``fit`` over all ranks, before any callback sees them.

    The state of each metric of Keras, or of a subclass of one, is summed over the ranks, then
    divided: uneven parts are weighted correctly. The state of another metric may be no sum: its
    result is the mean of those of the ranks, weighted by their samples. ``EarlyStopping``,
    ``ReduceLROnPlateau``, ``ModelCheckpoint`` and ``History`` see the same numbers on all ranks, in
    any order of the list. In a validation, the running statistics of BatchNorm are the mean over
    the ranks, weighted by samples seen.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        self._in_step = False
        self._starting = False  # a validation, whose metrics are not reset yet
        self._prefix = ""  # of the names in a validation
        self._counted: dict[str, object] = {}  # metrics over all ranks, of the epoch
        self._step_names: set[str] = set()  # names that the steps return
        self._noted = False
        self._statistics = ExitStack()

    def _begin(self) -> None:
        """Replace the metrics until the model resets them for something else, also after errors."""
        self._in_step = False
        if self.adapter.world.size > 1:
            self.model.train_step.seen.assign(0)
            self.model.get_metrics_result = self._over_all_ranks
            self.model.reset_metrics = self._reset_metrics

    def _end(self) -> None:
        if self.adapter.world.size > 1:
            self.model.test_step.together.assign(False)
        for name in ("get_metrics_result", "reset_metrics"):
            if name in vars(self.model):
                delattr(self.model, name)

    def _reset_metrics(self) -> None:
        if not self._starting:
            self._end()
        self._starting = False
        type(self.model).reset_metrics(self.model)

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._begin()

    @override
    def on_train_end(self, logs: Logs = None) -> None:
        self._end()

    @override
    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self._in_step = True

    @override
    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._in_step = False
        self._step_names |= set(logs or {})

    @override
    def on_test_begin(self, logs: Logs = None) -> None:
        self._begin()
        self._starting, self._prefix = True, "val_"
        reduction = first_sum(self.model)
        if self.adapter.world.size > 1 and reduction is not None:
            note_samples(reduction)
            self._statistics.enter_context(self.adapter.averaged_buffers(self.model))
            self.model.test_step.together.assign(self._same_batches())

    def _same_batches(self) -> bool:
        """Return whether all ranks have the same, known, number of batches in a validation."""
        of_fit = getattr(self.model, "_eval_epoch_iterator", None)
        mine = of_fit.num_batches if of_fit else self.params.get("steps")
        with self.adapter.waits.during("MetricAverageCallback"):
            numbers = set(self.adapter.communicator.gather_json(mine and int(mine)))
        return len(numbers) == 1 and None not in numbers

    on_test_batch_begin = on_train_batch_begin

    @override
    def on_test_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._in_step = False

    @override
    def on_test_end(self, logs: Logs = None) -> None:
        self._end()
        self._starting, self._prefix = False, ""
        self._statistics.close()
        self._step_names |= {f"val_{name}" for name in logs or {}}

    def _over_all_ranks(self) -> Mapping[str, object]:
        """Return the metrics of the model, over all ranks outside of a step."""
        if self._in_step or tf.inside_function():
            return type(self.model).get_metrics_result(self.model)
        return self.average()

    def average(self) -> Arrays:
        """Return the metrics of the model over all ranks; all ranks must call it."""
        compiled = self.model._compile_metrics
        metrics = [metric for metric in self.model.metrics if metric is not compiled]
        metrics += compiled.metrics if compiled else []
        others = [metric for metric in metrics if not _adds_up(metric)]
        if others and not self._noted and self.adapter.world.is_writer:
            log.warning(NO_SUMS, ", ".join(metric.name for metric in others))
        self._noted = True
        # This rank's results: numbers, arrays or dictionaries.
        results = [metric.result() for metric in others]
        seen = self.model.train_step.seen.numpy().astype(np.float64)
        variables = [v for metric in metrics if _adds_up(metric) for v in metric.variables]
        kept = [np.asarray(variable.numpy()) for variable in variables]
        arrays = {str(index): value for index, value in enumerate(kept)}
        for index, value in enumerate(tf.nest.flatten(results)):
            arrays[f"result {index}"] = np.asarray(value if seen else tf.zeros_like(value)) * seen
        with self.adapter.waits.during("MetricAverageCallback"):
            total = self.adapter.communicator.sum_arrays({**arrays, "seen": seen})
        for index, variable in enumerate(variables):
            variable.assign(total[str(index)].astype(kept[index].dtype))
        count = max(float(total["seen"]), 1.0)
        means = [value / count for name, value in total.items() if name.startswith("result")]
        for metric, mean in zip(others, tf.nest.pack_sequence_as(results, means), strict=True):
            vars(metric)["result"] = lambda mean=mean: mean
        logs = type(self.model).get_metrics_result(self.model)
        result = {name: np.asarray(value) for name, value in logs.items()}
        for metric in others:
            del vars(metric)["result"]
        for variable, value in zip(variables, kept, strict=True):
            variable.assign(value)
        self._counted |= {f"{self._prefix}{name}": value.tolist() for name, value in result.items()}
        return result

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        logs = {} if logs is None else logs
        if self.adapter.world.size == 1:
            return
        # Keras gives the local metrics of the last step if that returns others, too.
        logs.update({name: value for name, value in self._counted.items() if name in logs})
        # Those others: in a training weighted by the samples of the last batch.
        others = {name for name in self._step_names & set(logs) if name not in self._counted}
        reduction = first_sum(self.model)
        count = int(reduction.last.numpy()) if reduction else 1
        for weight, val in ((count, False), (1, True)):
            sums = {
                name: weight * float(logs[name]) if weight else 0.0
                for name in sorted(others)
                if name.startswith("val_") == val
            }
            if sums:
                logs.update(self.adapter.average_metrics(weight, **sums)[0])


def _adds_up(metric: Any) -> bool:
    """Return whether the state of ``metric`` is a sum: that of Keras's metrics, and their kin."""
    kinds = type(metric).__mro__[: type(metric).__mro__.index(keras.metrics.Metric)]
    return any(kind.__module__.startswith("keras.") for kind in kinds)


def set_learning_rate(optimizer: Any, new: float, *, correct: bool = True) -> None:
    """Set the learning rate; ``correct`` scales the velocity with it."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    old = float(optimizer.learning_rate)
    optimizer.learning_rate = np.asarray(new)  # see TFTask.update
    # Keras's velocity includes the learning rate. Scaling it once is equivalent to scaling the
    # momentum for one update. (The momentum itself is a constant of the traced function.)
    if correct and getattr(optimizer, "momentum", None) and old and new != old:
        for velocity in getattr(optimizer, "momentums", ()):
            velocity.assign(velocity.value * tf.constant(np.asarray(new / old), velocity.dtype))


class LearningRateScheduleCallback(ModelCallback):
    """Set the learning rate to ``initial_lr * multiplier(epoch)`` within a range of epochs.

    Args:
        initial_lr: the learning rate at the start of the training.
        multiplier: a function of the epoch; or a number to the power of the epochs since
            ``start_epoch``.
        start_epoch: first epoch of the range.
        end_epoch: first epoch after the range; None: no end.
        staircase: whether to set it once per epoch, by the multiplier of the whole epoch;
            otherwise before each batch, by that of ``epoch + batch / steps_per_epoch``.
        momentum_correction: whether to scale the velocity with the learning rate. Source: Goyal et
            al., "Accurate, Large Minibatch SGD" (2017), section 3.
        steps_per_epoch: number of batches per epoch; None: that of ``fit``.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise UsageError(f"{type(self).__name__} needs initial_lr, the learning rate to scale")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction = staircase, momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self._steps = steps_per_epoch  # of the current ``fit``
        self._epoch = 0
        self.multiplier: Callable[[float], float]
        if callable(multiplier):
            self.multiplier = multiplier
        else:
            self.multiplier = lambda epoch: multiplier ** (epoch - start_epoch)

    @override
    def on_train_begin(self, logs: Logs = None) -> None:
        self._steps = self.steps_per_epoch or self.params.get("steps")
        if not self.staircase and not self._steps:
            raise UsageError(
                f"{type(self).__name__}: the number of batches per epoch is unknown; specify "
                "steps_per_epoch"
            )

    @override
    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._epoch = epoch

    @override
    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        epoch, first = self._epoch, shards.left_out()
        if epoch < self.start_epoch or batch < first:
            return
        if self.end_epoch is not None and epoch >= self.end_epoch:
            return
        if not self.staircase:
            self._set(epoch + batch / (self._steps or 1))
        elif batch == first:
            self._set(epoch)

    def _set(self, epoch: float) -> None:
        new = self.initial_lr * self.multiplier(epoch)
        set_learning_rate(self.model.optimizer, new, correct=self.momentum_correction)

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = float(self.model.optimizer.learning_rate)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Increase the learning rate from ``initial_lr / size`` to ``initial_lr`` in the first epochs.

    Source: Goyal et al., "Accurate, Large Minibatch SGD" (2017), section 2.2.

    Args:
        initial_lr: the final learning rate, that of one rank times the world size.
        warmup_epochs: length of the warm-up, in epochs.
        momentum_correction: see ``LearningRateScheduleCallback``.
        steps_per_epoch: see ``LearningRateScheduleCallback``.
        verbose: 1: print a line at the end of the warm-up, on rank 0.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # Already the last batch of the warm-up has the final learning rate.
            done = (epoch + 1 / (self._steps or 1)) / warmup_epochs
            size = session.size()
            return (1 + done * (size - 1)) / size

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    @override
    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.verbose and epoch + 1 == self.end_epoch and self.adapter.world.rank == 0:
            rate = float(self.model.optimizer.learning_rate)
            print(f"\nEpoch {epoch + 1}: the warm-up has arrived at {rate:g}.")  # noqa: T201 (as Keras)
