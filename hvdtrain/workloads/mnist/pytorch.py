"""MNIST for PyTorch: the two networks."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.workloads.base import TaskOptions
from hvdtrain.workloads.mnist.data import CLASSES, DEVIATION, MEAN, Samples
from hvdtrain.workloads.pytorch import InMemory, TorchTask

MODELS = ("tutorial", "small")


def network(model: str, dropout: float | None = None) -> nn.Module:
    """The network called ``model``, for images of shape (n, 1, 28, 28).

    ``tutorial``: the net of the ALCF tutorial's homework, 1.2 million parameters. ``small``: the
    net of Horovod's MNIST example, 22 thousand.

    Args:
        model: one of ``MODELS``.
        dropout: one fraction for all dropouts; None keeps the network's own.
    """

    def fraction(own: float) -> float:
        return own if dropout is None else dropout

    if model == "tutorial":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(fraction(0.25)),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(fraction(0.5)),
            nn.Linear(128, CLASSES),
        )
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(fraction(0.5)),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(fraction(0.5)),
        nn.Linear(50, CLASSES),
    )


def task(options: TaskOptions, train: Samples, test: Samples) -> TorchTask:
    """MNIST as a task, everything in memory."""
    torch.manual_seed(options.seed)
    return TorchTask(
        network(options.model, options.dropout),
        options,
        InMemory(train.images[:, None], train.labels, options.device),
        InMemory(test.images[:, None], test.labels, options.device),
        scale=(1 / (255 * DEVIATION), -MEAN / DEVIATION),
    )
