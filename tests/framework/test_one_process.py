"""One process answers for N ranks that hold the same: each collective in closed form."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """
import torch
import torch.distributed as dist
from hvdtrain.commands.verify.script.one_process import OneProcess, UnreplayableError

OneProcess(torch, 3).install()
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
dist.reduce_scatter_tensor(part, x + 1)
assert part.item() == 3.0
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


def test_collectives_of_three_equal_ranks() -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == "refused torch.distributed.send", done.stderr[-3000:]
