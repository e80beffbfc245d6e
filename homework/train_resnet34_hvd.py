"""ResNet-34 with TensorFlow 2 over Horovod, and how many images a second it takes.

mpirun -n 4 python train_resnet34_hvd.py --data /path/to/imagenet --epochs 1 --num-steps 50
"""

import argparse
import math
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keeps its banners away
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from keras import layers

# ------------------------------------------------------------------------------------- options
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
option = parser.add_argument
option("--data", type=Path, help="holds train/CLASS/*.jpg and val/; without it a made-up image")
option("--epochs", type=int, default=1)
option("--num-steps", "--num_steps", type=int, help="stop after so many (100 made up)")
option("--batch-size", "--batch_size", type=int, default=32, help="images per step and rank")
option("--image-size", "--image_size", type=int, default=224, help="pixels a side")
option("--lr", type=float, default=0.0125, help="learning rate of one rank")
option("--out", type=Path, default=Path(), help="folder for the weights")
args = parser.parse_args()

hvd.init()  # Step: initialize
# Step: pin device. A GPU a local rank; on CPUs this rank's share of the cores.
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank()] if gpus else [], "GPU")
cores = max(1, min(len(os.sched_getaffinity(0)), os.cpu_count() // hvd.local_size()))
tf.config.threading.set_intra_op_parallelism_threads(cores)
keras.utils.set_random_seed(hvd.rank())

# ---------------------------------------------------------------------------------------- data
SHAPE = (args.image_size, args.image_size, 3)
if args.data:
    classes = sorted(folder.name for folder in (args.data / "train").glob("*/"))
    paths, val_paths = [sorted((args.data / d).glob("*/*.[jJpP]*")) for d in ("train", "val")]
    labels = [classes.index(path.parent.name) for path in paths + val_paths]
    if len(paths) < hvd.size():
        parser.error(f"--data {args.data}: {len(paths)} images under train/CLASS/, too few")
else:
    paths, val_paths = ["made up"] * args.batch_size * hvd.size() * (args.num_steps or 100), []
    classes, labels, made_up = range(1000), [0] * len(paths), tf.random.uniform(SHAPE, maxval=255)
# A batch: images, labels, and the number of images over all ranks.
BATCH = [tf.TensorSpec([None, *SHAPE]), tf.TensorSpec([None], tf.int64), tf.TensorSpec([])]
files, labels = tf.constant([str(p) for p in paths + val_paths]), tf.constant(labels, tf.int64)


def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if not args.data:
        return made_up, labels[index]
    image = tf.io.decode_image(tf.io.read_file(files[index]), 3, expand_animations=False)
    return tf.image.resize(image, SHAPE[:2]), labels[index]


def load(parts: list[np.ndarray]) -> tf.data.Dataset:
    """A batch for each of ``parts``, indices into ``files``, unless empty; read ahead."""
    stream = tf.data.Dataset.from_generator(lambda: filter(len, parts), output_signature=BATCH[1])
    kinds = (tf.float32, tf.int64)
    stream = stream.map(lambda part: tf.map_fn(read, part, fn_output_signature=kinds), cores)
    return stream.prefetch(2)


# --------------------------------------------------------------------------------------- model
def conv(x: tf.Tensor, channels: int, side: int, stride: int = 1) -> tf.Tensor:
    x = layers.Conv2D(channels, side, stride, "same", use_bias=False)(x)
    return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)


image = keras.Input(SHAPE)
x = layers.ReLU()(conv(layers.Rescaling(1 / 127.5, -1)(image), 64, 7, 2))
x = layers.MaxPooling2D(3, 2, "same")(x)
for stage, blocks in enumerate((3, 4, 6, 3)):
    for block in range(blocks):
        channels, stride = 64 * 2**stage, 2 if stage and not block else 1
        shortcut = conv(x, channels, 1, stride) if stride > 1 else x
        x = layers.ReLU()(conv(x, channels, 3, stride))
        x = layers.ReLU()(layers.Add()([conv(x, channels, 3), shortcut]))
model = keras.Model(image, layers.Dense(len(classes))(layers.GlobalAveragePooling2D()(x)))
# Step: scale learning rate. The global batch is as many times as large.
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
optimizer.build(model.trainable_variables)
# Step: broadcast state. Horovod takes the value of a Keras variable.
hvd.broadcast_variables([v.value for v in model.weights + optimizer.variables], root_rank=0)


@tf.function(reduce_retracing=True)
def forward(x: tf.Tensor, y: tf.Tensor, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of the losses; and [that sum, right answers, images], to be added up."""
    logits = model(x, training=training)
    loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    right = tf.math.count_nonzero(tf.argmax(logits, 1) == y)
    return loss, tf.stack([tf.cast(value, tf.float64) for value in (loss, right, tf.size(y))])


@tf.function(input_signature=BATCH)
def train(x: tf.Tensor, y: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """One step with this rank's part of a global batch of ``size`` images."""
    with tf.GradientTape() as tape:
        loss, counts = forward(x, y, True)
        loss /= size
    # Step: distribute optimizer. A sum, as each rank divides by the size of the global batch.
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)
    return counts


# ------------------------------------------------------------------------------------ training
steps = min(math.ceil(len(paths) / args.batch_size / hvd.size()), len(paths) // hvd.size())
total = min(args.epochs * steps, args.num_steps or math.inf)
speeds = []  # images a second over all ranks, by step
for epoch in range(math.ceil(total / steps)):
    # Step: shard data. The ranks cut each global batch: every image once per epoch, no part empty.
    order = np.random.default_rng(epoch).permutation(len(paths))
    wholes = np.array_split(order, steps)[: total - len(speeds)]
    mine = slice(hvd.rank(), None, hvd.size())
    sums = np.zeros((2, 3))  # of training and validation
    started = time.perf_counter()
    for whole, (x, y) in zip(wholes, load([part[mine] for part in wholes]), strict=True):
        sums[0] += train(x, y, len(whole)).numpy()
        speeds.append(len(whole) / (time.perf_counter() - started))
        started = time.perf_counter()
        if hvd.rank() == 0:
            print(f"step {len(speeds)}: {speeds[-1]:.2f} images/s")

    # Step: average metrics, by their sums and counts; and BatchNorm's running statistics
    running = [v.value for v in model.non_trainable_variables]
    for variable, mean in zip(running, hvd.grouped_allreduce(running), strict=True):
        variable.assign(mean)
    indices = np.arange(len(paths), len(labels))[mine]
    for x, y in load(np.split(indices, range(args.batch_size, len(indices), args.batch_size))):
        sums[1] += forward(x, y, False)[1].numpy()
    sums = hvd.allreduce(sums, op=hvd.Sum).numpy()
    if hvd.rank() == 0:  # Step: save checkpoint
        means = [(row[:2] / row[2]).round(4).tolist() for row in sums if row[2]]
        print(f"epoch {epoch + 1}: [loss, accuracy] of training and validation: {means}")
        args.out.mkdir(parents=True, exist_ok=True)
        model.save_weights(args.out / f"resnet34-{epoch + 1}.weights.h5")

if hvd.rank() == 0:
    print(f"{np.mean(speeds[1:]):.2f} +- {np.std(speeds[1:]):.2f} images/s on {hvd.size()} rank(s)")
