"""ResNet-50 with Horovod as its documentation shows it: no tuning. Prints images/s."""

import sys
import time

import horovod.torch as hvd
import torch

from hvdtrain.workloads.resnet.pytorch import torchvision

hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
batch, steps = 8, int(sys.argv[1])
model = torchvision().models.resnet50()
optimizer = torch.optim.SGD(model.parameters(), lr=0.0125 * hvd.size(), momentum=0.9)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
x, y = torch.randn(batch, 3, 224, 224), torch.randint(0, 1000, (batch,))
for step in range(steps + 3):
    if step == 3:
        start = time.perf_counter()
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
if hvd.rank() == 0:
    print("images_per_second", batch * steps * hvd.size() / (time.perf_counter() - start))
