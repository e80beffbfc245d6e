"""A user's TensorFlow script with Horovod's tape and a graph.

--late-guard: the counter that guards the broadcast is incremented first, so it never runs.
"""

from __future__ import annotations

import sys

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

late_guard = "--late-guard" in sys.argv
hvd.init()
keras.utils.set_random_seed(hvd.rank())
draw = np.random.default_rng(0)
x, y = draw.standard_normal((400, 10)).astype("float32"), draw.integers(0, 3, 400)
data = tf.data.Dataset.from_tensor_slices((x, y)).shard(hvd.size(), hvd.rank()).batch(10)
layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)]
model = keras.Sequential([keras.Input((10,)), *layers])
optimizer = keras.optimizers.Adam(0.001 * hvd.size())
loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@tf.function
def train(inputs, labels):
    with tf.GradientTape() as tape:
        loss = loss_of(labels, model(inputs, training=True))
    tape = hvd.DistributedGradientTape(tape)
    gradients = tape.gradient(loss, [variable.value for variable in model.trainable_variables])
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def broadcast():
    hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)
    hvd.broadcast_variables([variable.value for variable in optimizer.variables], root_rank=0)


step = 0
for inputs, labels in data:
    loss = train(inputs, labels)
    if late_guard:
        step += 1
    if step == 0:
        broadcast()
    if not late_guard:
        step += 1
print("mean loss", float(hvd.allreduce(loss, name="loss")))
