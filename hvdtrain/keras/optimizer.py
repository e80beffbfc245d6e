"""Step 5 for Keras: ``DistributedOptimizer``, and the sum of gradients weighted by samples.

The weight of a rank in a step is its share of the samples of the global batch, as the ranks count
them in that step (``StepSum.step``, which ``model.py`` wraps around ``train_step``): so the mean
over each rank's own batch becomes the mean over all samples, batches of other sizes and empty ones
included. In a loop of the user's own, where nobody counts, all ranks weigh the same.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.adapters.common import CommonAdapter
from hvdtrain.adapters.tensorflow.buckets import Buckets
from hvdtrain.adapters.tensorflow.distributed import Reduction, distribute, reduction_of
from hvdtrain.errors import UsageError
from hvdtrain.keras import session
from hvdtrain.system.runtime.waits import SUM

_made: list[StepSum] = []  # in the order of their optimizers, the same on all ranks of a set


class StepSum(Reduction):
    """Sums the gradients of one optimizer over the ranks that train together.

    Args:
        optimizer: whose gradients.
        name: of its collectives, the same on all ranks.
        average: the mean over all samples, not the sum of what the ranks bring.
        factor: of the gradients, the same on all ranks.
        predivide: what they are divided by before the sum, and multiplied by after it.
        compression: Horovod's, for the way between the ranks; None: none.
        device: where they are summed.
        local: variables that each rank updates by its own gradients.
        local_factor: of those gradients.
        process_set: whose ranks bring gradients; None: all.
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
        local: Collection[Any] = (),
        local_factor: float = 1.0,
        process_set: Any = None,
    ) -> None:
        self.optimizer, self.name, self.process_set = optimizer, name, process_set
        self.average, self.factor, self.predivide = average, factor, predivide
        self.compression, self.device = compression, device
        self.local, self.local_factor = {id(variable) for variable in local}, local_factor
        self.before_first: Callable[[], None] | None = None
        with tf.device("/CPU:0"):
            self.buckets = Buckets(name, self._reduce)
            self.samples = tf.Variable(0, dtype=tf.int64, trainable=False, name="samples")
            self._nothing = tf.Variable(0.0, dtype=tf.float64, trainable=False, name="nothing")
        self._weight: Any = None  # of this rank in the step at hand

    @property
    def adapter(self) -> CommonAdapter:
        """The adapter of the ranks that train together."""
        return session.adapter(self.process_set)

    @contextmanager
    def step(self, count: Any) -> Iterator[None]:
        """Count what is summed within as of ``count`` samples of this rank, a tensor."""
        self.samples.assign_add(tf.cast(count, tf.int64))
        if self.average:
            # It depends on the update before, so that no two of them are under way at once, and on
            # a variable, so that TensorFlow does not take it for a constant.
            mine = tf.cast(count, tf.float64) + self._nothing
            total = self.adapter.sum_tensor(mine[None], f"{self.name}.samples")[0]
            self._weight = tf.math.divide_no_nan(mine, total)
        try:
            yield
        finally:
            self._weight = None

    @override
    def sum(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        self._begin(variables)
        # What has no gradient here has none on any rank, and is left alone as in one process.
        shared = [
            index
            for index, (gradient, variable) in enumerate(zip(gradients, variables, strict=True))
            if gradient is not None and id(variable) not in self.local
        ]
        result = [self._own(*pair) for pair in zip(gradients, variables, strict=True)]
        if not shared:
            return result
        weight = self._weight if self._weight is not None else self._fixed_weight()
        waits = self.adapter.waits
        # A trace, which is made once, tells nothing of the updates.
        with waits.during(SUM) if tf.executing_eagerly() else nullcontext():
            totals = self.buckets.sum(
                [gradients[index] for index in shared],
                [variables[index] for index in shared],
                weight=weight / self.predivide,
            )
        factor = self.factor * self.predivide
        for index, total in zip(shared, totals, strict=True):
            result[index] = total if factor == 1 else total * tf.cast(factor, total.dtype)
        with tf.control_dependencies(totals):
            self._nothing.assign(0.0)
        return result

    def _fixed_weight(self) -> float:
        return 1.0 / self.adapter.world.size if self.average else 1.0

    def _own(self, gradient: Any, variable: Any) -> Any:
        if gradient is None or id(variable) not in self.local or self.local_factor == 1:
            return gradient
        return tf.convert_to_tensor(gradient) * tf.cast(self.local_factor, gradient.dtype)

    def _reduce(self, flat: Any, name: str) -> Any:
        sum_tensor = self.adapter.sum_tensor
        with tf.device(self.device) if self.device else nullcontext():
            if self.compression is None:
                return sum_tensor(flat, name)
            small, context = self.compression.compress(flat)
            return self.compression.decompress(sum_tensor(small, name), context)

    def begin(self) -> None:
        """Do what was to be done before the first update, outside of the trace at hand."""
        begin, self.before_first = self.before_first, None
        if begin is not None:
            with tf.init_scope():
                begin()

    def _begin(self, variables: Sequence[Any]) -> None:
        """Do, before the first update, what had to wait until the variables are there."""
        if self.before_first is not None:
            with tf.init_scope():
                if not self.optimizer.built:
                    self.optimizer.build(list(variables))
            self.begin()

    def broadcast(self) -> None:
        """Send what the optimizer trains, and its state, from the first rank, once there."""
        if not self.optimizer.built:
            self.before_first = self.broadcast
            return
        everything = [*self.optimizer._trainable_variables, *self.optimizer.variables]
        broadcast_variables(everything, self.adapter)


def broadcast_variables(variables: Sequence[Any], adapter: CommonAdapter) -> None:
    """Assign the values of the adapter's first rank, in an order that is the same on its ranks."""
    communicator = adapter.communicator
    mine = {str(place): np.asarray(one.numpy()) for place, one in enumerate(variables)}
    for place, value in communicator.broadcast_arrays(mine).items():
        variables[int(place)].assign(value)


def broadcast_global_variables(root_rank: int = 0) -> None:
    """Send what each distributed optimizer trains, and its state, from rank 0 to all ranks.

    With process sets: from the first rank of its set to the others.

    TensorFlow 2 keeps no list of all variables. Where a model is not built yet it is done just
    before its first update. ``callbacks.BroadcastGlobalVariablesCallback`` sends the whole model.
    """
    for one in _made:
        if session.number_of(one.process_set) is None:  # removed
            continue
        check_root(root_rank, one.process_set)
        if one.adapter.world.size > 1:
            one.broadcast()


def check_root(root_rank: int, process_set: Any = None) -> None:
    """Raise ``UsageError`` where another rank than the first is to give its state."""
    ranks = getattr(process_set, "ranks", None) or [0]
    if root_rank not in (0, ranks[0]):
        raise UsageError(f"root_rank is {root_rank}: it is rank {ranks[0]} whose state all get")


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

    It is changed where it is: it keeps its type, its state and its configuration, and what is saved
    holds the plain optimizer. Gradients are summed in few large buckets, sparse ones as dense ones,
    so ``groups``, ``num_groups``, ``device_sparse`` and ``sparse_as_dense`` have nothing to change;
    nor has ``scale_local_gradients``, where no layer is local.

    Args:
        optimizer: of Keras 3, built or not; a ``LossScaleOptimizer`` too.
        name: of its collectives, the same on all ranks.
        device_dense: where gradients are summed, such as ``/CPU:0``.
        device_sparse: see above.
        compression: ``Compression.fp16`` halves what goes between the ranks, and rounds it.
        sparse_as_dense: see above.
        gradient_predivide_factor: divides before the sum, and multiplies after it.
        op: ``Average`` (default), over all samples of the global batch; or ``Sum``, which adds up
            what the ranks bring, for a loss that is a sum.
        backward_passes_per_step: updates are made after so many batches, from the sum of their
            gradients. These are summed over the ranks batch by batch, which is exact.
        average_aggregated_gradients: from their mean instead.
        num_groups: see above.
        groups: see above.
        process_set: the ranks that train this model together, this one among them; all by default.
        scale_local_gradients: see above.

    Returns:
        The optimizer.

    Raises:
        UsageError: it is no optimizer of Keras 3, or distributed already; a value not known here.
    """
    _check(optimizer, process_set)
    average = _is_average(op)
    factor = _accumulate(optimizer, backward_passes_per_step, average_aggregated_gradients)
    made = StepSum(
        *(optimizer, name or _next_name(process_set)),
        average=average,
        factor=factor,
        predivide=gradient_predivide_factor,
        compression=compression,
        device=device_dense,
        process_set=process_set,
    )
    return _distribute(optimizer, made)


def PartialDistributedOptimizer(  # noqa: N802 (Horovod's name)
    optimizer: Any,
    name: str | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = None,
    sparse_as_dense: bool = False,
    gradient_predivide_factor: float = 1.0,
    op: Any = None,
    groups: Any = None,
    process_set: Any = None,
    local_layers: Any = None,
    scale_local_gradients: bool = True,
) -> Any:
    """Do as ``DistributedOptimizer``, but for layers that each rank trains by itself.

    Args:
        local_layers: a layer or several, built already.
        scale_local_gradients: divide their gradients by the world size, so that they are of the
            size of the others' share.

    The other arguments are those of ``DistributedOptimizer``.
    """
    _check(optimizer, process_set)
    layers = [local_layers] if isinstance(local_layers, keras.Layer) else list(local_layers or ())
    if strange := [one for one in layers if not (isinstance(one, keras.Layer) and one.built)]:
        raise UsageError(f"local_layers: {strange[0]!r} is not a layer that is built")
    made = StepSum(
        *(optimizer, name or _next_name(process_set)),
        average=_is_average(op),
        predivide=gradient_predivide_factor,
        compression=compression,
        device=device_dense,
        local=[variable for layer in layers for variable in layer.trainable_weights],
        local_factor=1.0 / session.adapter(process_set).world.size
        if scale_local_gradients
        else 1.0,
        process_set=process_set,
    )
    return _distribute(optimizer, made)


def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = None,
    legacy_opts: bool = False,
    process_set: Any = None,
) -> Any:
    """Load a compiled model, and distribute its optimizer, which keeps its state.

    What was saved holds the plain optimizer: ``keras.models.load_model`` gives it back.

    Args:
        filepath: as in ``keras.models.load_model``.
        custom_optimizers: optimizer classes that are not Keras's.
        custom_objects: other classes and functions by name.
        compression: of ``DistributedOptimizer``.
        legacy_opts: not known to Keras 3.
        process_set: of ``DistributedOptimizer``.

    Raises:
        UsageError: ``legacy_opts`` was set; the model has no optimizer.
    """
    if legacy_opts:
        raise UsageError("load_model: Keras 3 has no legacy optimizers; leave legacy_opts out")
    classes = {one.__name__: one for one in custom_optimizers or ()}
    model = keras.models.load_model(filepath, custom_objects={**classes, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is None:
        raise UsageError(f"load_model: {filepath} was saved without an optimizer; compile it first")
    DistributedOptimizer(model.optimizer, compression=compression, process_set=process_set)
    return model


def _check(optimizer: Any, process_set: Any) -> None:
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        kind = type(optimizer).__name__
        raise UsageError(f"DistributedOptimizer takes an optimizer of Keras 3, not a {kind}")
    inner = getattr(optimizer, "inner_optimizer", None)
    if reduction_of(optimizer) or (inner is not None and reduction_of(inner)):
        raise UsageError("DistributedOptimizer: this optimizer is distributed already")
    session.adapter(process_set)  # raises where this rank is none of the set's


def _next_name(process_set: Any) -> str:
    """Return a name that is the same on all ranks of the set, whatever else each of them trains."""
    number = session.number_of(process_set)
    return f"gradients.{sum(session.number_of(one.process_set) == number for one in _made)}"


def _is_average(op: Any) -> bool:
    """Return whether ``op``, of Horovod, is the mean, not the sum.

    Raises:
        UsageError: it is neither.
    """
    if op is None:
        return True
    from horovod.tensorflow import Average, Sum

    if op not in (Average, Sum):
        raise UsageError("op: choose Average or Sum; Keras's optimizers know no other")
    return bool(op == Average)


def _accumulate(optimizer: Any, passes: int, average: bool) -> float:
    """Make the optimizer update after ``passes`` batches; return the factor that makes it a sum."""
    if passes == 1:
        return 1.0
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if passes < 1 or inner.built or inner.gradient_accumulation_steps:
        raise UsageError(
            f"backward_passes_per_step is {passes}: it is 1 or more, for an optimizer that is not "
            "built yet and has no gradient_accumulation_steps of its own"
        )
    inner.gradient_accumulation_steps = passes
    return 1.0 if average else float(passes)


def _distribute(optimizer: Any, made: StepSum) -> Any:
    _made.append(made)
    distribute(optimizer, made)
    return optimizer
