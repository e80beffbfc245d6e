"""MNIST with a DataLoader, transforms and Horovod's example recipe; seconds to a test accuracy.

The recipe of Horovod's PyTorch MNIST example: batch 64 per rank, SGD 0.01 x size, momentum 0.5, a
DistributedSampler. Seconds count training only.
"""

import sys
import time
from pathlib import Path

import horovod.torch as hvd
import torch

from hvdtrain.workloads.mnist.data import load
from hvdtrain.workloads.mnist.pytorch import network
from hvdtrain.workloads.resnet.pytorch import torchvision

hvd.init()
torch.manual_seed(42)
torch.set_num_threads(1)
transforms = torchvision().transforms
to_input = transforms.Compose(
    [transforms.ToPILImage(), transforms.ToTensor(), transforms.Normalize((0.1307,), (0.3081,))]
)


class Digits(torch.utils.data.Dataset):
    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return len(self.samples.labels)

    def __getitem__(self, index):
        return to_input(self.samples.images[index]), int(self.samples.labels[index])


train, test = map(Digits, load(Path(sys.argv[1])))
sampler = torch.utils.data.distributed.DistributedSampler(train, hvd.size(), hvd.rank())
train_loader = torch.utils.data.DataLoader(train, batch_size=64, sampler=sampler)
test_loader = torch.utils.data.DataLoader(test, batch_size=1000)
model = network("small")
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * hvd.size(), momentum=0.5)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
seconds = 0.0
for epoch in range(40):
    sampler.set_epoch(epoch)
    model.train()
    start = time.perf_counter()
    for x, y in train_loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    seconds += time.perf_counter() - start
    model.eval()
    with torch.no_grad():
        correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in test_loader)
    if correct / len(test) >= float(sys.argv[2]):
        break
if hvd.rank() == 0:
    print("images_per_second", seconds, "after epochs", epoch + 1)
