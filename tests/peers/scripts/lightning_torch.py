"""A correct script of Lightning's Trainer: accumulation, clipping, a metric, a checkpoint."""

from __future__ import annotations

import os

import torch
from lightning.pytorch import LightningModule, Trainer
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset


class Classifier(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(10, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3)
        )

    def training_step(self, batch, index):
        inputs, labels = batch
        return cross_entropy(self.layers(inputs), labels)

    def validation_step(self, batch, index):
        inputs, labels = batch
        self.log("loss", cross_entropy(self.layers(inputs), labels), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


generator = torch.Generator().manual_seed(1)
x, y = torch.randn(152, 10, generator=generator), torch.randint(0, 3, (152,), generator=generator)
loader = DataLoader(TensorDataset(x[:120], y[:120]), batch_size=8, shuffle=True)
evaluation = DataLoader(TensorDataset(x[120:], y[120:]), batch_size=8)
trainer = Trainer(
    accelerator="cpu",
    strategy="ddp",
    devices=int(os.environ["WORLD_SIZE"]),
    max_epochs=2,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    logger=False,
    default_root_dir=".",
)
trainer.fit(Classifier(), loader, evaluation)
