"""On every rank, for test_comm_options.py: 16-bit gradients against closed forms.

    gradients.py FRAMEWORK STRATEGY FOLDER

The gradient of each parameter is the mean of a column of ``x`` over the samples of a part. Five
samples in global batches of four leave uneven parts, and at the tail empty ones.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.adapters.select import adapter
from hvdtrain.config.strategies import NONE, STRATEGIES, CommOptions
from hvdtrain.steps.sharding import Part, Shards

SAMPLES, BATCH, COLUMNS = 5, 4, 1000
ELEMENTS = COLUMNS + 100  # of a message at most: some are flags, or fill it up
# Of each type: the largest relative error of rounding to it, 2 to the minus bits of its
# significand, and the largest error where a number is smaller than the normal ones of the type.
ROUNDING = {"fp16": (2.0**-11, 2.0**-25), "bf16": (2.0**-8, 2.0**-134)}
OF_FP32 = 2.0**-24  # a cast from fp64 may go through fp32

framework, strategy, folder = sys.argv[1:]
hvd: Any = adapter(framework, strategy)
world = hvd.initialize()
hvd.pin_device()
sent: list[tuple[str, int]] = []  # what the library was handed: type and bytes
Array = np.ndarray[Any, Any]


def watch_pytorch() -> None:
    """Note what the library is given to sum."""
    import torch.distributed as dist

    def noting(call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*tensors: Any, **options: Any) -> Any:
            tensor = tensors[-1]  # what goes in; before it, if it is another one, what comes out
            kind = str(tensor.dtype).removeprefix("torch.")
            if tensor.numel() > COLUMNS // 2:  # no signals
                sent.append((kind, tensor.numel() * tensor.element_size()))
            return call(*tensors, **options)

        return noted

    if strategy == "fsdp":
        from hvdtrain.adapters.pytorch import fsdp

        fsdp.reduce_scatter = noting(fsdp.reduce_scatter)
    elif strategy in ("ddp", "zero"):
        dist.all_reduce = noting(dist.all_reduce)
    else:
        import horovod.torch

        horovod.torch.allreduce_async_ = noting(horovod.torch.allreduce_async_)


def watch_tensorflow() -> None:
    import horovod.tensorflow.mpi_ops as ops

    call = ops._allreduce

    def noted(tensor: Any, **options: Any) -> Any:
        sent.append((tensor.dtype.name, tensor.dtype.size * tensor.shape.num_elements()))
        return call(tensor, **options)

    ops._allreduce = noted


class WatchedMpi:
    """A communicator of MPI that notes what it is given to sum."""

    def __init__(self, communicator: Any) -> None:
        self._communicator = communicator

    def __getattr__(self, name: str) -> Any:
        return getattr(self._communicator, name)

    def Dup(self) -> WatchedMpi:  # noqa: N802 (mpi4py's)
        return WatchedMpi(self._communicator.Dup())

    def _note(self, message: Any) -> None:
        if isinstance(message, list):
            values, count, kind = message
            sent.append((f"{8 * kind.Get_size()} bits", values.nbytes))
            assert values.nbytes == count * kind.Get_size()
        elif len(message) > COLUMNS:
            sent.append((str(message.dtype), message.nbytes))

    def Iallreduce(self, where: Any, message: Any, *operation: Any) -> Any:  # noqa: N802
        self._note(message)
        return self._communicator.Iallreduce(where, message, *operation)

    def Allreduce(self, where: Any, message: Any, *operation: Any) -> Any:  # noqa: N802
        self._note(message)
        return self._communicator.Allreduce(where, message, *operation)


def trained_pytorch(x: Array, shards: Shards) -> list[Array]:
    import torch

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.zeros(COLUMNS, dtype=torch.float64))
            self.unused = torch.nn.Parameter(torch.zeros(3, dtype=torch.float64))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (inputs @ self.weights).mean()

    net = Net()
    model, optimizer = hvd.distribute_optimizer(net, torch.optim.SGD(net.parameters(), lr=0.01))
    steps = []
    for part in shards.epoch(0):
        optimizer.zero_grad()
        model(torch.from_numpy(x[part.indices])).backward()
        assert net.unused.grad is None  # of what no rank has used
        gradient = net.weights.grad
        assert gradient is not None and gradient.dtype == torch.float64
        steps.append(whole(gradient))
        optimizer.step()
    hvd.check_replicas(model, optimizer)
    check_messages()
    return steps


def whole(tensor: Any) -> Array:
    """The values, put together from all ranks where each has a part of them."""
    values: Array = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).numpy()
    return values.copy()


def trained_tensorflow(x: Array, shards: Shards) -> list[Array]:
    import keras
    import tensorflow as tf

    weights = keras.Variable(np.zeros(COLUMNS), dtype="float64")
    _, optimizer = hvd.distribute_optimizer(keras.Sequential(), keras.optimizers.SGD(1.0))

    @tf.function
    def update(mean: Any) -> None:
        optimizer.apply([mean], [weights])

    steps = []
    for part in shards.epoch(0):
        with np.errstate(invalid="ignore"):
            update(tf.constant(x[part.indices].mean(0)))
        steps.append(-weights.numpy())
        weights.assign(tf.zeros_like(weights.value))
    check_messages()
    return steps


def trained(x: Array, compression: str) -> list[Array]:
    """Train an epoch with ``compression``; return the gradients by step."""
    hvd.comm_options = CommOptions(compression=compression)
    shards = hvd.shard_data(SAMPLES, global_batch=BATCH, seed=3)
    sent.clear()
    steps = (trained_pytorch if framework == "pytorch" else trained_tensorflow)(x, shards)
    flat = b"".join(value.tobytes() for value in steps)
    assert len(set(hvd.communicator.gather(flat))) == 1  # the same bits on all ranks
    return steps


def parts() -> Iterator[tuple[Part, ...]]:
    """The parts of all ranks, by step."""
    ranks = [Shards(SAMPLES, BATCH, 3, rank, world.size).epoch(0) for rank in range(world.size)]
    return zip(*ranks, strict=True)


def gradients(x: Array, compression: str) -> tuple[list[Array], list[Array], list[Array]]:
    """Return gradients, the true ones, and the sums of all ranks' sizes."""
    summed = trained(x, compression)
    true, sizes = [], []
    for step in parts():
        count = sum(part.count for part in step)
        true.append(sum(x[part.indices[: part.count]].sum(0) for part in step) / count)
        sizes.append(sum(abs(x[part.indices[: part.count]].sum(0)) for part in step) / count)
    return summed, true, sizes


def check_messages() -> None:
    """Compare the bytes that the library was handed, and those that are reported."""
    size = 8 if hvd.comm_options.compression == NONE else 2
    assert all(size * COLUMNS <= nbytes < size * ELEMENTS for _, nbytes in sent)
    messages = hvd.strategy.gradient_sums[-1].messages
    assert size * COLUMNS <= messages["bytes"] / messages["count"] < size * ELEMENTS


def within_the_bound(compression: str) -> None:
    """A rounding of each rank's gradient, and one for each of its additions to others."""
    random = np.random.default_rng(0)
    x = random.normal(size=(SAMPLES, COLUMNS)) * 10 ** random.uniform(-4, 4, COLUMNS)
    summed, true, sizes = gradients(x, compression)
    rounding, smallest = ROUNDING[compression]
    growth = (1 + rounding) ** world.size * (1 + OF_FP32) - 1
    for value, expected, size in zip(summed, true, sizes, strict=True):
        error = abs(value - expected)
        assert (error <= growth * size + world.size * smallest).all()
        assert (error > rounding / 8 * size).any()  # it was rounded
    kinds = {kind for kind, _ in sent}
    assert kinds == {{"fp16": "float16", "bf16": "bfloat16"}[compression]} or kinds == {"16 bits"}


def exact_where_the_type_holds_it(compression: str) -> None:
    x = 2.0 ** np.arange(-3, 5)[np.arange(COLUMNS) % 8] * np.arange(1, SAMPLES + 1)[:, None] * 4
    summed, true, _ = gradients(x, compression)
    # A quarter of at most 14 times 4 times a power of two: four bits of a significand's eight.
    assert all((value == expected).all() for value, expected in zip(summed, true, strict=True))


def overflows_only_where_a_gradient_does() -> None:
    x = np.full((SAMPLES, COLUMNS), 60000.0)
    summed, true, _ = gradients(x, "fp16")  # the sum of two would overflow
    for value, expected in zip(summed, true, strict=True):
        np.testing.assert_allclose(value, expected, rtol=(1 + 2.0**-11) ** world.size - 1)
    summed, _, _ = gradients(x * 10, "fp16")
    assert all(np.isposinf(value).all() for value in summed)  # never a number, on any rank
    summed, true, _ = gradients(x * 10, NONE)
    np.testing.assert_allclose(summed, true, rtol=1e-12)


if strategy == "mpi":
    hvd.communicator.world = WatchedMpi(hvd.communicator.world)
elif framework == "pytorch":
    watch_pytorch()
else:
    watch_tensorflow()
for compression in STRATEGIES[strategy].compressions:
    within_the_bound(compression)
    exact_where_the_type_holds_it(compression)
overflows_only_where_a_gradient_does()
Path(folder, f"{world.rank}-of-{world.size}").touch()
