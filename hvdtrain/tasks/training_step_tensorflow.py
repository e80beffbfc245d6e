"""A task in TensorFlow: the training step and the evaluation, for any Keras model and data."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from typing_extensions import override

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices
from hvdtrain.tasks.augmented import edges
from hvdtrain.tasks.dataset import Batch, InMemoryBase, unknown_class
from hvdtrain.tasks.metrics import ReadOutput
from hvdtrain.tasks.optimizers_tensorflow import make_optimizer, not_finite
from hvdtrain.tasks.task import LossScale, NotFinite, Task

WIDE_INTEGERS = (tf.int32, tf.int64)
LOW_PRECISION = {"bf16": "mixed_bfloat16", "fp16": "mixed_float16"}


class InMemory(InMemoryBase):
    """A dataset in the memory of the device: a batch is gathered from one tensor."""

    @override
    def tensor(self, array: NDArray[Any]) -> Any:
        with tf.device(self.device):
            return tf.constant(array)

    @override
    def fetch(self, indices: Indices) -> Batch:
        return Batch(tf.gather(self.images, indices), tf.gather(self.labels, indices))


def cross_entropy(output: Any, y: Any, smoothing: float = 0.0) -> Any:
    """Return the loss of each sample of a classifier, shape (n,), from logits and classes.

    A share ``smoothing`` of each label is spread evenly over all classes (Szegedy et al., 2016).
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, output)
    if not smoothing:
        return losses
    spread = -tf.reduce_mean(tf.nn.log_softmax(output), axis=-1)
    return (1 - smoothing) * losses + smoothing * spread


def erase(x: Any, boxes: Any) -> Any:
    """Return images with a part of each set to 0.

    Args:
        x: images, shape (n, height, width, channels).
        boxes: top, bottom, left and right edge of each part in pixels, int64, shape (n, 4).
    """
    top, bottom, left, right = tf.unstack(boxes[:, :, None], axis=1)
    rows, columns = (tf.range(side, dtype=tf.int64) for side in x.shape[1:3])
    in_rows, in_columns = (top <= rows) & (rows < bottom), (left <= columns) & (columns < right)
    within = in_rows[:, :, None, None] & in_columns[:, None, :, None]
    return tf.where(within, tf.zeros((), x.dtype), x)


def mix(first: Any, second: Any, shares: Any) -> Any:
    """Return the weighted sum of each pair of samples, by the share of the first one."""
    shares = tf.reshape(shares, [-1, *[1] * (len(first.shape) - 1)])
    return first * shares + second * (1 - shares)


class TFTask(Task):
    """A task in TensorFlow, for any Keras model; its arguments are those of ``Task``.

    The step is traced once, for batches of any size: values that change from step to step are
    arguments.
    """

    default_losses = staticmethod(cross_entropy)
    _erased, _mixed = staticmethod(erase), staticmethod(mix)

    @override
    def _prepare(self, scale: tuple[Any, Any] | None, *, channels_last: bool) -> None:
        variables = self.model.trainable_variables
        self.dtype = tf.as_dtype(weight_dtype(self.options))
        self.optimizer = make_optimizer(self.options, variables)
        self.optimizer.build(variables)
        self._keeps_integers = scale is None
        self.scale = tuple(tf.constant(value, self.dtype) for value in scale or (1, 0))
        layers = self.model._flatten_layers(include_self=False)
        self._seeds = [
            layer.seed_generator.state for layer in layers if hasattr(layer, "seed_generator")
        ]
        self._is_weighted = False  # its losses have weights: known when the step is traced
        self._step: Any = None
        self._evaluate: Any = None

    @override
    def _input(self, pixels: Any) -> Any:
        if self._keeps_integers and pixels.dtype in WIDE_INTEGERS:
            return pixels
        return tf.cast(pixels, self.dtype) * self.scale[0] + self.scale[1]

    @override
    def update(self, batch: Batch, *, learning_rate: float, seed: int) -> Any:
        # An array: TensorFlow keeps a tensor of each Python number, also NumPy's, for ever.
        rate = np.asarray(learning_rate, np.float64)
        tensors = self._tensors(batch)
        if self._step is None:
            kinds = (tf.float64, tf.int64, tf.bool)
            arguments = [_any_number(tensors), *(tf.TensorSpec((), kind) for kind in kinds)]
            self._step = _traced(self._traced_step, arguments)
        with _label_errors():
            stand_in = np.asarray(batch.stand_in)
            loss, weight, bad, local = self._step(tensors, rate, np.int64(seed), stand_in)
        self.batch_weight = weight if self._is_weighted else None
        self.not_finite = None
        if bad >= 0:
            name = self.model.trainable_variables[bad].path
            cause = "" if batch.stand_in else self._local_cause(loss, local)
            self.not_finite = NotFinite(name, cause)
        return loss

    @property
    def _scales_loss(self) -> bool:
        return isinstance(self.optimizer, keras.optimizers.LossScaleOptimizer)

    @property
    @override
    def loss_scale(self) -> LossScale | None:
        if not self._scales_loss:
            return None
        scale, updates = self.optimizer.dynamic_scale, self.optimizer.step_counter
        return LossScale(float(scale), int(updates))

    def _tensors(self, batch: Batch) -> dict[str, Any]:
        """Return the fields of a training batch, ``boxes`` in pixels."""
        tensors = {"x": batch.x, "y": batch.y}
        if batch.shares is not None:
            tensors["shares"] = tf.constant(batch.shares, self.dtype)
        if batch.boxes is not None:
            tensors["boxes"] = tf.constant(edges(batch.boxes, batch.x.shape[1:-1]))
        return tensors

    def _local_cause(self, loss: Any, local: Any) -> str:
        if not np.isfinite(loss):
            return f"its loss is {float(loss)}"
        return f"its gradient of {self.model.trainable_variables[local].path}" if local >= 0 else ""

    def _traced_step(
        self, tensors: dict[str, Any], learning_rate: Any, seed: Any, stand_in: Any
    ) -> Any:
        for index, state in enumerate(self._seeds):
            state.assign(tf.cast(tf.stack([seed, index]), state.dtype))
        variables = self.model.trainable_variables
        others = [v for v in self.model.non_trainable_variables if v.value.dtype.is_floating]
        before = [tf.identity(v.value) for v in others]  # e.g. running statistics
        loss, weight, gradients = self._accumulated(Batch(**tensors), stand_in)
        bad, local = self._apply(gradients, variables, learning_rate)

        def restore() -> Any:
            for variable, value in zip(others, before, strict=True):
                keep = self._scales_loss & tf.math.is_finite(variable.value)
                variable.assign(tf.where(keep, variable.value, value))
            return tf.constant(True)

        # A loss scaler does not say whether it has skipped the update.
        tf.cond((bad < 0) & (not self._scales_loss), lambda: tf.constant(False), restore)
        return loss, weight, bad, local

    def _accumulated(self, batch: Batch, stand_in: Any) -> tuple[Any, Any, list[Any]]:
        """Return mean loss, weight and gradients of a batch, in ``--accumulate-steps`` passes."""
        count = tf.shape(batch.y if batch.shares is None else batch.shares)[0]
        count = tf.where(stand_in, 0, count)
        number = self.options.accumulate_steps
        if number == 1:
            return self._weighted(*self._backward(batch, count, stand_in), count)

        def add(index: Any, loss: Any, weight: Any, sums: list[Any]) -> Any:
            low, high = index * count // number, (index + 1) * count // number
            piece = batch[low : tf.maximum(high, low + 1)]
            piece_loss, piece_weight, gradients = self._backward(piece, count, low == high)
            return (
                index + 1,
                loss + piece_loss,
                weight + piece_weight,
                [a + b for a, b in zip(sums, gradients, strict=True)],
            )

        zeros = [tf.zeros_like(variable.value) for variable in self.model.trainable_variables]
        begin = (0, tf.zeros((), self.dtype), tf.zeros((), tf.float64), zeros)
        # Sequentially, so that memory is needed for only one piece.
        _, loss, weight, gradients = tf.while_loop(
            lambda index, *_: index < number, add, begin, parallel_iterations=1
        )
        return self._weighted(loss, weight, gradients, count)

    def _weighted(self, loss: Any, weight: Any, gradients: list[Any], count: Any) -> Any:
        """Divide by the sum of the weights, in place of the number of samples, if there are any.

        Args:
            loss: sum of the losses of this rank's samples, divided by their number.
            weight: sum of their weights.
            gradients: those of ``loss``; 16-bit sums over the ranks are of them.
            count: number of the samples.

        Returns:
            The loss, weight, and gradients to average over the samples of all ranks.
        """
        if not self._is_weighted:
            return loss, weight, gradients
        mine = tf.cast(count, tf.float64)
        total, samples = tf.unstack(self.start_sum(tf.stack([weight, mine]))())
        factor = tf.math.divide_no_nan(samples, total)
        loss *= tf.cast(tf.math.divide_no_nan(mine, weight), self.dtype)
        return loss, weight, [each * tf.cast(factor, each.dtype) for each in gradients]

    def _backward(self, piece: Batch, count: Any, stand_in: Any) -> tuple[Any, Any, list[Any]]:
        """Return loss, weight and gradients of a piece: its share of a mean over ``count`` samples.

        Those of a stand-in are 0.
        """
        variables = self.model.trainable_variables
        self.leave_out(stand_in)
        with tf.GradientTape() as tape:
            losses, weights = self._forward(piece)
            loss = tf.reduce_sum(losses) / tf.cast(tf.maximum(count, 1), self.dtype)
            loss = tf.where(stand_in, tf.zeros_like(loss), loss)
            # A loss that is not finite makes the gradients so, which inform all ranks.
            factor = tf.where(tf.math.is_finite(loss), 1.0, np.nan)
            scaled = self.optimizer.scale_loss(loss * tf.cast(factor, loss.dtype))
        gradients = tape.gradient(scaled, [variable.value for variable in variables])
        self.leave_out(False)
        self._is_weighted = weights is not None
        weight = tf.zeros((), tf.float64)
        if weights is not None:
            weight = tf.where(stand_in, weight, tf.reduce_sum(tf.cast(weights, tf.float64)))
        return loss, weight, gradients

    @override
    def _output(self, x: Any) -> Any:
        with self._lowered():
            return tf.cast(self.model(x, training=True), self.dtype)

    def _apply(self, gradients: list[Any], variables: list[Any], learning_rate: Any) -> Any:
        """Update; return the first gradient that is not finite, global and local; -1: none."""
        rate = self.optimizer.learning_rate
        rate.assign(tf.cast(learning_rate, rate.dtype))
        self.optimizer.apply(gradients, variables)
        none = tf.constant(-1, tf.int64)
        bad = getattr(self.optimizer, "bad", none)
        return bad, tf.cond(bad < 0, lambda: none, lambda: not_finite(gradients))

    @contextmanager
    def _lowered(self) -> Iterator[None]:
        """Make layers compute in the low precision of the options within the block.

        Only the trace of the training step uses it, so an evaluation is not affected.
        """
        low = LOW_PRECISION.get(self.options.precision)
        layers = list(self.model._flatten_layers())
        before = [layer.dtype_policy for layer in layers]
        try:
            for layer in layers if low else []:
                layer.dtype_policy = low
            yield
        finally:
            for layer, policy in zip(layers, before, strict=True):
                layer.dtype_policy = policy

    @override
    def _set_weights(self, values: list[Any] | None = None) -> list[Any]:
        optimizer = getattr(self.optimizer, "inner_optimizer", self.optimizer)
        if not int(optimizer.iterations):  # no average yet
            return []
        weights = self.model.trainable_variables
        before = [weight.numpy() for weight in weights]
        values = values or optimizer._model_variables_moving_average
        for weight, value in zip(weights, values, strict=True):
            weight.assign(value)
        return before

    @override
    def _evaluated(self, batch: Batch) -> tuple[float, float, ReadOutput]:
        if self._evaluate is None:
            self._evaluate = _traced(self._traced_evaluate, _any_number((batch.x, batch.y)))
        with _label_errors():
            loss, weight, output = self._evaluate(batch.x, batch.y)
        return float(loss), float(weight), lambda: (output.numpy(), batch.y.numpy())

    def _traced_evaluate(self, pixels: Any, labels: Any) -> tuple[Any, Any, Any]:
        output = tf.cast(self.model(self._input(pixels), training=False), self.dtype)
        losses, weights = self._losses(self.losses, output, labels)
        weights = tf.ones_like(losses) if weights is None else weights
        loss, weight = (tf.reduce_sum(tf.cast(each, tf.float64)) for each in (losses, weights))
        return loss, weight, tf.cast(output, tf.float64)

    @override
    def _check(self, losses: Any, y: Any) -> None:
        if losses.shape.rank != 1:
            raise UsageError(
                f"the losses have the shape {losses.shape}: a task must return one per sample"
            )

    @override
    def parameter_norm(self) -> float:
        squares = [
            np.square(value.numpy().astype(np.float64)).sum()
            for value in self.model.trainable_variables
        ]
        return float(np.sqrt(np.sum(squares)))

    @override
    def loss_values(self, losses: list[Any]) -> list[float]:
        return [float(loss) for loss in losses]


@contextmanager
def _label_errors() -> Iterator[None]:
    """Raise ``UsageError`` for a label that is no class (a GPU makes its loss nan)."""
    try:
        yield
    except tf.errors.InvalidArgumentError as error:
        pattern = r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)"
        if match := re.search(pattern, str(error)):
            raise unknown_class(int(match[1]), int(match[2])) from error
        raise


def _any_number(tensors: Any) -> Any:
    """Return the specifications of such tensors with any number of samples."""
    return tf.nest.map_structure(
        lambda tensor: tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype), tensors
    )


def _traced(function: Callable[..., Any], arguments: list[tf.TensorSpec]) -> Any:
    # There is no control flow to translate, and without autograph tracing is quicker.
    return tf.function(function, arguments, autograph=False)


def weight_dtype(options: Options) -> str:
    """Return the type of the weights, independent of that of the forward pass."""
    return "float64" if options.precision == "fp64" else "float32"
