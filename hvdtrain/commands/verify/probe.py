"""Define what the eight checks use on a rank: the adapter, and small tasks of the trainer."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.adapters.common_adapter import CommonAdapter
from hvdtrain.config.options import Options
from hvdtrain.steps.sharding import Indices
from hvdtrain.steps.world import World
from hvdtrain.system.machine.gpus import pytorch_processor, tensorflow_processor
from hvdtrain.tasks.task import Task

Array = NDArray[Any]
Facts = dict[str, Any]
"""JSON values measured by one rank."""

WIDTHS = (6, 7, 5, 4, 2)  # inputs, layers of the network, outputs


@dataclass(frozen=True)
class Probe:
    """The adapter that is verified on this rank, and the tasks that it is verified with.

    ``adapter.world`` is the true world, even if ``initialize`` returned a false one, so that a
    false world fails only row 1.
    """

    adapter: CommonAdapter
    framework: str
    claimed: World  # by ``initialize``

    @property
    def rank(self) -> int:
        """This rank, according to the runtime."""
        return self.adapter.communicator.rank

    @property
    def size(self) -> int:
        """Number of ranks that the runtime connects."""
        return self.adapter.communicator.size

    def processor(self) -> tuple[str | None, int]:
        """Return identity of the framework's GPU, or None, and number of threads, 0 on a GPU."""
        if self.framework == "pytorch":
            import torch

            return pytorch_processor(torch, self.adapter.device)
        import tensorflow as tf

        return tensorflow_processor(tf)

    def task(
        self, samples: int, *, seed: int, optimizer: str = "sgd", buffers: bool = False
    ) -> Task:
        """Build a task of the trainer in float64; equal on all ranks for equal arguments.

        Args:
            samples: number of its samples.
            seed: seed of weights and samples.
            optimizer: as in ``--optimizer``; ``sgd`` at rate 1 subtracts exactly the gradient.
            buffers: whether the network has running statistics, of a BatchNorm layer.
        """
        build = pytorch_task if self.framework == "pytorch" else tensorflow_task
        options = Options(
            precision="fp64", momentum=0.0, optimizer=optimizer, device=self.adapter.device
        )
        draw = np.random.default_rng(seed)
        x, y = (draw.standard_normal((samples, width)) for width in (WIDTHS[0], WIDTHS[-1]))
        return build(options, x, y, seed=seed, buffers=buffers)

    @cached_property
    def plain(self) -> Task:
        """A task that is not distributed; it has the samples of the largest global batch."""
        return self.task(max(5, self.size**2), seed=0)

    def parameters(self, task: Task) -> Array:
        """Return copies of all parameters and buffers of ``task`` as one vector."""
        state = self.adapter.export_state(task.model, None)
        return np.concatenate([np.ravel(state.model[name]) for name in sorted(state.model)])

    def state(self, task: Task) -> list[Array]:
        """Return copies of parameters, buffers and optimizer state of ``task``, by name."""
        state = self.adapter.export_state(task.model, task.optimizer)
        tensors = [*sorted(state.model.items()), *sorted(state.training.items())]
        return [np.array(value) for _, value in tensors]

    def update(self, task: Task, samples: Indices, rate: float = 1.0) -> Array:
        """Make an update with the ``samples``; return what it subtracted from the parameters."""
        before = self.parameters(task)
        [batch] = task.train.evaluation([samples])
        task.update(batch, learning_rate=rate, seed=0)
        return before - self.parameters(task)


def pytorch_task(options: Options, x: Array, y: Array, *, seed: int, buffers: bool) -> Task:
    """Build a network in PyTorch whose loss is the sum of the squared errors of a sample."""
    import torch

    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

    def squared_errors(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).sum(1)

    torch.manual_seed(seed)
    layers: list[torch.nn.Module] = []
    for inputs, outputs in itertools.pairwise(WIDTHS):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.Tanh()]
    if buffers:
        layers.insert(1, torch.nn.BatchNorm1d(WIDTHS[1]))
    model = torch.nn.Sequential(*layers[:-1])
    return TorchTask(model, options, InMemory(x, y, options.device), None, losses=squared_errors)


def tensorflow_task(options: Options, x: Array, y: Array, *, seed: int, buffers: bool) -> Task:
    """Build a network in TensorFlow whose loss is the sum of the squared errors of a sample."""
    import keras
    import tensorflow as tf

    from hvdtrain.tasks.training_step_tensorflow import InMemory, TFTask

    def squared_errors(output: Any, target: Any) -> Any:
        return tf.reduce_sum((output - target) ** 2, 1)

    tf.get_logger().setLevel("ERROR")  # it warns that several tasks are traced
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(width, "tanh", dtype="float64") for width in WIDTHS[1:-1]]
    layers.append(keras.layers.Dense(WIDTHS[-1], dtype="float64"))
    if buffers:
        layers.insert(1, keras.layers.BatchNormalization(dtype="float64"))
    with tf.device(options.device):
        model = keras.Sequential([keras.Input(WIDTHS[:1], dtype="float64"), *layers])
        data = InMemory(x, y, options.device)
        return TFTask(model, options, data, None, losses=squared_errors)


def largest(values: Array) -> float:
    """Return the largest absolute value; nan if any value is nan."""
    return float(np.max(np.abs(values), initial=0.0))
