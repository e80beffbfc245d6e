"""MNIST for TensorFlow: the two networks."""

from __future__ import annotations

import keras
from keras import layers

from hvdtrain.tasks.training_step_tensorflow import InMemory, TFTask, weight_dtype
from hvdtrain.workloads.mnist.data import CLASSES, SIDE, MnistOptions, Samples


def network(model: str, dropout: float | None = None, dtype: str = "float32") -> keras.Model:
    """Return the network called ``model``, for images of shape (n, 28, 28, 1).

    Both are described in ``task.EPILOG``. ``dropout`` is one fraction for all dropouts; None keeps
    the defaults of the network.
    """
    half = 0.5 if dropout is None else dropout
    if model == "tutorial":
        steps = [
            layers.Conv2D(32, 3, activation="relu", name="conv1", dtype=dtype),
            layers.Conv2D(64, 3, activation="relu", name="conv2", dtype=dtype),
            layers.MaxPooling2D(2, dtype=dtype),
            layers.Dropout(0.25 if dropout is None else dropout, dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(128, activation="relu", name="dense1", dtype=dtype),
            layers.Dropout(half, dtype=dtype),
            layers.Dense(CLASSES, name="dense2", dtype=dtype),
        ]
    else:
        steps = [
            layers.Conv2D(10, 5, name="conv1", dtype=dtype),
            layers.MaxPooling2D(2, dtype=dtype),
            layers.ReLU(dtype=dtype),
            layers.Conv2D(20, 5, name="conv2", dtype=dtype),
            layers.SpatialDropout2D(half, dtype=dtype),
            layers.MaxPooling2D(2, dtype=dtype),
            layers.ReLU(dtype=dtype),
            layers.Flatten(dtype=dtype),
            layers.Dense(50, activation="relu", name="dense1", dtype=dtype),
            layers.Dropout(half, dtype=dtype),
            layers.Dense(CLASSES, name="dense2", dtype=dtype),
        ]
    image = keras.Input((SIDE, SIDE, 1), dtype=dtype)
    return keras.Sequential([image, *steps], name=model)


def task(options: MnistOptions, train: Samples, test: Samples) -> TFTask:
    """Return MNIST as a task, everything in memory."""
    keras.utils.set_random_seed(options.seed)
    return TFTask(
        network(options.model, options.dropout, weight_dtype(options)),
        options,
        InMemory(
            train.images[..., None],
            train.labels,
            options.device,
            augment=train.augment(options.seed, channel=-1),
        ),
        InMemory(test.images[..., None], test.labels, options.device),
        scale=train.scale,
    )
