"""ResNet over DistributedDataParallel, as its tutorial has it, with what hvdtrain tunes.

plain_ddp.py PRECISION STEPS: ResNet-18, batch 8; what else there is to say, arguments.py tells.
"""

import ctypes
import os
import sys
import time

libc = ctypes.CDLL("libc.so.6")
libc.mallopt(-4, 0), libc.mallopt(-1, 2**31 - 1)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from arguments import LOW, batches, begin, finish, parse  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

from hvdtrain.workloads.resnet.pytorch import torchvision  # noqa: E402

options = parse()
device, gpu = begin(options)
torch.manual_seed(0)
model = torchvision().models.get_model(options.model).to(device)
if gpu:
    torch.backends.cudnn.benchmark = True
    model = model.to(memory_format=torch.channels_last)
model = DistributedDataParallel(model, broadcast_buffers=False, gradient_as_bucket_view=True)
optimizer = torch.optim.SGD(
    model.parameters(),
    lr=0.0125 * dist.get_world_size(),
    momentum=0.9,
    weight_decay=1e-4,
    fused=True if gpu else None,
)
scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
dtype = LOW.get(options.precision)
for step, (x, y) in enumerate(batches(options, device)):
    if step == options.warm:
        torch.cuda.synchronize() if gpu else None
        start = time.perf_counter()
    x = x.contiguous(memory_format=torch.channels_last)
    optimizer.zero_grad()
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        loss = torch.nn.functional.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if not gpu or step % 20 == 0:
        loss.item()
finish(options, start)
# As a killed process: the end of the group is not what is measured.
sys.stdout.flush()
os._exit(0)
