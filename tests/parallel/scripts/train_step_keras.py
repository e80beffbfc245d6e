"""A user's script: ``model.fit`` with Horovod's tape in a train step of the model's own."""

from __future__ import annotations

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init()
RANK, SIZE = hvd.rank(), hvd.size()
keras.utils.set_random_seed(RANK)
draw = np.random.default_rng(0)
x = draw.standard_normal((240, 10)).astype("float32")
y = draw.integers(0, 3, (240, 6))
y[:, 4:] *= draw.integers(0, 2, (240, 2))


class Model(keras.Sequential):
    """A classifier whose gradients are the mean over the ranks."""

    def train_step(self, data):
        inputs, labels = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(inputs, labels, self(inputs, training=True))
        tape = hvd.DistributedGradientTape(tape)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, [variable.value for variable in variables])
        self.optimizer.apply(gradients, variables)
        return {"loss": loss}


class Broadcast(keras.callbacks.Callback):
    """Sends rank 0's state before the first update."""

    def on_train_begin(self, logs=None):
        self.model.optimizer.build(self.model.trainable_variables)
        state = [*self.model.variables, *self.model.optimizer.variables]
        hvd.broadcast_variables([variable.value for variable in state], root_rank=0)


layers = [keras.layers.Dense(16, activation="relu"), keras.layers.Dense(18)]
model = Model([keras.Input((10,)), *layers, keras.layers.Reshape((6, 3))])
model.compile(
    keras.optimizers.SGD(0.05 * SIZE, momentum=0.9),
    keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
data = tf.data.Dataset.from_tensor_slices((x, y)).shard(SIZE, RANK).shuffle(240, seed=1)
model.fit(data.batch(8), epochs=2, callbacks=[Broadcast()], verbose=0)
if RANK == 0:
    model.save("model.keras")
losses = model.compute_loss(x[RANK::SIZE], y[RANK::SIZE], model(x[RANK::SIZE]))
print("mean loss", float(hvd.allreduce(losses, name="loss")))
