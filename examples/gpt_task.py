"""The GPT of gpt.py as a task for the trainer, which adds options, checkpoints and a summary.

mpirun -n 2 python -m hvdtrain.train examples/gpt_task.py --epochs 4 --optimizer adamw \
    --lr 0.006 --lr-scaling none --lr-schedule cosine --warmup-epochs 0.5 \
    --global-batch-size 16 --accumulate-steps 2 --clip-norm 1
"""

import math

import numpy as np
import torch
from gpt import GPT, PAD, documents, padded
from torch.nn.functional import cross_entropy

from hvdtrain.tasks.metrics import Metric
from hvdtrain.tasks.training_step_pytorch import InMemory, TorchTask


def token_loss(logits, y):
    """Return each document's sum of losses and its number of tokens, shape (n,) each.

    The loss of an update, or of an evaluation, is the sum of the sums by that of the numbers.
    """
    losses = cross_entropy(logits.transpose(1, 2), y, ignore_index=PAD, reduction="none")
    return losses.sum(1), (y != PAD).sum(1)


class Perplexity(Metric):
    """exp of the mean loss over all tokens of all ranks."""

    names = ("perplexity",)
    higher_is_better = False

    def __init__(self):
        self.sums = np.zeros(2)  # losses, tokens

    def update(self, batch, output):
        losses, tokens = token_loss(torch.from_numpy(output), torch.from_numpy(batch.y))
        self.sums += losses.sum().item(), tokens.sum().item()

    def gather(self, collectives):
        self.sums = collectives.sum(self.sums)

    def result(self):
        return {"perplexity": math.exp(self.sums[0] / self.sums[1])}


def task(options):
    """Return model, data, loss and metrics; all ranks call it, with equal results."""
    torch.manual_seed(options.seed)
    train, test = (
        InMemory(*(tensor.numpy() for tensor in padded(part)), options.device)
        for part in documents()
    )
    return TorchTask(GPT(), options, train, test, losses=token_loss, metrics=[Perplexity()])
