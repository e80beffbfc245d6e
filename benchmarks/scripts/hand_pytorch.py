"""The same by hand, with all that hvdtrain tunes: what a patient expert would write."""

import ctypes
import os
import sys
import time

os.environ.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
libc = ctypes.CDLL("libc.so.6")
libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)

import horovod.torch as hvd  # noqa: E402
import torch  # noqa: E402

from hvdtrain.workloads.resnet.pytorch import torchvision  # noqa: E402

precision, batch, steps = sys.argv[1], 8, int(sys.argv[2])
hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
model = torchvision().models.resnet50()
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.0125 * hvd.size(), momentum=0.9, weight_decay=1e-4
)
if hvd.size() > 1:
    optimizer = hvd.DistributedOptimizer(
        optimizer, named_parameters=model.named_parameters(), num_groups=4
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
pool = torch.randn(32, 3, 224, 224).to(memory_format=torch.channels_last)
labels = torch.randint(0, 1000, (32,))
for step in range(steps + 3):
    if step == 3:
        start = time.perf_counter()
    index = torch.randint(0, 32, (batch,))
    x, y = pool[index].contiguous(memory_format=torch.channels_last), labels[index]
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    loss.item()
if hvd.rank() == 0:
    print("images_per_second", batch * steps * hvd.size() / (time.perf_counter() - start))
