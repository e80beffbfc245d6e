"""The input of a model, as ``hvdtrain verify --script`` sees it, however it is passed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import ROOT

SCRIPT = """
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.utils.checkpoint import checkpoint

from hvdtrain.commands.verify.script.record import ScriptRecorder
from hvdtrain.commands.verify.script.watch_torch import watch

recorder = ScriptRecorder(Path(sys.argv[1]), None)
watch(torch, recorder)

@dataclass
class Batch:
    labels: object
    rows: object

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(3, 1)

    def forward(self, scale, *args, **kwargs):
        return checkpoint(self.layer, torch.ones(5, 3), use_reentrant=False) * scale

model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows, labels = torch.arange(6.0).view(2, 3), torch.zeros(2)

def seen(*args, **kwargs):
    before = len(recorder.record.seen.marks)
    model(*args, **kwargs).sum().backward()
    optimizer.step()
    return recorder.record.seen.marks[before:]

first = seen(torch.ones(1), rows)
assert len(first) == 1  # the first argument
expected = seen(1.0, rows)
assert len(expected) == 2 and not set(expected) & set(first)
for args, kwargs in (
    ((2.0,), {"labels": labels, "rows": rows}),
    ((2.0, {"labels": labels, "more": [labels, rows]}), {}),
    ((2.0, Batch(labels, rows)), {}),
):
    assert seen(*args, **kwargs) == expected
model.layer.train()
model.training = False  # a wrapper that was not told
assert seen(2.0, rows) == expected
model.eval()
assert seen(2.0, rows) == seen(2.0, None) == []

def closure():
    loss = model.layer(rows).mean()
    loss.backward()
    return loss

model.train()
optimizer.step(closure)
assert recorder.record.sample_weights[-1] == 0.5  # of the step that has made the pass
print("seen")
"""


def test_arguments_keywords_and_containers(tmp_path: object) -> None:
    pytest.importorskip("torch")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "seen", done.stderr[-3000:]
