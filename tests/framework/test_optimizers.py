"""LARS and LAMB: the papers' equations, in both frameworks, in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hvdtrain.tasks.optimizers_pytorch import Lamb, Lars  # noqa: E402

Arrays = list[np.ndarray]
RATE = 0.25  # exact in float32, in which Keras keeps it
MOMENTUM, DECAY, TRUST = 0.9, 0.01, 0.001
FIRST, SECOND, EPS = 0.9, 0.999, 1e-6
UPDATES = 4


def weights() -> Arrays:
    """A weight, a bias, a weight of zeros, and one whose gradient is zero."""
    random = np.random.default_rng(1)
    return [random.normal(size=(5, 3)), random.normal(size=5), np.zeros((2, 2)), np.ones((2, 1))]


def gradients(number: int) -> Arrays:
    """Gradients of an update."""
    random = np.random.default_rng([2, number])
    return [random.normal(size=value.shape) for value in weights()[:-1]] + [np.zeros((2, 1))]


def ratio(first: float, second: float, value: float) -> float:
    """The trust ratio, which is 1 if a norm is 0."""
    return value if first > 0 and second > 0 else 1.0


def lars(w: np.ndarray) -> Any:
    """The equation of You, Gitman and Ginsburg (2017)."""
    v, scaled = np.zeros_like(w), w.ndim > 1
    decay = DECAY if scaled else 0.0

    def update(g: np.ndarray) -> np.ndarray:
        nonlocal v, w
        norms = np.linalg.norm(w), np.linalg.norm(g)
        with np.errstate(invalid="ignore"):
            local = ratio(*norms, TRUST * norms[0] / (norms[1] + decay * norms[0]))
        v = MOMENTUM * v + RATE * (local if scaled else 1.0) * (g + decay * w)
        w = w - v
        return w

    return update


def lamb(w: np.ndarray) -> Any:
    """Algorithm 2 of You et al. (2020)."""
    m, v, n, scaled = np.zeros_like(w), np.zeros_like(w), 0, w.ndim > 1

    def update(g: np.ndarray) -> np.ndarray:
        nonlocal m, v, n, w
        n += 1
        m = FIRST * m + (1 - FIRST) * g
        v = SECOND * v + (1 - SECOND) * g * g
        u = m / (1 - FIRST**n) / (np.sqrt(v / (1 - SECOND**n)) + EPS)
        factor = 1.0
        if scaled:
            u = u + DECAY * w
            norms = np.linalg.norm(w), np.linalg.norm(u)
            factor = ratio(*norms, norms[0] / norms[1] if norms[1] else 1.0)
        w = w - RATE * factor * u
        return w

    return update


def in_pytorch(kind: str) -> Arrays:
    """The weights after some updates."""
    parameters = [torch.nn.Parameter(torch.from_numpy(value)) for value in weights()]
    optimizer: Any
    if kind == "lars":
        optimizer = Lars(parameters, RATE, MOMENTUM, DECAY, TRUST)
    else:
        optimizer = Lamb(parameters, RATE, (FIRST, SECOND), EPS, DECAY)
    for number in range(UPDATES):
        for parameter, gradient in zip(parameters, gradients(number), strict=True):
            parameter.grad = torch.from_numpy(gradient)
        optimizer.step()
    return [parameter.detach().numpy() for parameter in parameters]


def in_keras(kind: str) -> Arrays:
    """The same with Keras."""
    keras = pytest.importorskip("keras")
    from hvdtrain.tasks import optimizers_tensorflow

    variables = [keras.Variable(value, dtype="float64") for value in weights()]
    optimizer: Any
    if kind == "lars":
        optimizer = optimizers_tensorflow.Lars(RATE, MOMENTUM, DECAY, TRUST)
    else:
        optimizer = optimizers_tensorflow.Lamb(RATE, FIRST, SECOND, EPS, DECAY)
    for number in range(UPDATES):
        optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients(number)], variables)
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("framework", [in_pytorch, in_keras])
@pytest.mark.parametrize("kind", ["lars", "lamb"])
def test_the_update_is_that_of_the_paper(kind: str, framework: Any) -> None:
    rules = [{"lars": lars, "lamb": lamb}[kind](value) for value in weights()]
    for number in range(UPDATES):
        expected = [rule(g) for rule, g in zip(rules, gradients(number), strict=True)]
    for value, right in zip(framework(kind), expected, strict=True):
        np.testing.assert_allclose(value, right, rtol=1e-12)
