"""MNIST for PyTorch: the two networks."""

from __future__ import annotations

import torch
from torch import nn

from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask
from hvdtrain.workloads.mnist.data import CLASSES, MnistOptions, Samples


def network(model: str, dropout: float | None = None) -> nn.Module:
    """Return the network called ``model``, for images of shape (n, 1, 28, 28).

    Both are described in ``task.EPILOG``. ``dropout`` is one fraction for all dropouts; None keeps
    the defaults of the network.
    """
    half = 0.5 if dropout is None else dropout
    if model == "tutorial":
        return nn.Sequential(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.25 if dropout is None else dropout),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Dropout(half),
            nn.Linear(128, CLASSES),
        )
    return nn.Sequential(
        nn.Conv2d(1, 10, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(10, 20, 5),
        nn.Dropout2d(half),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(320, 50),
        nn.ReLU(),
        nn.Dropout(half),
        nn.Linear(50, CLASSES),
    )


def task(options: MnistOptions, train: Samples, test: Samples) -> TorchTask:
    """Return MNIST as a task, everything in memory."""
    torch.manual_seed(options.seed)
    return TorchTask(
        network(options.model, options.dropout),
        options,
        InMemory(
            train.images[:, None],
            train.labels,
            options.device,
            augment=train.augment(options.seed, channel=1),
        ),
        InMemory(test.images[:, None], test.labels, options.device),
        scale=train.scale,
    )
