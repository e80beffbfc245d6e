"""Sum tensors of the device by Horovod itself, in five steps; print what they were summed to.

One rank alone sends no gradients, by Horovod's optimizer or by hvdtrain's; here it sums them, too.
"""

import horovod.torch as hvd
import torch

from hvdtrain.system.machine import accelerator

hvd.init()
count = accelerator.count()
device = accelerator.take(hvd.local_rank() % count) if count else torch.device("cpu")
tensors = [torch.full((2**size,), hvd.rank() + 1.0, device=device) for size in (4, 12, 20)]
for _ in range(5):
    sums = hvd.grouped_allreduce(tensors, op=hvd.Sum, name="gradients")
if hvd.rank() == 0:
    print("sums", *sorted({float(value) for one in sums for value in (one.min(), one.max())}))
hvd.shutdown()
