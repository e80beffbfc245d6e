"""On every rank, for test_comm_options.py: Adasum of the ranks' gradients, against its closed form.

The gradient of each parameter is the mean of some columns of ``x`` over the samples of a part. At
the tail all parts but one are empty.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.adapters.select import adapter
from hvdtrain.config.comm_options import CommOptions
from hvdtrain.steps.sharding import Shards

SAMPLES, BATCH, COLUMNS = 5, 4, (7, 30)  # of two parameters

framework, folder = sys.argv[1:]
hvd: Any = adapter(framework, "horovod", comm_options=CommOptions(reduction="adasum"))
world = hvd.initialize()
hvd.pin_device()
Array = np.ndarray[Any, Any]


def adasum(gradients: list[Array]) -> Array:
    """Combine by pairs: the mean of what points the same way, the sum of what is orthogonal."""
    if len(gradients) == 1:
        return gradients[0]
    half = len(gradients) // 2
    a, b = adasum(gradients[:half]), adasum(gradients[half:])
    dot = float(a @ b)
    of_a, of_b = (1 - dot / (2 * float(v @ v)) if v.any() else 1.0 for v in (a, b))
    return of_a * a + of_b * b


def expected(x: Array) -> list[Array]:
    """Return what each step's gradient of one parameter is."""
    parts = [Shards(SAMPLES, BATCH, 3, rank, world.size).epoch(0) for rank in range(world.size)]
    return [
        adasum([x[part.indices].sum(0) / max(1, part.count) for part in step])
        for step in zip(*parts, strict=True)
    ]


def pytorch(data: list[Array], shards: Shards) -> list[list[Array]]:
    import torch

    net = torch.nn.ParameterList([torch.zeros(n, dtype=torch.float64) for n in COLUMNS])
    model, optimizer = hvd.distribute_optimizer(net, torch.optim.SGD(net.parameters(), lr=1.0))
    found = []
    for part in shards.epoch(0):
        optimizer.zero_grad()
        inputs = [torch.from_numpy(x[part.indices]) for x in data]
        sum((x @ w).mean() for x, w in zip(inputs, model, strict=True)).backward()
        found.append([weights.grad.numpy().copy() for weights in model])
        optimizer.step()
    hvd.check_replicas(model, optimizer)
    return found


def tensorflow(data: list[Array], shards: Shards) -> list[list[Array]]:
    import keras
    import tensorflow as tf

    weights = [keras.Variable(np.zeros(n), dtype="float64") for n in COLUMNS]
    _, optimizer = hvd.distribute_optimizer(keras.Sequential(), keras.optimizers.SGD(1.0))

    @tf.function
    def update(means: Any) -> None:
        optimizer.apply(means, weights)

    found = []
    for part in shards.epoch(0):
        with np.errstate(invalid="ignore"):
            means = [tf.constant(x[part.indices].sum(0) / np.float64(part.count)) for x in data]
        update(means)
        found.append([-one.numpy() for one in weights])
        for one in weights:
            one.assign(tf.zeros_like(one.value))
    return found


random = np.random.default_rng(0)
data = [random.normal(size=(SAMPLES, n)) + 0.5 for n in COLUMNS]
run = pytorch if framework == "pytorch" else tensorflow
found = run(data, hvd.shard_data(SAMPLES, global_batch=BATCH, seed=3))
for place, x in enumerate(data):
    for step, value in enumerate(expected(x)):
        np.testing.assert_allclose(found[step][place], value, rtol=1e-12, atol=1e-12)
told = hvd.communicator.gather(b"".join(one.tobytes() for step in found for one in step))
assert told == [told[0]] * world.size  # bit-equal
Path(folder, f"{world.rank}-of-{world.size}").touch()
