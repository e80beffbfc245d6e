"""Step 5 for Keras: ``DistributedOptimizer``, and the sum of gradients weighted by samples.

The weight of a rank in a step is its share of the samples of the global batch, counted in that step
(``counted``, which ``model.py`` wraps around ``train_step``): so the means over the ranks'
batches become the mean over all samples, including uneven and empty batches. In a custom training
loop, in which samples are not counted, all ranks have the same weight.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from packaging.version import Version
from typing_extensions import override

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.adapters.tensorflow.buckets import (
    Buckets,
    GradientReduction,
    distribute,
    reduction_of,
)
from hvdtrain.errors import UsageError
from hvdtrain.keras import session

# In the order of their optimizers, the same on all ranks. Weak, so as not to keep a deleted
# optimizer and its variables.
_step_sums: list[weakref.ref[StepSum]] = []
_in_step = False  # whether a train step of ``fit`` is being traced or run


class StepSum(GradientReduction):
    """Sums the gradients of one optimizer over the ranks.

    Args:
        optimizer: the optimizer whose gradients are summed.
        name: name of its collectives, the same on all ranks.
        average: whether to average over all samples instead of summing over the ranks.
        factor: factor of the gradients, the same on all ranks.
        predivide: divisor before the sum, and factor after it.
        compression: Horovod's compression of the messages; None: no compression.
        device: device of the sums.
    """

    def __init__(
        self,
        optimizer: Any,
        name: str,
        *,
        average: bool = True,
        factor: float = 1.0,
        predivide: float = 1.0,
        compression: Any = None,
        device: str = "",
    ) -> None:
        self.optimizer, self.name = optimizer, name
        self.average, self.factor, self.predivide = average, factor, predivide
        self.compression, self.device = compression, device
        self.before_first: Callable[[], None] | None = None
        with tf.device("/CPU:0"):
            self.buckets = Buckets(name, self._reduce, session.adapter)
            self.samples = tf.Variable(0, dtype=tf.int64, trainable=False, name="samples")
            self.last = tf.Variable(0, dtype=tf.int64, trainable=False, name="last_samples")
            # Whether this rank's callbacks want to stop, and whether those of any rank do.
            self.stop = tf.Variable([0.0, 0.0], dtype=tf.float64, trainable=False, name="stop")
            self.nothing = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="nothing")
        self.weight: Any = None  # of this rank in the current step; None: not in a step of ``fit``

    @property
    def adapter(self) -> CommonAdapter:
        """The adapter of the ranks."""
        return session.adapter()

    @override
    def sum(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self._begin(variables)
        # A variable without a gradient here has none on any rank, and is skipped as in one process.
        shared = [index for index, gradient in enumerate(gradients) if gradient is not None]
        result: list[Any] = [None] * len(gradients)
        if not shared:
            return result
        weight = self.weight
        if weight is None:
            if _in_step:
                raise UsageError(
                    "train_step: assign each DistributedOptimizer to an attribute of the model, or "
                    "of one of its layers: their gradients are weighted by the samples of the batch"
                )
            weight = self._fixed_weight()
        totals = self.buckets.sum(
            [gradients[index] for index in shared],
            [variables[index] for index in shared],
            weight=weight / self.predivide,
        )
        factor = self.factor * self.predivide
        for index, total in zip(shared, totals, strict=True):
            result[index] = total if factor == 1 else total * factor
        with tf.control_dependencies(totals):
            self.nothing.assign(0.0)
        return result

    def _fixed_weight(self) -> float:
        return 1.0 / self.adapter.world.size if self.average else 1.0

    def _reduce(self, flat: Any, name: str) -> Any:
        sum_tensor = self.adapter.strategy.sum_tensor
        with tf.device(self.device) if self.device else nullcontext():
            if self.compression is None:
                return sum_tensor(flat, name)
            small, context = self.compression.compress(flat)
            return self.compression.decompress(sum_tensor(small, name), context)

    def exchange(self, numbers: Any, name: str) -> Any:
        """Return the sums of a vector of ``numbers`` over the ranks, in full precision."""
        if self.buckets.traced_calls not in (traced := self.adapter.waits.traced):
            traced.append(self.buckets.traced_calls)
        # It depends on the previous messages of this name, so that no two overlap, and on a
        # variable, so that TensorFlow does not treat it as a constant.
        sum_tensor = self.adapter.strategy.sum_tensor
        total = self.buckets.exchange(numbers + self.nothing, name, sum_tensor)
        with tf.control_dependencies([total]):
            self.nothing.assign(0.0)
        return total

    def begin(self) -> None:
        """Run the deferred action before the first update, outside of the current trace."""
        begin, self.before_first = self.before_first, None
        if begin is not None:
            with tf.init_scope():
                begin()

    def _begin(self, variables: Sequence[Any]) -> None:
        """Build the optimizer, and run the deferred action, before the first update."""
        if self.before_first is not None:
            with tf.init_scope():
                if not self.optimizer.built:
                    self.optimizer.build(list(variables))
            self.begin()

    def broadcast(self) -> None:
        """Send the trained variables and the optimizer state from rank 0, once built."""
        if not self.optimizer.built:
            self.before_first = self.broadcast
            return
        everything = [*self.optimizer._trainable_variables, *self.optimizer.variables]
        broadcast_variables(everything, self.adapter)


@contextmanager
def counted(reductions: Sequence[StepSum], count: Any) -> Iterator[Any]:
    """Weight sums of ``reductions`` within the block by ``count``, a tensor: this rank's samples.

    Yields its share of the samples of all ranks. Sums of other optimizers are refused.
    """
    global _in_step
    share: Any = 1.0
    for reduction in reductions:
        reduction.last.assign(tf.cast(count, tf.int64))
        reduction.samples.assign_add(reduction.last)
    if reductions:
        # It depends on the previous updates of all optimizers.
        mine = tf.add_n([tf.cast(count, tf.float64), *(each.nothing for each in reductions)])
        first, wanted = reductions[0], reductions[0].stop[0]
        total = first.exchange(tf.stack([mine, wanted]), "samples")
        share = tf.math.divide_no_nan(mine, total[0])
        first.stop.assign(tf.stack([wanted, total[1]]))
    _in_step = True
    try:
        for reduction in reductions:
            reduction.weight = share if reduction.average else tf.cast(count > 0, tf.float64)
        yield share
    finally:
        _in_step = False
        for reduction in reductions:
            reduction.weight = None


def broadcast_variables(variables: Sequence[Any], adapter: CommonAdapter) -> None:
    """Assign the values of rank 0; the order must be the same on all ranks."""
    communicator = adapter.communicator
    mine = {str(index): np.asarray(variable.numpy()) for index, variable in enumerate(variables)}
    for index, value in communicator.broadcast_arrays(mine).items():
        variables[int(index)].assign(value)


def broadcast_global_variables(root_rank: int = 0) -> None:
    """Send the trained variables and the state of each distributed optimizer from rank 0 to all.

    TensorFlow 2 has no list of all variables. If a model is not built yet, they are sent just
    before its first update. ``callbacks.BroadcastGlobalVariablesCallback`` sends the whole model.
    """
    check_root(root_rank)
    adapter = session.adapter()
    step_sums = [reference() for reference in _step_sums]
    # A deleted optimizer may still exist on some ranks.
    ranks = adapter.communicator.gather_json([known is not None for known in step_sums])
    for step_sum, *known in zip(step_sums, *ranks, strict=True):
        if step_sum is not None and all(known) and adapter.world.size > 1:
            step_sum.broadcast()


def check_root(root_rank: int) -> None:
    """Raise ``UsageError`` if ``root_rank`` is not 0."""
    if root_rank:
        raise UsageError(f"root_rank is {root_rank}: only rank 0 can send its state")


def DistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    backward_passes_per_step: int = 1,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: Any = None,
    process_set: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Make updates of ``optimizer`` use the gradients of all ranks.

    It is changed in place: it keeps its type, state and configuration, and is saved as a plain
    optimizer. Gradients are summed in a few large buckets, sparse ones as dense ones, so
    ``groups``, ``num_groups``, ``device_sparse``, ``sparse_as_dense`` and ``scale_local_gradients``
    have no effect.

    Args:
        optimizer: an optimizer of Keras 3, built or not, also a ``LossScaleOptimizer``.
        name: name of its collectives, the same on all ranks.
        device_dense: device of the sums, e.g. ``/CPU:0``.
        device_sparse: see above.
        compression: ``Compression.fp16`` rounds the messages to half their size.
        sparse_as_dense: see above.
        gradient_predivide_factor: divisor before the sum, and factor after it.
        op: ``Average`` (default) over all samples of the global batch; or ``Sum`` over the ranks,
            for a loss that is a sum.
        backward_passes_per_step: number of batches per update, which uses the sum of their
            gradients. These are summed over the ranks batch by batch, which is exact.
        average_aggregated_gradients: whether to use their mean instead.
        num_groups: see above.
        groups: see above.
        process_set: None, or that of all ranks; others are refused.
        scale_local_gradients: see above.

    Returns:
        The optimizer.

    Raises:
        UsageError: no optimizer of Keras 3, or distributed already; an unsupported value.
    """
    _check(optimizer, process_set)
    reduction = StepSum(
        optimizer,
        name or f"gradients.{len(_step_sums)}",  # the same on all ranks
        average=_is_average(op),
        factor=_accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients),
        predivide=gradient_predivide_factor,
        compression=compression,
        device=device_dense,
    )
    _step_sums.append(weakref.ref(reduction))
    distribute(optimizer, reduction)
    return optimizer


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = None,
    legacy_opts: bool = False,
    process_set: Any = None,
) -> Any:
    """Load a compiled model, and distribute its optimizer, which keeps its state.

    The ``custom_optimizers`` are classes other than Keras's, the ``custom_objects`` other classes
    and functions by name; for the others see ``DistributedOptimizer``.

    The file contains a plain optimizer: ``keras.models.load_model`` loads it undistributed.

    Raises:
        UsageError: ``legacy_opts``, which Keras 3 does not have; the model has no optimizer; this
            Keras may execute code in the file.
    """
    if legacy_opts:
        raise UsageError("load_model: Keras 3 has no legacy optimizers; omit legacy_opts")
    if Version(keras.__version__) < Version("3.11.3"):
        raise UsageError(
            f"load_model {filepath}: Keras {keras.__version__} may execute code in it "
            "(CVE-2025-1550, CVE-2025-9905): pip install 'keras>=3.11.3'"
        )
    classes = {kind.__name__: kind for kind in custom_optimizers or ()}
    model = keras.models.load_model(
        filepath, custom_objects={**classes, **(custom_objects or {})}, safe_mode=True
    )
    if getattr(model, "optimizer", None) is None:
        raise UsageError(f"load_model: {filepath} was saved without an optimizer; compile it first")
    DistributedOptimizer(model.optimizer, compression=compression, process_set=process_set)
    return model


def _check(optimizer: Any, process_set: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer).__name__
        raise UsageError(f"DistributedOptimizer takes an optimizer of Keras 3, not a {kind}")
    if isinstance(optimizer, getattr(keras.optimizers, "MultiOptimizer", ())):
        raise UsageError(
            "DistributedOptimizer does not support a MultiOptimizer: use one optimizer for all "
            "layers, or several distributed ones in a train_step of the model"
        )
    inner = getattr(optimizer, "inner_optimizer", None)
    if reduction_of(optimizer) or (inner is not None and reduction_of(inner)):
        raise UsageError("DistributedOptimizer: this optimizer is distributed already")
    session.adapter()  # raises before init
    session.check_process_set(process_set)


def _is_average(op: Any) -> bool:
    """Return whether Horovod's ``op`` is the mean, not the sum; others are refused."""
    if op is None:
        return True
    from horovod.tensorflow import Average, Sum

    if op not in (Average, Sum):
        raise UsageError("op: choose Average or Sum; others are not supported with Keras")
    return bool(op == Average)


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Make the optimizer update every ``passes`` batches; return the factor from mean to sum."""
    if passes == 1:
        return 1.0
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if passes < 1 or inner.built or inner.gradient_accumulation_steps:
        raise UsageError(
            f"backward_passes_per_step is {passes}: it must be 1 or more, for an optimizer that is "
            "not built yet and has no gradient_accumulation_steps"
        )
    inner.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)
