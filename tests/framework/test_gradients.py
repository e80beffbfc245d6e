"""Step 5 in one process: the buckets of both frameworks, over a sum that arrives late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hvdtrain.adapters.framework import Flags
from hvdtrain.steps.world import World
from hvdtrain.system.runtime.waits import Waits

SIZE = 16  # a parameter that fills its place in a bucket


def rank(weight: float | None) -> Any:
    """What the sums need of an adapter."""
    flags = Flags(stop=False, saving=False)
    return SimpleNamespace(
        loss_weight=weight, pass_weight=None, flags=flags, waits=Waits(0, []), parts_begun=0
    )


class LateSum:
    """The sum over two ranks: the gradient of the remote one is added in ``wait``."""

    in_order = False

    def __init__(self, remote: Any) -> None:
        self.remote, self.started = remote, 0

    def start(self, flat: Any, name: str) -> Any:
        self.started += 1
        return flat

    def wait(self, flat: Any) -> None:
        flat[:SIZE] += self.remote
        flat[SIZE] += 1  # rank that has this gradient
        self.started -= 1

    def nbytes(self, flat: Any) -> int:
        return flat.numel() * flat.element_size()

    def progress(self) -> None:
        pass


def torch_step(mine: float, remote: float, weight: float = 0.25) -> tuple[Any, Any, Any, LateSum]:
    """A backward pass with a scaled loss, as fp16 on a GPU has it; its gradient is ``mine``."""
    torch = pytest.importorskip("torch")
    from hvdtrain.adapters.pytorch.buckets import Buckets

    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    parameter = torch.nn.Parameter(torch.zeros(SIZE))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    late = LateSum(torch.full((SIZE,), 8 * remote))
    buckets = Buckets("test", optimizer, late, rank(weight))
    scaler.scale((parameter * mine).sum()).backward()
    assert late.started == 0 and buckets.messages["count"] == 1
    return parameter, optimizer, scaler, late


def test_gradients_are_unscaled_when_their_sum_is_whole() -> None:
    parameter, optimizer, scaler, _ = torch_step(mine=4.0, remote=2.0)
    assert parameter.grad.tolist() == [8 * (0.25 * 4 + 2)] * SIZE
    scaler.unscale_(optimizer)
    assert parameter.grad.tolist() == [3.0] * SIZE
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.tolist(), scaler.get_scale()) == ([-3.0] * SIZE, 8.0)


@pytest.mark.parametrize(("mine", "remote"), [(np.inf, 1.0), (1.0, np.inf), (1.0, np.nan)])
def test_an_overflow_on_one_rank_skips_the_step_on_all(mine: float, remote: float) -> None:
    parameter, optimizer, scaler, _ = torch_step(mine, remote)
    scaler.step(optimizer)
    scaler.update()
    assert (parameter.tolist(), scaler.get_scale()) == ([0.0] * SIZE, 4.0)


def test_a_stand_in_counts_nothing_even_if_its_loss_is_nan() -> None:
    parameter, optimizer, scaler, _ = torch_step(mine=np.nan, remote=2.0, weight=None)
    scaler.step(optimizer)
    assert parameter.tolist() == [-2.0] * SIZE


@pytest.mark.parametrize("traced", [False, True])
def test_the_buckets_of_tensorflow_sum_and_weigh(traced: bool) -> None:
    tf = pytest.importorskip("tensorflow")
    from hvdtrain.adapters.tensorflow.buckets import Buckets

    seen: list[str] = []

    def reduce(flat: Any, name: str) -> Any:
        seen.append(name)
        return flat + 1

    buckets = Buckets("test", reduce, lambda: rank(1.0))
    variables = [tf.Variable(tf.zeros((2, 3))), tf.Variable(0.0), tf.Variable(tf.zeros(4))]

    def total() -> Any:
        nan = tf.fill([4], np.nan)
        return buckets.sum([tf.ones((2, 3)), None, nan], variables)

    total = tf.function(total) if traced else total
    for weight, expected in ((0.0, [1.0, 1.0, 1.0]), (0.5, [1.5, 1.0, np.nan])):
        buckets.weight.assign(weight)
        totals = total()
        assert [gradient.shape for gradient in totals] == [value.shape for value in variables]
        for gradient, value in zip(totals, expected, strict=True):
            np.testing.assert_array_equal(gradient.numpy(), np.full(gradient.shape, value))

    assert set(seen) == {"test.0"} and buckets.messages == {"count": 1, "bytes": 4 * 11}
    assert int(buckets.sums.numpy()) == 2 and buckets.flags.stop  # the other rank has set all

    def scaled() -> Any:  # by the loss: 0 times nan is nan
        buckets.scale_loss(tf.constant(1.0))
        return buckets.sum([tf.fill([4], np.nan)], variables[2:])

    scaled = tf.function(scaled) if traced else scaled
    for weight, expected in ((0.0, 1.0), (0.5, np.nan)):
        buckets.weight.assign(weight)
        np.testing.assert_array_equal(scaled()[0].numpy(), np.full(4, expected))


def test_tensorflow_weights_by_numbers_in_float64() -> None:
    """A number that TensorFlow casts passes through float32: a third would be 1e-8 too large."""
    tf = pytest.importorskip("tensorflow")
    from hvdtrain.adapters.tensorflow.weights import times

    values = tf.constant([3.0, 0.3], tf.float64)
    assert times(values, 1 / 3).numpy().tolist() == [3.0 * (1 / 3), 0.3 * (1 / 3)]
    assert times(values, tf.constant(1 / 3, tf.float64)).numpy()[1] == 0.3 * (1 / 3)
    assert times(tf.constant([np.nan]), 0.0).numpy().tolist() == [0.0]


@pytest.mark.parametrize(("deviation", "mean"), [(1e-3, 0.0), (1.0, 1e4)])
def test_batchnorm_of_the_global_batch_is_exact_in_float64(deviation: float, mean: float) -> None:
    """Also if the variance is as small as epsilon, or the mean is large."""
    keras = pytest.importorskip("keras")
    import tensorflow as tf

    from hvdtrain.adapters.tensorflow.batchnorm import normalize

    layer = keras.layers.BatchNormalization(epsilon=1e-5, dtype="float64")
    x = mean + deviation * np.random.default_rng(1).normal(size=(9, 4))
    layer.build(x.shape)
    alone = World(rank=0, size=1, local_rank=0, local_size=1, host="host", hosts=1)
    normalized = normalize(layer, tf.constant(x), lambda values: values, alone).numpy()
    expected = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    np.testing.assert_allclose(normalized, expected, rtol=1e-12, atol=1e-11 if mean else 0)
