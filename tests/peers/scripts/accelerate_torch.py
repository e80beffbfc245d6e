"""A correct script of accelerate: accumulation, clipping, uneven last batches, a metric."""

from __future__ import annotations

import torch
from accelerate import Accelerator
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
generator = torch.Generator().manual_seed(1)
x, y = torch.randn(150, 10, generator=generator), torch.randint(0, 3, (150,), generator=generator)
train, held_out = TensorDataset(x[:120], y[:120]), TensorDataset(x[120:], y[120:])
loader = DataLoader(train, batch_size=8, shuffle=True)
evaluation = DataLoader(held_out, batch_size=8)
network = torch.nn.Sequential(torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
optimizer = torch.optim.AdamW(network.parameters(), lr=0.01)
model, optimizer, loader, evaluation = accelerator.prepare(network, optimizer, loader, evaluation)

for epoch in range(2):
    model.train()
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            loss = cross_entropy(model(inputs), labels)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    right = total = 0
    for inputs, labels in evaluation:
        with torch.no_grad():
            found = model(inputs).argmax(1)
        found, labels = accelerator.gather_for_metrics((found, labels))
        right, total = right + (found == labels).sum().item(), total + len(labels)
    accelerator.print(f"epoch {epoch}: {right} of {total}")
if accelerator.is_main_process:
    torch.save(accelerator.unwrap_model(model).state_dict(), "model.pt")
accelerator.end_training()
