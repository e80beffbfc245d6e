"""The task of own_task.py in TensorFlow.

mpirun -n 2 python -m hvdtrain.train examples/own_task_tf.py --framework tensorflow --epochs 20
"""

from dataclasses import dataclass

import keras
import tensorflow as tf
from keras import layers
from sklearn.datasets import load_diabetes
from sklearn.metrics import r2_score

from hvdtrain.tasks.columns import Columns
from hvdtrain.tasks.metrics import WholeSet
from hvdtrain.tasks.training_step_tensorflow import InMemory, TFTask, weight_dtype

TEST = 89  # samples, the last ones


@dataclass
class Options:
    """Options of this task, besides those that all trainers have."""

    hidden: int = 32


def squared_error(output, y):
    """Return one loss per sample; training and evaluation take their mean over all ranks."""
    return (output - tf.cast(y, output.dtype)) ** 2


def task(options):
    """Return model, data, loss and metrics; all ranks call it, with equal results."""
    x, y = load_diabetes(return_X_y=True)
    x, y = x / x.std(0), (y - y.mean()) / y.std()
    keras.utils.set_random_seed(options.seed)
    dtype = weight_dtype(options)
    model = keras.Sequential(
        [
            keras.Input((10,), dtype=dtype),
            layers.Dense(options.hidden, activation="tanh", dtype=dtype),
            layers.Dense(1, dtype=dtype),
            layers.Reshape((), dtype=dtype),
        ]
    )
    return TFTask(
        model,
        options,
        InMemory(x[:-TEST], y[:-TEST], options.device),
        InMemory(x[-TEST:], y[-TEST:], options.device),
        losses=squared_error,
        metrics=[WholeSet("r2", r2_score)],  # no mean over samples: it needs all at once
        columns=Columns(("measured", "predicted"), lambda y, output: (y, output)),  # --predict
    )
