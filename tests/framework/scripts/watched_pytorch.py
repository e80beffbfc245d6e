"""Run by test_watched.py: what PyTorch does with a training, one line for each."""

from __future__ import annotations

import copy
import os
import pickle
import tempfile
import warnings
from pathlib import Path

import torch

warnings.simplefilter("error")
x = torch.ones(8, 4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss = -0.5 * model(x).square().mean()
loss.backward()
optimizer.step()
print("functions", pickle.loads(pickle.dumps(torch.save)) is torch.save)
copies = copy.deepcopy((model, optimizer)), pickle.loads(pickle.dumps((model, optimizer)))
print("copies", [type(value).__name__ for value in copies[0] + copies[1]])
weight = torch.zeros(4, requires_grad=True)
torch.optim.SGD([weight], lr=0.1)
print("tensor", len(pickle.dumps(weight)) > 0)
meta = torch.nn.Linear(4, 1, device="meta")  # its values cannot be read
optimizer = torch.optim.SGD(meta.parameters(), lr=0.1)
meta(x.to("meta")).sum().backward()
optimizer.step()
torch.save(model.state_dict(), "model.pt")
print("file", Path(__file__).is_absolute())
os.chdir(tempfile.gettempdir())
print("found", Path(__file__).is_file())
