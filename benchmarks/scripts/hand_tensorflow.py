"""The TensorFlow loop by hand, with all that hvdtrain tunes: what a patient expert would write."""

import ctypes
import os
import sys
import time

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
libc = ctypes.CDLL("libc.so.6")
libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)

import horovod.tensorflow as hvd  # noqa: E402
import keras  # noqa: E402
import tensorflow as tf  # noqa: E402

from hvdtrain.workloads.resnet.tensorflow import network  # noqa: E402

precision, batch, steps = sys.argv[1], 8, int(sys.argv[2])
hvd.init()
tf.config.threading.set_intra_op_parallelism_threads(1)
tf.config.threading.set_inter_op_parallelism_threads(1)
keras.utils.set_random_seed(0)
if precision == "bf16":
    keras.mixed_precision.set_global_policy("mixed_bfloat16")
model = network("resnet50", 1000, 224, "float32")
if precision == "bf16":
    for layer in model._flatten_layers():
        layer.dtype_policy = "mixed_bfloat16"
optimizer = keras.optimizers.SGD(0.0125 * hvd.size(), momentum=0.9)
optimizer.build(model.trainable_variables)
pool = tf.random.normal((32, 224, 224, 3))
labels = tf.random.uniform((32,), 0, 1000, tf.int64)
values = [variable.value for variable in model.trainable_variables]


@tf.function(autograph=False)
def train_step(x, y):
    with tf.GradientTape() as tape:
        logits = tf.cast(model(x, training=True), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits)
        loss = tf.reduce_mean(losses)
    if hvd.size() > 1:
        tape = hvd.DistributedGradientTape(tape, num_groups=4)
    gradients = tape.gradient(loss, values)
    decayed = [g + 1e-4 * value for g, value in zip(gradients, values, strict=True)]
    optimizer.apply(decayed, model.trainable_variables)
    return loss


hvd.broadcast_variables([variable.value for variable in model.variables], root_rank=0)
for step in range(steps + 3):
    if step == 3:
        start = time.perf_counter()
    index = tf.random.uniform((batch,), 0, 32, tf.int32)
    loss = float(train_step(tf.gather(pool, index), tf.gather(labels, index)))
if hvd.rank() == 0:
    print("images_per_second", batch * steps * hvd.size() / (time.perf_counter() - start))
