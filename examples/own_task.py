"""A task of your own: how diabetes will go on, from ten measurements (scikit-learn's data set).

mpirun -n 2 python -m hvdtrain.train examples/own_task.py --epochs 20 --hidden 64
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_diabetes
from sklearn.metrics import r2_score

from hvdtrain.tasks.columns import Columns
from hvdtrain.tasks.metrics import WholeSet
from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

TEST = 89  # samples, the last ones


@dataclass
class Options:
    """Options of this task, besides those that all trainers have."""

    hidden: int = 32


def squared_error(output, y):
    """Return one loss per sample; training and evaluation take their mean over all ranks."""
    return (output - y) ** 2


def task(options):
    """Return model, data, loss and metrics; all ranks call it, with equal results."""
    x, y = load_diabetes(return_X_y=True)
    x, y = x / x.std(0), (y - y.mean()) / y.std()
    torch.manual_seed(options.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(10, options.hidden),
        torch.nn.Tanh(),
        torch.nn.Linear(options.hidden, 1),
        torch.nn.Flatten(0),
    )
    return TorchTask(
        model,
        options,
        InMemory(x[:-TEST], y[:-TEST], options.device),
        InMemory(x[-TEST:], y[-TEST:], options.device),
        losses=squared_error,
        metrics=[WholeSet("r2", r2_score)],  # no mean over samples: it needs all at once
        columns=Columns(("measured", "predicted"), lambda y, output: (y, output)),  # --predict
    )
