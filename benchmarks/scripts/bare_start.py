"""Seconds from the start of the process to the first update: MNIST, as one would write it by hand.

python bare_start.py FRAMEWORK DIRECTORY
"""

import gzip
import sys
import time
from pathlib import Path

import numpy as np
import psutil

framework, directory = sys.argv[1], Path(sys.argv[2])
if framework == "pytorch":
    import horovod.torch as hvd
    import torch
    import torch.nn.functional as F
    from torch import nn
else:
    import horovod.tensorflow as hvd
    import tensorflow as tf

BATCH = 64


def idx(name: str, offset: int) -> np.ndarray:
    packed = (directory / f"{name}.gz").read_bytes()
    return np.frombuffer(bytearray(gzip.decompress(packed)), np.uint8)[offset:]


def torch_step(images: np.ndarray, labels: np.ndarray) -> float:
    torch.set_num_threads(1)
    convolutions = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU())
    dense = (nn.MaxPool2d(2), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))
    net = nn.Sequential(*convolutions, *dense)
    optimizer = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, net.named_parameters())
    hvd.broadcast_parameters(net.state_dict(), 0)
    loss = F.cross_entropy(net(torch.from_numpy(images)[:, None] / 255), torch.from_numpy(labels))
    loss.backward()
    optimizer.step()
    return loss.item()


def tensorflow_step(images: np.ndarray, labels: np.ndarray) -> float:
    layers = tf.keras.layers
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    convolutions = (
        layers.Conv2D(32, 3, activation="relu"),
        layers.Conv2D(64, 3, activation="relu"),
    )
    dense = (layers.MaxPool2D(), layers.Flatten(), layers.Dense(128, "relu"), layers.Dense(10))
    net = tf.keras.Sequential([layers.Input((28, 28, 1)), *convolutions, *dense])
    optimizer = tf.keras.optimizers.SGD(0.01, momentum=0.9)
    optimizer.build(net.trainable_variables)
    hvd.broadcast_variables([variable.value for variable in net.variables], 0)

    @tf.function
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, net(x, training=True))
            loss = tf.reduce_mean(losses)
        weights = net.trainable_variables
        gradients = tape.gradient(loss, weights)
        optimizer.apply_gradients(zip(hvd.grouped_allreduce(gradients), weights, strict=True))
        return loss

    return float(step(images[..., None].astype("float32") / 255, labels))


hvd.init()
images = idx("train-images-idx3-ubyte", 16).reshape(-1, 28, 28)
labels = idx("train-labels-idx1-ubyte", 8).astype(np.int64)
mine = slice(BATCH * hvd.rank(), BATCH * (hvd.rank() + 1))
{"pytorch": torch_step, "tensorflow": tensorflow_step}[framework](images[mine], labels[mine])
if hvd.rank() == 0:
    print("seconds_to_first_step", time.time() - psutil.Process().create_time())
