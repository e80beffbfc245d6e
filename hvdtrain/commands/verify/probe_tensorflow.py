"""Compute with plain TensorFlow and Keras, for the checks of the eight steps."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from typing_extensions import override

from hvdtrain.commands.verify.harness import Array, FrameworkProbe, Processor, weights
from hvdtrain.config.options import Options
from hvdtrain.system.machine.gpus import tensorflow_processor
from hvdtrain.tasks.tensorflow import InMemory, TFTask


class PlainFramework(FrameworkProbe):
    """Plain TensorFlow."""

    @override
    def processor(self) -> Processor:
        return Processor(*tensorflow_processor(tf))

    @override
    def network(self, seed: int, *, buffers: bool = False) -> keras.Model:
        layers = weights(seed)
        with tf.device(self.device):
            model = keras.Sequential([keras.Input((layers[0][0].shape[0],), dtype="float64")])
            for number, (_, bias) in enumerate(layers):
                last = number == len(layers) - 1
                activation = None if last else "tanh"
                model.add(keras.layers.Dense(len(bias), activation, dtype="float64"))
                if buffers and not number:
                    model.add(keras.layers.BatchNormalization(dtype="float64"))
        dense = [layer for layer in model.layers if isinstance(layer, keras.layers.Dense)]
        for layer, pair in zip(dense, layers, strict=True):
            layer.set_weights(pair)
        return model

    @override
    def sgd(self, model: Any) -> keras.optimizers.Optimizer:
        return self._built(keras.optimizers.SGD(1.0), model)

    @override
    def adam(self, model: Any) -> keras.optimizers.Optimizer:
        return self._built(keras.optimizers.Adam(0.01), model)

    def _built(self, optimizer: Any, model: Any) -> keras.optimizers.Optimizer:
        with tf.device(self.device):
            optimizer.build(model.trainable_variables)
        return optimizer

    def _gradients(self, model: Any, x: Array, y: Array) -> list[Any]:
        values = [variable.value for variable in model.trainable_variables]
        with tf.device(self.device), tf.GradientTape() as tape:
            errors = model(tf.constant(x), training=True) - tf.constant(y)
            loss = tf.reduce_mean(tf.reduce_sum(errors**2, 1))
        gradients: list[Any] = tape.gradient(loss, values)
        return gradients

    @override
    def update(self, model: Any, optimizer: Any, x: Array, y: Array) -> None:
        gradients = self._gradients(model, x, y)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @override
    def gradient(self, model: Any, x: Array, y: Array) -> Array:
        return _flat(self._gradients(model, x, y))

    @override
    def parameters(self, model: Any) -> Array:
        return _flat(model.trainable_variables)

    @override
    def set_parameters(self, model: Any, values: Array) -> None:
        start = 0
        for variable in model.trainable_variables:
            count = int(np.prod(variable.shape))
            variable.assign(values[start : start + count].reshape(variable.shape))
            start += count

    @override
    def state(self, model: Any, optimizer: Any) -> list[Array]:
        return [np.array(value.numpy()) for value in [*model.weights, *optimizer.variables]]

    @override
    def applied_rates(self, rates: list[float]) -> list[float]:
        data = InMemory(np.ones((1, 1, 1, 1), np.uint8), np.zeros(1, np.int64), self.device)
        options = Options(precision="fp64", momentum=0.0, device=self.device)
        layers = [keras.layers.Flatten(), keras.layers.Dense(2, dtype="float64")]
        with tf.device(self.device):
            model = keras.Sequential([keras.Input((1, 1, 1), dtype="float64"), *layers])
            task = TFTask(model, options, data, None)
        applied = []
        for rate in rates:
            layers[1].set_weights([np.zeros((1, 2)), np.zeros(2)])
            batch = data.fetch(np.zeros(1, np.int64))
            task.update(batch, learning_rate=rate, seed=0)
            applied.append(2 * float(layers[1].bias[0]))  # two equal logits: the gradient is -1/2
        return applied


def _flat(values: Any) -> Array:
    return np.concatenate([np.array(value).ravel() for value in values])
