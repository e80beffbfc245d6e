"""A correct script that broadcasts and reduces each tensor separately."""

from pathlib import Path

import horovod.torch as hvd
import torch

hvd.init()
torch.set_num_threads(1)
torch.manual_seed(hvd.rank())
model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 2))
for tensor in model.state_dict().values():
    hvd.synchronize(hvd.broadcast_async_(tensor, root_rank=0))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.randn(40, 3, generator=torch.Generator().manual_seed(7))
for part in data.split(8):
    mine = part[hvd.rank() :: hvd.size()]
    loss = model(mine).square().mean()
    optimizer.zero_grad()
    loss.backward()
    halves = [parameter.grad / 2 for parameter in model.parameters()]
    sums = hvd.grouped_allreduce(halves, op=hvd.Average)
    for parameter, half in zip(model.parameters(), sums, strict=True):
        parameter.grad = half * 2
    handle = hvd.allreduce_async(loss.detach(), name="training loss")
    optimizer.step()
    mean = hvd.synchronize(handle)
norm = model[1]
hvd.grouped_allreduce([norm.running_mean, norm.running_var, torch.zeros(2, 3)], name="ragged")
hvd.allgather_object({"right": 3 + hvd.rank(), "of": (4, 5.0)}, name="counts")
hvd.allgather_object("words are no metric", name="words")
hvd.allgather(torch.ones(hvd.rank()), name="as many as the rank")
Path("some.lock").write_text("")  # what a lock around a download does
if hvd.rank() == 0:
    torch.save(model.state_dict(), "model.pt")
