"""Model parallelism: the layers of the MNIST net on two ranks; and it computes the same as one.

mpirun -n 2 python model_parallel.py

Rank 0 holds the convolutions, rank 1 the dense layers. Forward, rank 0 sends its activations;
backward, rank 1 sends their gradients back. Neither has the other's weights, and nothing is
averaged. At the end rank 0 trains the whole net alone, on the same batches, and compares.
"""

import argparse
import sys

import numpy as np
import torch
from mpi4py import MPI
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
option = parser.add_argument
option("--steps", type=int, default=10)
option("--batch-size", "--batch_size", type=int, default=64, help="images per step")
option("--lr", type=float, default=0.05, help="learning rate")
args = parser.parse_args()

world = MPI.COMM_WORLD
if world.size != 2:
    sys.exit(f"two ranks share the net, not {world.size}: mpirun -n 2 python model_parallel.py")

torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
digits = load_digits()  # 8x8 with values up to 16: make them 24x24 and add a margin of 2
images = np.pad(np.kron(digits.images / 16, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
images, labels = torch.tensor(images[:, None]), torch.tensor(digits.target)
draw = np.random.default_rng(0)
batches = [draw.choice(len(labels), args.batch_size, replace=False) for _ in range(args.steps)]


def convolutions() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten())


def dense() -> nn.Sequential:  # without dropout, whose random numbers no two runs share
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))


def optimizer_of(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9)


# -------------------------------------------------------------- two ranks, each with half a net
losses = []
if world.rank == 0:
    half = convolutions()
    optimizer = optimizer_of(half)
    for picked in batches:
        activations = half(images[picked])
        world.Send(activations.detach().numpy(), dest=1)
        gradients = np.empty(activations.shape)
        world.Recv(gradients, source=1)
        optimizer.zero_grad()
        activations.backward(torch.from_numpy(gradients))  # goes on where rank 1 has stopped
        optimizer.step()
else:
    half = dense()
    optimizer = optimizer_of(half)
    for picked in batches:
        received = np.empty((len(picked), 9216))
        world.Recv(received, source=0)
        activations = torch.from_numpy(received).requires_grad_()
        loss = cross_entropy(half(activations), labels[picked])
        optimizer.zero_grad()
        loss.backward()
        world.Send(activations.grad.numpy(), dest=0)
        optimizer.step()
        losses.append(loss.item())

weights = world.gather(half.state_dict(), root=0)
losses = world.bcast(losses, root=1)
if world.rank == 1:
    sys.exit()

# ------------------------------------------------------------------- one rank with the whole net
front, back = convolutions(), dense()
whole = nn.Sequential(front, back)
optimizer = optimizer_of(whole)
for step, picked in enumerate(batches):
    loss = cross_entropy(whole(images[picked]), labels[picked])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step + 1}: loss {losses[step]:.12f} on two ranks, {loss.item():.12f} on one")

split = [*weights[0].values(), *weights[1].values()]  # in the order of the whole net
pairs = zip(split, whole.state_dict().values(), strict=True)
difference = torch.cat([(split - whole).abs().flatten() for split, whole in pairs]).max().item()
sent = 2 * args.batch_size * 9216 * 8
summed = sum(value.numel() for value in split) * 8
print(f"a step moves {sent / 1e6:.1f} MB of activations and their gradients, more with the batch")
print(f"data parallelism would add up {summed / 1e6:.1f} MB of gradients, more with the net")
print(f"largest difference of a weight after {args.steps} steps: {difference:.1e}")
if not difference <= 1e-12:  # nan is no agreement either
    sys.exit("the two ranks do not compute what one does")
