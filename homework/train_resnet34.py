"""ResNet-34 with TensorFlow 2 in one process, and how many images a second it takes.

python train_resnet34.py --data /path/to/imagenet --epochs 1 --num-steps 50
"""

import argparse
import math
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keeps its banners away
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
option("--batch-size", "--batch_size", type=int, default=32, help="images per step")
option("--image-size", "--image_size", type=int, default=224, help="pixels a side")
option("--lr", type=float, default=0.0125, help="learning rate")
option("--out", type=Path, default=Path(), help="folder for the weights")
args = parser.parse_args()

cores = len(os.sched_getaffinity(0))
keras.utils.set_random_seed(0)

# ---------------------------------------------------------------------------------------- data
SHAPE = (args.image_size, args.image_size, 3)
if args.data:
    classes = sorted(folder.name for folder in (args.data / "train").glob("*/"))
    paths, val_paths = [sorted((args.data / d).glob("*/*.[jJpP]*")) for d in ("train", "val")]
    labels = [classes.index(path.parent.name) for path in paths + val_paths]
    if not paths:
        parser.error(f"--data {args.data}: no images under train/CLASS/")
else:
    paths, val_paths = ["made up"] * args.batch_size * (args.num_steps or 100), []
    classes, labels, made_up = range(1000), [0] * len(paths), tf.random.uniform(SHAPE, maxval=255)
files, labels = tf.constant([str(p) for p in paths + val_paths]), tf.constant(labels, tf.int64)


def read(index: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    if not args.data:
        return made_up, labels[index]
    image = tf.io.decode_image(tf.io.read_file(files[index]), 3, expand_animations=False)
    return tf.image.resize(image, SHAPE[:2]), labels[index]


def load(parts: list[np.ndarray]) -> tf.data.Dataset:
    """A batch for each of ``parts``, indices into ``files``, unless empty; read ahead."""
    kind = tf.TensorSpec([None], tf.int64)
    stream = tf.data.Dataset.from_generator(lambda: filter(len, parts), output_signature=kind)
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
optimizer = keras.optimizers.SGD(args.lr, momentum=0.9)


@tf.function(reduce_retracing=True)
def forward(x: tf.Tensor, y: tf.Tensor, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of the losses; and [that sum, right answers, images], to be added up."""
    logits = model(x, training=training)
    loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    right = tf.math.count_nonzero(tf.argmax(logits, 1) == y)
    return loss, tf.stack([tf.cast(value, tf.float64) for value in (loss, right, tf.size(y))])


@tf.function(reduce_retracing=True)
def train(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    """One step with a batch."""
    with tf.GradientTape() as tape:
        loss, counts = forward(x, y, True)
        loss /= tf.cast(tf.size(y), tf.float32)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    return counts


# ------------------------------------------------------------------------------------ training
steps = math.ceil(len(paths) / args.batch_size)
total = min(args.epochs * steps, args.num_steps or math.inf)
speeds = []  # images a second, by step
for epoch in range(math.ceil(total / steps)):
    order = np.random.default_rng(epoch).permutation(len(paths))
    batches = np.array_split(order, steps)[: total - len(speeds)]
    sums = np.zeros((2, 3))  # of training and validation
    started = time.perf_counter()
    for batch, (x, y) in zip(batches, load(batches), strict=True):
        sums[0] += train(x, y).numpy()
        speeds.append(len(batch) / (time.perf_counter() - started))
        started = time.perf_counter()
        print(f"step {len(speeds)}: {speeds[-1]:.2f} images/s")

    indices = np.arange(len(paths), len(labels))
    for x, y in load(np.split(indices, range(args.batch_size, len(indices), args.batch_size))):
        sums[1] += forward(x, y, False)[1].numpy()
    means = [(row[:2] / row[2]).round(4).tolist() for row in sums if row[2]]
    print(f"epoch {epoch + 1}: [loss, accuracy] of training and validation: {means}")
    args.out.mkdir(parents=True, exist_ok=True)
    model.save_weights(args.out / f"resnet34-{epoch + 1}.weights.h5")

print(f"{np.mean(speeds[1:]):.2f} +- {np.std(speeds[1:]):.2f} images/s")
