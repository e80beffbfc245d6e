"""The update of a task, in one process."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.tasks.metrics import Accuracy
from hvdtrain.tasks.task import LossScale


def test_updates_are_seeded_as_by_torch_and_queue_nothing() -> None:
    """torch.manual_seed notes seed and stack for each kind of device that is not in use."""
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.dataset import Batch
    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

    options = replace(Options(), precision="fp32", device="cpu", weight_decay=0.0)
    x, y = np.zeros((8, 4), np.float32), np.zeros(8, np.int64)
    model = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(4, 2))
    task = TorchTask(model, options, InMemory(x, y, "cpu"), None)
    batch = Batch(torch.ones(8, 4), torch.zeros(8, dtype=torch.int64))
    drawn = []
    model[0].register_forward_hook(lambda module, args, output: drawn.append(output.tolist()))
    queued = torch.cuda._lazy_seed_tracker.manual_seed_all_cb
    for _ in range(2):
        task.update(batch, learning_rate=0.1, seed=3)
    assert torch.cuda._lazy_seed_tracker.manual_seed_all_cb is queued
    torch.manual_seed(3)
    assert drawn == [torch.nn.functional.dropout(torch.ones(8, 4)).tolist()] * 2


def parameters_after_a_step(
    framework: str, clip_norm: float, weight_decay: float = 0.0, updates: int = 1
) -> np.ndarray[Any, Any]:
    """Start a linear classifier from zeros, take steps of SGD, return what it has learned."""
    recipe = {"precision": "fp64", "device": "cpu", "momentum": 0.0}
    options = replace(Options(), **recipe, clip_norm=clip_norm, weight_decay=weight_decay)
    x, y = np.array([[3.0, 4.0], [0.0, 5.0]]), np.array([0, 1])
    task: Any
    if framework == "pytorch":
        torch = pytest.importorskip("torch")
        from hvdtrain.tasks import training_step_pytorch as pytorch

        model = torch.nn.Linear(2, 2)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        task = pytorch.TorchTask(model, options, pytorch.InMemory(x, y, "cpu"), None)
    else:
        keras = pytest.importorskip("keras")
        from hvdtrain.tasks import training_step_tensorflow as tensorflow

        layer = keras.layers.Dense(2, kernel_initializer="zeros", dtype="float64")
        model = keras.Sequential([keras.Input((2,), dtype="float64"), layer])
        task = tensorflow.TFTask(model, options, tensorflow.InMemory(x, y, "/CPU:0"), None)
    for _ in range(updates):
        task.update(task.train.fetch(np.arange(2)), learning_rate=1.0, seed=0)
    if framework == "pytorch":
        values = [value.detach().numpy().T for value in model.parameters()]
    else:
        values = [value.numpy() for value in model.trainable_variables]
    return np.concatenate([value.ravel() for value in values])


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_gradients_are_clipped_by_their_norm_over_all_parameters(framework: str) -> None:
    # At zeros both classes have the probability 1/2: the gradients are x/2, with either sign,
    # averaged over the two samples.
    whole = np.array([0.75, -0.75, -0.25, 0.25, 0.0, 0.0])
    assert parameters_after_a_step(framework, 0.0) == pytest.approx(whole, abs=1e-12)
    assert parameters_after_a_step(framework, 2.0) == pytest.approx(whole, abs=1e-12)
    clipped = parameters_after_a_step(framework, 0.1)
    assert clipped == pytest.approx(whole * 0.1 / np.linalg.norm(whole), rel=1e-5)


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_weight_decay_is_exact_in_float64(framework: str) -> None:
    first, second = (parameters_after_a_step(framework, 0.0, 0.1, n) for n in (1, 2))
    plain = parameters_after_a_step(framework, 0.0, 0.0, 2)
    # The second update subtracts a tenth of the first one's result, too.
    np.testing.assert_allclose(plain - second, 0.1 * first, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("bad", [0, 2])
def test_a_fused_optimizer_skips_updates_until_it_is_asked(optimizer: str, bad: int) -> None:
    """Everything is as before the first bad batch, running statistics and momentum too."""
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.dataset import Batch
    from hvdtrain.tasks.optimizers_pytorch import make_optimizer
    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

    recipe = {"precision": "fp64", "device": "cpu", "weight_decay": 0.1, "clip_norm": 0.5}
    options = replace(Options(), **recipe, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(5, 8, 4, generator=generator, dtype=torch.float64)

    def trained(later: bool, *indices: int) -> tuple[Any, int]:
        torch.manual_seed(0)
        layers = (torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
        data = InMemory(np.zeros((8, 4)), np.zeros(8, np.int64), "cpu")
        task = TorchTask(torch.nn.Sequential(*layers), options, data, None)
        task.optimizer = make_optimizer(task.model, options, fused=True)
        task.may_defer = later
        for index in indices:
            x = batches[index] * float("nan") if index == bad and later else batches[index]
            task.update(Batch(x, torch.zeros(8, dtype=torch.int64)), learning_rate=0.1, seed=0)
        skipped = task.skipped_updates() if later else 0
        task.may_defer = False
        task.update(Batch(batches[4], torch.zeros(8, dtype=torch.int64)), learning_rate=0.1, seed=0)
        return task, skipped

    task, skipped = trained(True, 0, 1, 2, 3)
    assert skipped == 4 - bad
    expected, _ = trained(False, *range(bad))
    for name, value in expected.model.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(value, task.model.state_dict()[name]), name
    assert trained(True, 4, 4)[1] == 0


def test_a_moving_average_is_begun_by_the_first_update_that_is_made() -> None:
    """As on a CPU, where a skipped update is no step of the optimizer."""
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.optimizers_pytorch import AVERAGE, keep_average

    weight = torch.nn.Parameter(torch.tensor([3.0], dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    keep_average(optimizer, 0.75)
    for skipped in (1.0, 0.0, 1.0, 0.0):
        weight.grad = torch.ones_like(weight)
        optimizer.found_inf = torch.tensor(skipped)  # as ``Guard`` and ``GradScaler`` set it
        optimizer.step()
    assert weight.tolist() == [1.0]
    assert optimizer.state[weight][AVERAGE].tolist() == [0.75 * 2.0 + 0.25 * 1.0]


def test_the_gradients_of_a_compiled_network_are_those_of_the_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all layers: PyTorch 2.13 by itself compiles this network to zeros below its pooling."""
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.dataset import Batch
    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask
    from hvdtrain.workloads.mnist.pytorch import network

    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    options = replace(Options(), precision="fp64", device="cpu", weight_decay=0.0)
    samples = np.zeros((1, 1, 28, 28), np.uint8), np.zeros(1, np.int64)
    random = np.random.default_rng(1)
    x, y = random.normal(size=(100, 1, 28, 28)), random.integers(10, size=100)
    gradients = []
    for compiles in (False, True):
        torch.manual_seed(1)
        task = TorchTask(network("tutorial", 0.0), options, InMemory(*samples, "cpu"), None)
        if compiles:
            try:
                task.compile()
            except UsageError as error:
                pytest.skip(str(error))
        task.update(Batch(torch.from_numpy(x), torch.from_numpy(y)), learning_rate=0.0, seed=1)
        gradients.append([value.grad.numpy() for value in task.model.parameters()])
    for plain, compiled in zip(*gradients, strict=True):
        assert np.linalg.norm(compiled - plain) <= 1e-12 * np.linalg.norm(plain)


def test_an_update_that_the_loss_scaler_skips_leaves_finite_statistics_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.dataset import Batch
    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

    options = replace(Options(), precision="fp32", device="cpu", weight_decay=0.0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    data = InMemory(np.zeros((1, 3)), np.zeros(1, np.int64), "cpu")
    task = TorchTask(model, options, data, None)
    task.scaler = torch.amp.GradScaler("cpu")
    x, y = torch.arange(12.0).reshape(4, 3) ** 2, torch.tensor([0, 1, 0, 1])
    bad = torch.where(torch.arange(3) == 1, torch.inf, x)
    losses = [task.update(Batch(each, y), learning_rate=0.1, seed=1) for each in (x, bad, x)]
    assert task.loss_scale == LossScale(2.0**15, 1)
    first, second, third = task.loss_values(losses)
    assert not math.isfinite(second) and third < first
    assert all(tensor.isfinite().all() for tensor in task.model.state_dict().values())


def test_an_update_that_the_loss_scaler_skips_leaves_finite_statistics_in_tensorflow() -> None:
    keras = pytest.importorskip("keras")
    from hvdtrain.tasks import training_step_tensorflow as tensorflow
    from hvdtrain.tasks.dataset import Batch

    options = replace(Options(), precision="fp32", device="cpu")
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    data = tensorflow.InMemory(np.zeros((1, 3), np.float32), np.zeros(1, np.int64), "/CPU:0")
    task = tensorflow.TFTask(keras.Sequential([keras.Input((3,)), *layers]), options, data, None)
    task.optimizer = keras.optimizers.LossScaleOptimizer(task.optimizer)
    task.optimizer.build(task.model.trainable_variables)
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3) ** 2, np.array([0, 1, 0, 1])
    bad = np.where(np.arange(3) == 1, np.inf, x).astype(np.float32)
    for each in (x, bad, x):
        task.update(Batch(each, y), learning_rate=0.1, seed=1)
    assert task.loss_scale == LossScale(2.0**14, 1)
    assert all(np.isfinite(variable.numpy()).all() for variable in task.model.variables)


def test_an_update_that_is_not_made_changes_no_variable_in_tensorflow() -> None:
    keras = pytest.importorskip("keras")
    from hvdtrain.tasks import training_step_tensorflow as tensorflow
    from hvdtrain.tasks.dataset import Batch

    options = replace(Options(), precision="fp32", device="cpu", weight_decay=0.0)
    layers = [keras.layers.BatchNormalization(), keras.layers.Dense(2)]
    data = tensorflow.InMemory(np.zeros((1, 3), np.float32), np.zeros(1, np.int64), "/CPU:0")
    task = tensorflow.TFTask(keras.Sequential([keras.Input((3,)), *layers]), options, data, None)
    x, y = np.arange(12, dtype=np.float32).reshape(4, 3), np.array([0, 1, 0, 1])
    task.update(Batch(x, y), learning_rate=0.1, seed=1)
    before = [variable.numpy() for variable in task.model.variables]
    task.update(Batch(np.where(x == 5, np.nan, x), y), learning_rate=0.1, seed=1)
    assert task.not_finite and task.not_finite.local == "its loss is nan"
    for variable, value in zip(task.model.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def linear(framework: str) -> tuple[Any, Any]:
    """Return the module of a framework's task, and a linear model of two inputs and classes."""
    module: Any
    if framework == "pytorch":
        torch = pytest.importorskip("torch")
        from hvdtrain.tasks import training_step_pytorch as module

        return module, torch.nn.Linear(2, 2)
    keras = pytest.importorskip("keras")
    from hvdtrain.tasks import training_step_tensorflow as module

    layer = keras.layers.Dense(2, dtype="float64")
    return module, keras.Sequential([keras.Input((2,), dtype="float64"), layer])


def task_of(framework: str, labels: list[int], **arguments: Any) -> Any:
    module, model = linear(framework)
    options = replace(Options(), precision="fp64", device="cpu", weight_decay=0.0)
    device = "cpu" if framework == "pytorch" else "/CPU:0"
    data = module.InMemory(np.ones((len(labels), 2)), np.array(labels), device)
    kind = module.TorchTask if framework == "pytorch" else module.TFTask
    return kind(model, options, data, data, **arguments)


@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_accuracy_is_measured_by_default_with_the_default_loss_only(framework: str) -> None:
    """A number for it, or a traceback, would come with any other: binary classes, a regression."""
    module, _ = linear(framework)

    def metrics_of(**arguments: Any) -> list[str]:
        return [type(one).__name__ for one in task_of(framework, [0, 1], **arguments).metrics]

    def other(output: Any, y: Any) -> Any:
        return module.cross_entropy(output, y)

    assert metrics_of() == metrics_of(losses=module.cross_entropy) == ["Accuracy"]
    assert metrics_of(losses=other) == metrics_of(metrics=()) == []
    assert metrics_of(losses=other, metrics=[Accuracy()]) == ["Accuracy"]


@pytest.mark.parametrize(
    ("kind", "scale", "reaches"),
    [
        *((kind, None, kind) for kind in ("int32", "int64")),
        *((kind, None, "float32") for kind in ("uint8", "int16", "float64")),
        ("int64", (1.0, 0.0), "float32"),
    ],
)
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_token_ids_reach_a_network_as_integers(
    framework: str, kind: str, scale: tuple[float, float] | None, reaches: str
) -> None:
    """Floats are no indices, and in bf16 others above 256; pixels and features become floats."""
    module, _ = linear(framework)
    options = replace(Options(), device="cpu", weight_decay=0.0)
    data = np.array([[1, 299], [2, 257]]) % (200 if kind == "uint8" else 300)
    seen: list[Any] = []
    if framework == "pytorch":
        import torch

        class Tokens(torch.nn.Embedding):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                seen.append(x.numpy())
                return super().forward(x.long()).sum(1)

        made, device = (module.TorchTask, Tokens(300, 2)), "cpu"
    else:
        import keras
        import tensorflow as tf

        class Model(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.embedding = keras.layers.Embedding(300, 2)

            def call(self, x: Any) -> Any:
                tf.py_function(lambda value: seen.append(value.numpy()), [x], [])
                return tf.reduce_sum(self.embedding(x), 1)

        model = Model()
        model(np.ones((1, 2), np.int32))
        seen.clear()
        made, device = (module.TFTask, model), "/CPU:0"
    data_set = module.InMemory(data.astype(kind), np.array([0, 1]), device)
    task = made[0](made[1], options, data_set, None, **({"scale": scale} if scale else {}))
    batch = data_set.fetch(np.arange(2))
    task.update(batch, learning_rate=1.0, seed=0)
    task.evaluate(batch, [])
    assert {array.dtype.name for array in seen} == {reaches}
    assert all(np.array_equal(array, data) for array in seen) and len(seen) == 2


@pytest.mark.parametrize("label", [7, -1])
@pytest.mark.parametrize("framework", ["pytorch", "tensorflow"])
def test_a_label_that_is_no_class_is_named(framework: str, label: int) -> None:
    task = task_of(framework, [0, label])
    batch = task.train.fetch(np.arange(2))
    words = f"has the label {label}, and its model 2 outputs: labels must be from 0 to 1"
    with pytest.raises(UsageError, match=words):
        task.update(batch, learning_rate=0.1, seed=0)
    with pytest.raises(UsageError, match=words):
        task.evaluate(batch, [])


def test_updates_of_tensorflow_retain_no_memory() -> None:
    """TensorFlow retains a tensor of each Python number, 700 bytes; the rate changes each step."""
    keras = pytest.importorskip("keras")
    from hvdtrain.tasks import training_step_tensorflow as tensorflow

    options = replace(Options(), precision="fp64", device="cpu")
    x, y = np.ones((2, 2)), np.array([0, 1])
    layer = keras.layers.Dense(2, dtype="float64")
    model = keras.Sequential([keras.Input((2,), dtype="float64"), layer])
    task = tensorflow.TFTask(model, options, tensorflow.InMemory(x, y, "/CPU:0"), None)
    stand_in = replace(task.train.fetch(np.arange(1)), stand_in=True)
    batches = task.train.fetch(np.arange(2)), stand_in

    def train(steps: range) -> None:
        for step in steps:
            task.update(batches[step % 2], learning_rate=1e-6 * step, seed=step)

    train(range(100))
    before = allocated_bytes()
    train(range(100, 1100))
    assert allocated_bytes() - before < 100 * 1000


def allocated_bytes() -> int:
    """Return the memory that the C library has given out to this process, in bytes."""
    import ctypes

    class Usage(ctypes.Structure):  # struct mallinfo2
        _fields_ = (("numbers", ctypes.c_size_t * 10),)

    function = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is None:
        pytest.skip("the C library is not glibc 2.33 or newer")
    function.restype = Usage
    return int(function().numbers[7])  # uordblks


@pytest.mark.parametrize(("layer", "shape"), [("1d", ()), ("2d", (1, 1)), ("3d", (1, 1, 1))])
def test_batchnorm_accepts_a_part_of_one_sample(layer: str, shape: tuple[int, ...]) -> None:
    """As the tail of an epoch has for some number of ranks: PyTorch raises."""
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

    options = replace(Options(), precision="fp64", device="cpu", weight_decay=0.0)
    norm = getattr(torch.nn, f"BatchNorm{layer}")(3)
    x = np.arange(6.0).reshape(2, 3, *shape)
    head = torch.nn.Sequential(norm, torch.nn.Flatten(), torch.nn.Linear(3, 2))
    task = TorchTask(head, options, InMemory(x, np.array([0, 1]), "cpu"), None)
    task.update(task.train.fetch(np.arange(1)), learning_rate=0.1, seed=1)
    assert norm.running_mean.tolist() == [0.0] * 3
    task.update(task.train.fetch(np.arange(2)), learning_rate=0.1, seed=1)
    assert norm.running_mean.tolist() == pytest.approx([0.15, 0.25, 0.35])
    assert set(norm.state_dict()) == set(getattr(torch.nn, f"BatchNorm{layer}")(3).state_dict())


def test_a_network_gets_images_in_the_format_of_pytorch() -> None:
    """As those that reshape them by ``view`` need, e.g. PyTorch's tutorial on CIFAR-10."""
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

    class Net(torch.nn.Module):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.linear = torch.nn.Conv2d(3, 4, 5), torch.nn.Linear(16, 2)

        def forward(self, x: Any) -> Any:
            return self.linear(self.convolution(x).view(-1, 16))

    options = replace(Options(), precision="fp32", device="cpu")
    data = InMemory(np.zeros((4, 3, 6, 6), np.uint8), np.zeros(4, np.int64), "cpu")
    task = TorchTask(Net(), options, data, data)
    task.update(data.fetch(np.arange(4)), learning_rate=0.1, seed=1)
    assert all(map(math.isfinite, task.evaluate(data.fetch(np.arange(4)), [])))
    faster = TorchTask(Net(), options, data, data, channels_last=True)
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        faster.update(data.fetch(np.arange(4)), learning_rate=0.1, seed=1)


def test_a_loss_with_constants_of_the_precision_is_evaluated_in_pytorch() -> None:
    torch = pytest.importorskip("torch")
    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

    def losses(output: Any, y: Any) -> Any:
        weight = torch.tensor([1.0, 2.0])  # fp32
        return torch.nn.functional.cross_entropy(output, y, weight=weight, reduction="none")

    options = replace(Options(), precision="bf16", device="cpu")
    data = InMemory(np.zeros((2, 3), np.float32), np.array([0, 1]), "cpu")
    layer = torch.nn.Linear(3, 2, bias=False)
    task = TorchTask(layer, options, data, data, losses=losses)
    task.update(data.fetch(np.arange(2)), learning_rate=0.1, seed=1)
    assert task.evaluate(data.fetch(np.arange(2)), []) == pytest.approx((3 * math.log(2), 2))


def test_a_loss_with_constants_of_the_precision_is_evaluated_in_tensorflow() -> None:
    keras = pytest.importorskip("keras")
    import tensorflow as tf

    from hvdtrain.tasks import training_step_tensorflow as tensorflow

    def losses(output: Any, y: Any) -> Any:
        return tf.nn.sigmoid_cross_entropy_with_logits(labels=tf.cast(y, tf.float32), logits=output)

    options = replace(Options(), precision="bf16", device="cpu")
    data = tensorflow.InMemory(np.zeros((2, 3), np.float32), np.array([0, 1]), "/CPU:0")
    layers = [keras.Input((3,)), keras.layers.Dense(1, use_bias=False), keras.layers.Flatten()]
    model = keras.Sequential([*layers, keras.layers.Reshape(())])
    task = tensorflow.TFTask(model, options, data, data, losses=losses)
    task.update(data.fetch(np.arange(2)), learning_rate=0.1, seed=1)
    assert task.evaluate(data.fetch(np.arange(2)), []) == pytest.approx((2 * math.log(2), 2))


def test_a_batch_of_fewer_samples_than_passes_leaves_stand_ins_out_in_tensorflow() -> None:
    """An epoch's last batch may be so small: it makes all passes, but only samples count."""
    keras = pytest.importorskip("keras")
    from hvdtrain.adapters.select import adapter as select_adapter
    from hvdtrain.tasks.training_step_tensorflow import InMemory, TFTask

    options = replace(Options(), precision="fp64", device="/CPU:0", weight_decay=0.0)
    x, y = np.random.default_rng(1).normal(size=(6, 3)), np.array([0, 1] * 3)
    kernels, statistics = [], []
    for passes in (4, 2):
        norm = keras.layers.BatchNormalization(momentum=0.5, dtype="float64")
        dense = keras.layers.Dense(2, kernel_initializer="ones", dtype="float64")
        model = keras.Sequential([keras.Input((3,), dtype="float64"), norm, dense])
        data = InMemory(x, y, "/CPU:0")
        task = TFTask(model, replace(options, accumulate_steps=passes), data, None)
        adapter = select_adapter("tensorflow", "single", environ={})
        adapter.models.add(model)
        task.leave_out = adapter.leave_out
        task.update(task.train.fetch(np.arange(2)), learning_rate=0.5, seed=0)
        assert task.not_finite is None
        kernels.append(dense.kernel.numpy())
        statistics.append(norm.moving_mean.numpy())
    np.testing.assert_array_equal(*kernels)
    np.testing.assert_array_equal(*statistics)
    np.testing.assert_allclose(statistics[0], x[0] / 4 + x[1] / 2, rtol=1e-12)
