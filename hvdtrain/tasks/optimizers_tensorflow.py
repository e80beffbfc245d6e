"""The optimizers of a task in TensorFlow: Keras' own, and LARS and LAMB for large batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from typing_extensions import override

from hvdtrain.config.options import Options


def make_optimizer(options: Options, variables: Sequence[Any]) -> keras.optimizers.Optimizer:
    """Return the optimizer that ``options`` name; its learning rate is set before each step."""
    optimizer: Any
    decay, momentum = options.weight_decay or 0.0, options.momentum
    ema: Any = {"use_ema": True, "ema_momentum": options.ema} if options.ema else {}
    if options.optimizer == "lars":
        optimizer = Lars(1.0, momentum=momentum, decay=decay, **ema)
    elif options.optimizer == "lamb":
        optimizer = Lamb(1.0, decay=decay, **ema)
    elif options.optimizer == "adamw":
        optimizer = AdamW(1.0, epsilon=1e-8, weight_decay=decay, **ema)
        if options.no_decay_on_norm:
            others = [variable for variable in variables if len(variable.shape) < 2]
            optimizer.exclude_from_weight_decay(var_list=others)
    else:
        sgd = options.optimizer == "sgd"
        optimizer = (
            SGD(1.0, momentum=momentum, nesterov=options.nesterov, **ema)
            if sgd
            else Adam(1.0, epsilon=1e-8, **ema)
        )
        optimizer.penalty, optimizer.least = decay, 2 * options.no_decay_on_norm
    optimizer.clip_norm = options.clip_norm
    if options.precision == "fp16":
        return keras.optimizers.LossScaleOptimizer(optimizer)
    return optimizer


class _Guarded:
    """Skips updates with gradients that are not finite; clips the others, adds the L2 penalty.

    Keras' ``weight_decay`` is decoupled from the gradients in every optimizer; PyTorch's SGD and
    Adam add it.
    """

    penalty = 0.0
    least = 0  # number of dimensions of a variable that has the penalty
    clip_norm = 0.0
    bad: Any  # in the current trace: the index of a gradient that is not finite, or -1

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        """Update the variables; gradients are those of the global batch here."""
        variables, apply = list(trainable_variables), super().apply  # type: ignore[misc]
        self.bad = not_finite(list(grads))
        if self.clip_norm:  # before the penalty, as in PyTorch
            grads, _ = tf.clip_by_global_norm(grads, self.clip_norm)
        if self.penalty:
            grads = [
                gradient + self.penalty * variable.value  # tf.cast would round it to float32
                if len(variable.shape) >= self.least
                else gradient
                for gradient, variable in zip(grads, variables, strict=True)
            ]

        def update() -> Any:
            apply(grads, variables)
            return tf.constant(True)

        tf.cond(self.bad < 0, update, lambda: tf.constant(False))


class SGD(_Guarded, keras.optimizers.SGD):
    """Keras' SGD with an L2 penalty."""


class Adam(_Guarded, keras.optimizers.Adam):
    """Keras' Adam with an L2 penalty."""


class AdamW(_Guarded, keras.optimizers.AdamW):
    """Keras' AdamW."""


class Lars(_Guarded, keras.optimizers.Optimizer):
    """LARS; see ``optimizers_pytorch.Lars``.

    Args:
        learning_rate: learning rate r.
        momentum: m.
        decay: weight decay b; 0 for variables that are not scaled.
        trust: trust coefficient t.
    """

    def __init__(
        self,
        learning_rate: float = 1.0,
        momentum: float = 0.9,
        decay: float = 0.0,
        trust: float = 0.001,
        name: str = "lars",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, name=name, **options)
        self.momentum, self.decay, self.trust = momentum, decay, trust

    @override
    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self._velocities = self.add_optimizer_variables(variables, "momentum")

    @override
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        velocity = self._velocities[self._get_variable_index(variable)]
        if len(variable.shape) > 1:
            weights = ops.convert_to_tensor(variable)
            weight_norm, gradient_norm = norm(weights), norm(gradient)
            ratio = self.trust * weight_norm / (gradient_norm + self.decay * weight_norm)
            rate *= unless_zero(ratio, weight_norm, gradient_norm)
            gradient += self.decay * weights
        self.assign(velocity, self.momentum * velocity + rate * gradient)
        self.assign_sub(variable, velocity)

    @override
    def get_config(self) -> dict[str, Any]:
        settings = {"momentum": self.momentum, "decay": self.decay, "trust": self.trust}
        return {**super().get_config(), **settings}


class Lamb(_Guarded, keras.optimizers.Optimizer):
    """LAMB; see ``optimizers_pytorch.Lamb``. Keras' own scales and decays all variables.

    Args:
        learning_rate: learning rate r.
        beta_1: b1.
        beta_2: b2.
        epsilon: eps.
        decay: weight decay b; 0 for variables that are not scaled.
    """

    def __init__(
        self,
        learning_rate: float = 0.001,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        decay: float = 0.0,
        name: str = "lamb",
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, name=name, **options)
        self.beta_1, self.beta_2, self.epsilon, self.decay = beta_1, beta_2, epsilon, decay

    @override
    def build(self, variables: Any) -> None:
        if not self.built:
            super().build(variables)
            self._means = self.add_optimizer_variables(variables, "mean")
            self._squares = self.add_optimizer_variables(variables, "square")

    @override
    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        rate = ops.cast(learning_rate, variable.dtype)
        gradient = ops.cast(gradient, variable.dtype)
        number = ops.cast(self.iterations + 1, variable.dtype)
        index = self._get_variable_index(variable)
        mean, square = self._means[index], self._squares[index]
        self.assign(mean, mean + (1 - self.beta_1) * (gradient - mean))
        self.assign(square, square + (1 - self.beta_2) * (gradient * gradient - square))
        first, second = (  # a cast of a float would round it to float32
            1 - ops.power(ops.convert_to_tensor(beta, variable.dtype), number)
            for beta in (self.beta_1, self.beta_2)
        )
        update = (mean / first) / (ops.sqrt(square / second) + self.epsilon)
        if len(variable.shape) > 1:
            weights = ops.convert_to_tensor(variable)
            update += self.decay * weights
            weight_norm, update_norm = norm(weights), norm(update)
            rate *= unless_zero(weight_norm / update_norm, weight_norm, update_norm)
        self.assign_sub(variable, rate * update)

    @override
    def get_config(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in ("beta_1", "beta_2", "epsilon", "decay")}
        return {**super().get_config(), **settings}


def norm(tensor: Any) -> Any:
    """Return the L2 norm of a tensor."""
    return ops.sqrt(ops.sum(ops.square(tensor)))


def unless_zero(ratio: Any, first: Any, second: Any) -> Any:
    """Return ``ratio``, or 1 if a norm is 0."""
    return ops.where(ops.logical_and(first > 0, second > 0), ratio, ops.ones_like(ratio))


def not_finite(gradients: Sequence[Any]) -> Any:
    """Return the index of the first gradient that is not finite, int64; -1: none."""
    # In one pass: a sum with such a term is not finite, nor is one that overflows.
    finite = tf.stack([tf.math.is_finite(tf.reduce_sum(gradient)) for gradient in gradients])
    first = tf.argmin(tf.cast(finite, tf.int8))
    return tf.where(tf.reduce_all(finite), tf.constant(-1, tf.int64), first)
