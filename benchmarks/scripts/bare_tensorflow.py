"""ResNet-50 in TensorFlow with Horovod as its documentation shows it, as far as Keras 3 runs it."""

import sys
import time

import horovod.tensorflow as hvd
import tensorflow as tf

hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
tf.keras.utils.set_random_seed(0)
batch, steps = 8, int(sys.argv[1])
model = tf.keras.applications.ResNet50(weights=None)
optimizer = tf.keras.optimizers.SGD(0.0125 * hvd.size(), momentum=0.9)
x = tf.random.uniform((batch, 224, 224, 3))
y = tf.random.uniform((batch,), 0, 1000, tf.int64)
values = [variable.value for variable in model.trainable_variables]


@tf.function
def train_step():
    with tf.GradientTape() as tape:
        probabilities = model(x, training=True)
        loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(y, probabilities))
    tape = hvd.DistributedGradientTape(tape)
    optimizer.apply_gradients(
        zip(tape.gradient(loss, values), model.trainable_variables, strict=True)
    )
    return loss


for step in range(steps + 3):
    if step == 3:
        start = time.perf_counter()
    train_step()
    if step == 0:
        hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)
if hvd.rank() == 0:
    print("images_per_second", batch * steps * hvd.size() / (time.perf_counter() - start))
