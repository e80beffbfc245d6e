"""Some steps over Horovod in which one rank sleeps before each backward pass.

late.py RANK MILLISECONDS STEPS
"""

from __future__ import annotations

import statistics
import sys
import time

import horovod.torch as hvd
import torch

late, milliseconds, steps = (int(word) for word in sys.argv[1:])
hvd.init()
torch.manual_seed(0)
torch.set_num_threads(1)
net = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(4)])
optimizer = hvd.DistributedOptimizer(
    torch.optim.SGD(net.parameters(), lr=0.01), named_parameters=net.named_parameters()
)
hvd.broadcast_parameters(net.state_dict(), root_rank=0)
pauses = []
for _ in range(steps):
    loss = net(torch.randn(32, 64)).square().mean()
    if hvd.rank() == late:
        began = time.monotonic()
        time.sleep(milliseconds / 1000)
        pauses.append(time.monotonic() - began)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
if pauses:
    print(statistics.median(pauses))
