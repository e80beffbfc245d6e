"""One process answers for N ranks that hold the same: each collective in closed form."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from hvdtrain.system.machine.frameworks import is_installed
from tests.conftest import ROOT

SCRIPT = """
from types import SimpleNamespace

import torch
import torch.distributed as dist
from hvdtrain.commands.verify.script.one_process import OneProcess, UnreplayableError

draws = SimpleNamespace(gathered=False)
OneProcess(torch, 3, draws).install()
dist.init_process_group("gloo", rank=1, world_size=3)
assert (dist.get_rank(), dist.get_world_size()) == (0, 3)
x = torch.arange(3.0)
y = x.clone()
assert dist.all_reduce(y) is None and torch.equal(y, 3 * x)
dist.all_reduce(y, op=dist.ReduceOp.AVG, async_op=True).wait()
dist.all_reduce(y, dist.ReduceOp.MAX)
dist.broadcast(y, src=2)
assert torch.equal(y, 3 * x)
dist.reduce(y, 0)
assert torch.equal(y, 9 * x)
work = dist.all_reduce(y, dist.ReduceOp.MAX, None, True)
assert work.wait() and work.get_future().then(lambda future: future.value()[0]).wait() is y
parts = [torch.zeros(3) for _ in range(3)]
dist.all_gather(parts, x)
assert torch.equal(torch.stack(parts), torch.stack([x] * 3))
whole = torch.zeros(9)
dist.all_gather_into_tensor(whole, x)
assert torch.equal(whole, torch.cat([x] * 3))
part = torch.zeros(1)
dist.reduce_scatter_tensor(output=part, input=x + 1)
assert part.item() == 3.0
with torch.no_grad():
    dist.all_gather([torch.zeros(65) for _ in range(3)], torch.ones(65))
assert draws.gathered
assert dist.init_device_mesh("cpu", (3,)).size() == 1
objects = [None] * 3
dist.all_gather_object(objects, {"loss": 1.5})
assert objects == [{"loss": 1.5}] * 3
dist.barrier()
dist.destroy_process_group(dist.new_group(backend="gloo"))
dist.barrier(dist.new_group([0, 1, 2]))
sampler = torch.utils.data.DistributedSampler(range(7), shuffle=False)
assert (sampler.num_replicas, sampler.rank, len(sampler)) == (3, 0, 3)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
model(x[None]).sum().backward()
assert torch.equal(model.module.weight.grad[0], x)  # of a group of one process
try:
    dist.send(x, 1)
except UnreplayableError as error:
    print("refused", error)
"""

# The same of Horovod for TensorFlow, and what the iterators of three uneven ranks gave.
TENSORFLOW = """
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import tensorflow as tf
from hvdtrain.commands.verify.hooks import AfterImport, Depth
from hvdtrain.commands.verify.script.one_process import UnreplayableError
from hvdtrain.commands.verify.script.replay import Replay, ReplayPlan
from hvdtrain.commands.verify.script.replay_tensorflow import TensorFlowReplay

folder, plain = Path(sys.argv[1]), tf.data.Dataset.__iter__
x = np.arange(16, dtype=np.float32).reshape(8, 2)


def replayed(rank, ranks=0):
    path, record = folder / f"{rank}.json", SimpleNamespace(ended="updates", hvdtrain=False)
    plan = ReplayPlan(folder, ranks, exact=True)
    made = TensorFlowReplay(
        Replay(plan, SimpleNamespace(path=path, record=record)), SimpleNamespace(tape=Depth())
    )
    made.tf = tf
    data = tf.data.Dataset.from_tensor_slices({"x": x, "y": np.arange(8)}).shard(3, rank).batch(2)
    return made, list(made._iterator(plain, data))


for rank in range(3):
    kept, elements = replayed(rank)
    assert [len(each["y"]) for each in elements] == [2, 1 if rank < 2 else 0][: len(elements)]
    kept.replay.finish()
one, elements = replayed(0, 3)
for each, indices in zip(elements, ([0, 3, 1, 4, 2, 5], [6, 7]), strict=True):
    assert each["x"].dtype == tf.float64
    np.testing.assert_array_equal(each["x"], x[indices])
    np.testing.assert_array_equal(each["y"], indices)

AfterImport({"horovod.tensorflow.mpi_ops": one.horovod}).install()
import horovod.tensorflow as hvd

hvd.init()
assert (hvd.rank(), hvd.size(), hvd.local_size(), hvd.global_process_set.size()) == (0, 3, 3, 3)
value = tf.constant([1.0, 2.0])
for op, expected in ((hvd.Sum, 3 * value), (hvd.Average, value), (hvd.Product, value**3)):
    np.testing.assert_array_equal(hvd.allreduce(value, op=op), expected)
np.testing.assert_array_equal(hvd.grouped_allreduce([value, value], op=hvd.Max)[1], value)
np.testing.assert_array_equal(tf.function(hvd.allgather)(value), [1, 2] * 3)
assert hvd.allgather_object({"loss": 1.5}) == [{"loss": 1.5}] * 3
variable = tf.Variable(value)
hvd.broadcast_variables([variable], root_rank=0)
slices = tf.IndexedSlices(value[:, None], tf.constant([0, 1]), tf.constant([4, 1]))
dense = tf.convert_to_tensor(hvd.allreduce(slices))
np.testing.assert_allclose(dense[:, 0], [1, 2, 0, 0])
with tf.GradientTape() as tape:
    loss = tf.reduce_sum(variable**2)
gradient = hvd.DistributedGradientTape(tape, op=hvd.Sum).gradient(loss, [variable])
np.testing.assert_array_equal(gradient[0], 6 * value)
try:
    hvd.alltoall(value)
except UnreplayableError as error:
    print("refused", error)
"""
CASES = [("torch", SCRIPT, "torch.distributed.send")]
CASES += [("horovod.tensorflow.mpi_lib", TENSORFLOW, "hvd.alltoall")]


@pytest.mark.parametrize(("module", "script", "refused"), CASES)
def test_collectives_of_three_equal_ranks(
    module: str, script: str, refused: str, tmp_path: Path
) -> None:
    if not is_installed(module):
        pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", script, tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == f"refused {refused}", done.stderr[-3000:]
