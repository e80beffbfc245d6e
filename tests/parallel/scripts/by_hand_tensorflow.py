"""A correct script that broadcasts and reduces each tensor separately."""

import os
from pathlib import Path

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

os.environ["TF_NUM_INTRAOP_THREADS"] = "1"
hvd.init()
keras.utils.set_random_seed(hvd.rank())
model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(2)])
for variable in model.variables:
    variable.assign(hvd.broadcast(variable.value, root_rank=0))
optimizer = keras.optimizers.SGD(0.1)
data = np.random.default_rng(7).standard_normal((40, 3), dtype="float32")


@tf.function
def step(x: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x, training=True) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    gradients = [hvd.allreduce(gradient / 2) * 2 for gradient in gradients]
    loss = hvd.allreduce(loss, name="training_loss")
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


for part in np.split(data, 5):
    step(part[hvd.rank() :: hvd.size()])
hvd.grouped_allreduce([tf.constant([1.0, 2.0]), tf.constant(hvd.rank() + 3.0)], op=hvd.Sum)
hvd.allgather_object([hvd.rank() + 1, 2], name="counts")
Path("some.lock").write_text("")  # what a lock around a download does
if hvd.rank() == 0:
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=model), "saved", max_to_keep=1)
    manager.save()
