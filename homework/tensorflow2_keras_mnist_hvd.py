"""MNIST with Keras's fit on all ranks, in eight steps: metrics_N.csv at N ranks and weights.

mpirun -n 4 python tensorflow2_keras_mnist_hvd.py --data /path/to/mnist --epochs 4

It needs hvdtrain: Horovod's own optimizer for Keras averages nothing with Keras 3.
"""

import argparse
import csv
import gzip
import time
from pathlib import Path

import keras
import numpy as np

import hvdtrain.keras as hvd

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
# Step: pin device. Done by init: a GPU a local rank; on CPUs this rank's share of the cores.
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

# Small enough to stay in memory: images of shape (n, 28, 28, 1) and labels.
train_x, test_x = [(x[..., None] / 255).astype(args.dtype) for x in (train_x, test_x)]
train_y, test_y = [y.astype("int64") for y in (train_y, test_y)]
# Step: shard data. Every image once per epoch; the ranks' parts of a batch make up the whole.
batch = args.batch_size * hvd.size()
train = hvd.shard((train_x, train_y), global_batch=batch, seed=args.seed)
mine = slice(hvd.rank(), None, hvd.size())

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
# Step: distribute optimizer. Keras's own fit then trains on the data of all ranks.
optimizer = hvd.DistributedOptimizer(optimizer)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer, loss, metrics=["accuracy"])


# ------------------------------------------------------------------------------------ training
class Report(keras.callbacks.Callback):
    """Prints a line per epoch, and writes all of them, on rank 0."""

    COLUMNS = "epoch train_loss train_accuracy validation_loss validation_accuracy seconds"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[list[float]] = []
        self.started = self.seconds = 0.0

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self.started = time.perf_counter()

    def on_test_begin(self, logs: dict | None = None) -> None:
        self.seconds = time.perf_counter() - self.started  # the validation is not timed

    def on_epoch_end(self, epoch: int, logs: dict | None = None) -> None:
        means = [logs[name] for name in ("loss", "accuracy", "val_loss", "val_accuracy")]
        self.rows.append([epoch + 1, *np.round(means, 12).tolist(), round(self.seconds, 3)])
        if hvd.rank() == 0:
            line = "epoch {}: loss {:.4f} accuracy {:.4f}, validation {:.4f} {:.4f}, {} s"
            print(line.format(*self.rows[-1]))
            with (args.out / f"metrics_{hvd.size()}.csv").open("w", newline="") as file:
                csv.writer(file, lineterminator="\n").writerows([self.COLUMNS.split(), *self.rows])


args.out.mkdir(parents=True, exist_ok=True)
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),  # Step: broadcast state
    hvd.callbacks.MetricAverageCallback(),  # Step: average metrics, by their sums and counts
    # Step: save checkpoint. Rank 0 alone writes, a whole file or none.
    hvd.callbacks.ModelCheckpoint(args.out / "model.weights.h5", save_weights_only=True),
    Report(),
]
if args.warmup_epochs:  # Bonus: warm-up, from the learning rate of one rank to that of all
    rate = args.lr * hvd.size()
    callbacks.append(hvd.callbacks.LearningRateWarmupCallback(rate, args.warmup_epochs))
model.fit(
    train,
    epochs=args.epochs,
    shuffle=False,  # by Keras: hvd.shard draws an order for each epoch
    validation_data=(test_x[mine], test_y[mine]),
    callbacks=callbacks,
    verbose=0,
)
