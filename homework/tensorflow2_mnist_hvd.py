"""MNIST with TensorFlow 2 over Horovod, in eight steps: metrics_N.csv at N ranks and weights.

mpirun -n 4 python tensorflow2_mnist_hvd.py --data /path/to/mnist --epochs 4
"""

import argparse
import csv
import gzip
import math
import os
import time
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")  # keeps its banners away
import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf

# ------------------------------------------------------------------------------------- options
parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
option = parser.add_argument
option("--data", type=Path, help="folder of MNIST's IDX files; without it scikit-learn's digits")
option("--epochs", type=int, default=16)
option("--batch-size", "--batch_size", type=int, default=256, help="images per step and rank")
option("--lr", type=float, default=0.01, help="learning rate of one rank")
option("--dtype", choices=("float32", "float64"), default="float32")
option("--no-dropout", "--no_dropout", action="store_true", help="for exact comparisons")
option("--seed", type=int, default=0)
option("--warmup-epochs", "--warmup_epochs", type=float, default=0, help="the bonus")
option("--out", type=Path, default=Path(), help="folder for the metrics and the model")
args = parser.parse_args()

hvd.init()  # Step: initialize
# Step: pin device. A GPU a local rank; on CPUs this rank's share of the cores.
gpus = tf.config.list_physical_devices("GPU")
tf.config.set_visible_devices(gpus[hvd.local_rank()] if gpus else [], "GPU")
cores = min(len(os.sched_getaffinity(0)), os.cpu_count() // hvd.local_size())
tf.config.threading.set_intra_op_parallelism_threads(max(1, cores))
keras.utils.set_random_seed(args.seed + hvd.rank())  # else all would drop the same neurons
keras.config.set_floatx(args.dtype)


# ---------------------------------------------------------------------------------------- data
def read_idx(name: str) -> np.ndarray:
    """An IDX file: two zero bytes, the type, the number of dimensions, each of them, the values."""
    paths = [args.data / sub / (name + end) for sub in ("", "MNIST/raw") for end in ("", ".gz")]
    path = next((path for path in paths if path.is_file()), None)
    if path is None:
        parser.error(f"--data {args.data}: {name}[.gz] is neither there nor under MNIST/raw")
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    shape = np.frombuffer(raw, ">i4", count=raw[3], offset=4)
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape)


if args.data:
    train_x, test_x = [read_idx(f"{part}-images-idx3-ubyte") for part in ("train", "t10k")]
    train_y, test_y = [read_idx(f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")]
else:  # 1,797 digits of 8x8 with values up to 16: make them 24x24 and add a margin of 2
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = np.kron(digits.images * 255 / 16, np.ones((1, 3, 3))).astype(np.uint8)
    images = np.pad(images, ((0, 0), (2, 2), (2, 2)))
    (train_x, test_x), (train_y, test_y) = np.split(images, [1500]), np.split(digits.target, [1500])

# Small enough to stay in memory as bytes: images of shape (n, 28, 28, 1) and labels.
train_x, test_x = [tf.constant(x[..., None]) for x in (train_x, test_x)]
train_y, test_y = [tf.constant(y, tf.int64) for y in (train_y, test_y)]
# Step: shard data. The ranks cut each global batch: every image once per epoch, no part empty.
mine = slice(hvd.rank(), None, hvd.size())
steps = min(math.ceil(len(train_x) / args.batch_size / hvd.size()), len(train_x) // hvd.size())

# --------------------------------------------------------------------------------------- model
model = keras.Sequential(
    [
        keras.Input((28, 28, 1)),
        keras.layers.Conv2D(32, 3, activation="relu"),
        keras.layers.Conv2D(64, 3, activation="relu"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Dropout(0 if args.no_dropout else 0.25),
        keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dropout(0 if args.no_dropout else 0.5),
        keras.layers.Dense(10),
    ]
)
# Step: scale learning rate. The global batch is as many times as large.
optimizer = keras.optimizers.SGD(args.lr * hvd.size(), momentum=0.9)
optimizer.build(model.trainable_variables)
# Step: broadcast state. Horovod takes the value of a Keras variable.
hvd.broadcast_variables([v.value for v in model.weights + optimizer.variables], root_rank=0)


@tf.function
def forward(x: tf.Tensor, y: tf.Tensor, training: bool) -> tuple[tf.Tensor, tf.Tensor]:
    """The sum of the losses; and [that sum, right answers, images], to be added up."""
    logits = model(tf.cast(x, args.dtype) / 255, training=training)
    loss = tf.reduce_sum(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    right = tf.math.count_nonzero(tf.argmax(logits, 1) == y)
    return loss, tf.stack([tf.cast(value, tf.float64) for value in (loss, right, tf.size(y))])


@tf.function(input_signature=[tf.TensorSpec([None], tf.int64), tf.TensorSpec([], args.dtype)])
def train(picked: tf.Tensor, batch: tf.Tensor) -> tf.Tensor:
    """One step with these images of a batch of so many."""
    with tf.GradientTape() as tape:
        loss, counts = forward(tf.gather(train_x, picked), tf.gather(train_y, picked), True)
        loss /= batch
    # Step: distribute optimizer. A sum, as each rank divides by the size of the global batch.
    tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
    gradients = tape.gradient(loss, [v.value for v in model.trainable_variables])
    optimizer.apply(gradients, model.trainable_variables)
    return counts


def save(rows: list[list[float]]) -> None:
    """Print the last row, write all of them, and save the model: whole, or not at all."""
    print("epoch {}: loss {:.4f} accuracy {:.4f}, validation {:.4f} {:.4f}, {} s".format(*rows[-1]))
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / f"metrics_{hvd.size()}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([COLUMNS.split(), *rows])
    model.save_weights(args.out / "tmp.weights.h5")
    (args.out / "tmp.weights.h5").replace(args.out / "model.weights.h5")


# ------------------------------------------------------------------------------------ training
COLUMNS = "epoch train_loss train_accuracy validation_loss validation_accuracy seconds"
rows = []
for epoch in range(1, args.epochs + 1):
    started = time.perf_counter()
    order = np.random.default_rng([args.seed, epoch]).permutation(len(train_x))
    trained = np.zeros(3)
    for step, batch in enumerate(np.array_split(order, steps)):
        if args.warmup_epochs:  # Bonus: warm-up, from the learning rate of one rank to that of all
            done = min(1, (epoch - 1 + step / steps) / args.warmup_epochs)
            optimizer.learning_rate = args.lr * (1 + (hvd.size() - 1) * done)
        trained += train(batch[mine], len(batch)).numpy()
    seconds = time.perf_counter() - started  # of the training; the validation is not timed

    validated = np.zeros(3)
    for x, y in tf.data.Dataset.from_tensor_slices((test_x[mine], test_y[mine])).batch(1000):
        validated += forward(x, y, False)[1].numpy()

    # Step: average metrics, by their sums and counts
    trained, validated = hvd.allreduce(tf.stack([trained, validated]), op=hvd.Sum).numpy()
    means = np.append(trained[:2] / trained[2], validated[:2] / validated[2])
    rows.append([epoch, *means.round(12).tolist(), round(seconds, 3)])
    if hvd.rank() == 0:  # Step: save checkpoint
        save(rows)
