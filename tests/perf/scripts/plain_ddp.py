"""ResNet-18 over DistributedDataParallel, as its tutorial has it, with what hvdtrain tunes."""

import ctypes
import os
import sys
import time

libc = ctypes.CDLL("libc.so.6")
libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hvdtrain.workloads.resnet.pytorch import torchvision  # noqa: E402

batch, precision, steps = 8, sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo")
torch.manual_seed(0)
torch.set_num_threads(1)
model = DistributedDataParallel(
    torchvision().models.resnet18(), broadcast_buffers=False, gradient_as_bucket_view=True
)
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.0125 * dist.get_world_size(), momentum=0.9, weight_decay=1e-4
)
pool = torch.randn(32, 3, 224, 224).to(memory_format=torch.channels_last)
labels = torch.randint(0, 1000, (32,))
for step in range(steps + 5):
    if step == 5:
        start = time.perf_counter()
    index = torch.randint(0, 32, (batch,))
    x, y = pool[index].contiguous(memory_format=torch.channels_last), labels[index]
    optimizer.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    loss.item()
if dist.get_rank() == 0:
    rate = batch * steps * dist.get_world_size() / (time.perf_counter() - start)
    print("images_per_second", rate)
# As a killed process: the end of the group is not what is measured.
sys.stdout.flush()
os._exit(0)
