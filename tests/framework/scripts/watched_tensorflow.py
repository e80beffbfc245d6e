"""Run by test_watched.py: what Keras and TensorFlow do with a training, one line for each."""

from __future__ import annotations

import pickle

import keras
import numpy as np
import tensorflow as tf

x, y = np.ones((8, 4), np.float32), np.ones((8, 1), np.float32)


def network(**options: bool) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4,), **options), keras.layers.Dense(1)])


class OwnCompile(keras.Sequential):
    def compile(self, *args: object, factor: int = 1, **kwargs: object) -> None:
        super().compile(*args, **kwargs)
        self.factor = factor


model = network()
model.compile("sgd", "mse", metrics=["mae"])
model.fit(x, y, verbose=0)
model.save("model.keras")
print("loaded", keras.models.load_model("model.keras").evaluate(x, y, verbose=0))
model.compile("adam", "mse", jit_compile=True)
print("compiled", model.get_compile_config()["jit_compile"], keras.Model.compile.__module__)
print(
    "copies", [type(pickle.loads(pickle.dumps(value))).__name__ for value in (model, tf.function)]
)
own = OwnCompile([keras.layers.Dense(1)])
own.compile("sgd", "mse", factor=3)
print("own compile", own.factor, len(own.fit(x, y, verbose=0).history))

with tf.GradientTape(persistent=True) as tape:
    inputs = tf.Variable(x)
    outputs = model(inputs)
    loss = tf.reduce_mean(outputs)
print("jacobian", tape.batch_jacobian(outputs, inputs).shape)
variables = model.trainable_variables
keras.optimizers.SGD(0.1).apply(tape.gradient(loss, variables), trainable_variables=variables)
keras.optimizers.SGD(0.1).apply_gradients([(tape.gradient(loss, inputs), inputs)])
print("updates", float(tf.reduce_sum(inputs)), [float(tf.reduce_sum(v)) for v in variables])

keras.mixed_precision.set_global_policy("mixed_float16")
scaled = network()
scaled.compile("sgd", "mse")
print("mixed_float16", type(scaled.optimizer).__name__, len(scaled.fit(x, y, verbose=0).history))
keras.mixed_precision.set_global_policy("float32")
sparse = network(sparse=True)
sparse.compile("sgd", "mse")
data = tf.data.Dataset.from_tensors((tf.sparse.from_dense(x), y))
print("sparse", len(sparse.fit(data, verbose=0).history))
compiled = tf.function(lambda value: value + 1, jit_compile=True)
print("function", float(compiled(tf.constant(1.0))))
