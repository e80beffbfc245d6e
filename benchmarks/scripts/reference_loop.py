"""ResNet as torchvision's reference training has it, by its documentation: nothing is tuned.

SGD at momentum 0.9 and weight decay 1e-4, autocast with a GradScaler, DistributedDataParallel, and
each step's loss and accuracies read, for which the step has to wait. The images are
channels_last, as PyTorch's performance guide advises. See plain_ddp.py for the command line.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
from arguments import LOW, batches, begin, finish, parse
from torch import nn

from hvdtrain.workloads.resnet.pytorch import torchvision

options = parse()
device, gpu = begin(options)
torch.manual_seed(0)
model = torchvision().models.get_model(options.model).to(device, memory_format=torch.channels_last)
model = nn.parallel.DistributedDataParallel(model, device_ids=[device.index] if gpu else None)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(
    model.parameters(), lr=0.0125 * dist.get_world_size(), momentum=0.9, weight_decay=1e-4
)
scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")
dtype = LOW.get(options.precision)
model.train()
seen: dict[str, float] = {"loss": 0.0, "top1": 0.0, "top5": 0.0}
for step, (image, target) in enumerate(batches(options, device)):
    if step == options.warm:
        torch.cuda.synchronize() if gpu else None
        start = time.perf_counter()
    image = image.to(memory_format=torch.channels_last)
    with torch.autocast(device.type, dtype, enabled=dtype is not None):
        output = model(image)
        loss = criterion(output, target)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    with torch.inference_mode():
        right = output.topk(5, 1).indices == target[:, None]
        seen["top1"] += right[:, :1].sum().item() / len(target)
        seen["top5"] += right.sum().item() / len(target)
    seen["loss"] += loss.item()
finish(options, start)
sys.stdout.flush()
os._exit(0)
