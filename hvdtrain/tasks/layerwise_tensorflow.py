"""LARS and LAMB for Keras 3: see ``layerwise_pytorch.py``, whose formulas these are."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops
from typing_extensions import override


class Lars(keras.optimizers.Optimizer):
    """LARS; see ``layerwise_pytorch.Lars``.

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
            of_weights, of_gradient = norm(weights), norm(gradient)
            ratio = self.trust * of_weights / (of_gradient + self.decay * of_weights)
            rate *= unless_zero(ratio, of_weights, of_gradient)
            gradient += self.decay * weights
        self.assign(velocity, self.momentum * velocity + rate * gradient)
        self.assign_sub(variable, velocity)

    @override
    def get_config(self) -> dict[str, Any]:
        settings = {"momentum": self.momentum, "decay": self.decay, "trust": self.trust}
        return {**super().get_config(), **settings}


class Lamb(keras.optimizers.Optimizer):
    """LAMB; see ``layerwise_pytorch.Lamb``. Keras's own scales and decays all variables.

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
            of_weights, of_update = norm(weights), norm(update)
            rate *= unless_zero(of_weights / of_update, of_weights, of_update)
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
