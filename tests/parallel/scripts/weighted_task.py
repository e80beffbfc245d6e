"""A task for test_weights.py: classes of words in sequences, many of which are mostly padding."""

from __future__ import annotations

from typing import Any

import numpy as np

random = np.random.default_rng(1)
LENGTH, TRAINING, PADDING = 7, 37, -1
X = random.normal(size=(48, LENGTH, 6))
WORDS = random.integers(3, size=(48, LENGTH))
WORDS[random.random((48, LENGTH)) < random.random((48, 1))] = PADDING
TRAIN, TEST = slice(0, TRAINING), slice(TRAINING, None)


def pytorch(options: Any) -> Any:
    import torch
    from torch.nn import functional as F

    from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask

    def losses(output: Any, y: Any) -> Any:
        each = F.cross_entropy(output.mT, y, reduction="none", ignore_index=PADDING)
        return each.sum(1), (y != PADDING).sum(1)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    train, test = (InMemory(X[part], WORDS[part], options.device) for part in (TRAIN, TEST))
    return TorchTask(model, options, train, test, scale=(1.0, 0.0), losses=losses)


def tensorflow(options: Any) -> Any:
    import keras
    import tensorflow as tf

    from hvdtrain.tasks.training_step_tensorflow import InMemory, TFTask, weight_dtype

    def losses(output: Any, y: Any) -> Any:
        each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.maximum(y, 0), output)
        counted = tf.cast(y != PADDING, each.dtype)
        return tf.reduce_sum(each * counted, 1), tf.reduce_sum(counted, 1)

    keras.utils.set_random_seed(0)
    keras.config.set_floatx(weight_dtype(options))
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((LENGTH, 6)), *layers])
    train, test = (InMemory(X[part], WORDS[part], options.device) for part in (TRAIN, TEST))
    return TFTask(model, options, train, test, scale=(1.0, 0.0), losses=losses)


def task(options: Any) -> Any:
    """Return the task of the framework."""
    return (pytorch if options.framework == "pytorch" else tensorflow)(options)
