"""The large MNIST net by hand: batches cut from one tensor, Horovod, all of hvdtrain's tuning."""

import ctypes
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")
libc = ctypes.CDLL("libc.so.6")
libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)

import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402

from hvdtrain.workloads.mnist.data import load  # noqa: E402
from hvdtrain.workloads.mnist.pytorch import network  # noqa: E402

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
train, _ = load(Path(sys.argv[1]))
x_all = torch.tensor(train.images)[:, None]
y_all = torch.tensor(train.labels)
model = network("tutorial")
optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=1e-4)
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), num_groups=1
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
batch, steps = 64, int(sys.argv[2])
order = torch.randperm(len(y_all))[hvd.rank() :: hvd.size()]
for step in range(steps):
    if step == 5:
        start = time.perf_counter()
    index = order[step * batch : (step + 1) * batch]
    x, y = (x_all[index].float() / 255 - 0.1307) / 0.3081, y_all[index]
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
if hvd.rank() == 0:
    seconds = time.perf_counter() - start
    print("images_per_second", batch * (steps - 5) * hvd.size() / seconds)
