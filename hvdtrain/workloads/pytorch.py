"""A task in PyTorch: the training step and the evaluation, for any network and data."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices
from hvdtrain.workloads.base import (
    Data,
    Indexed,
    Loaded,
    NotFinite,
    Task,
    TaskOptions,
    digest_of,
)

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class InMemory(Indexed):
    """A dataset that fits into the memory of the device: a batch is cut from one tensor."""

    def __init__(self, images: NDArray[Any], labels: NDArray[np.int64], device: Any) -> None:
        self.images = torch.from_numpy(np.array(images)).to(device)
        self.labels = torch.from_numpy(np.array(labels)).to(device)
        self.samples = len(labels)
        self.digest = digest_of(labels, images)

    def fetch(self, indices: Indices) -> Loaded:
        """See ``Indexed``."""
        index = torch.from_numpy(indices).to(self.labels.device)
        return Loaded(self.images[index], self.labels[index])


class TorchTask(Task):
    """A classifier trained with cross-entropy.

    Args:
        model: network for float images of shape (n, channels, height, width).
        options: precision, optimizer and the rest.
        train: samples to train on.
        test: samples to evaluate on.
        scale: factor and offset that turn stored pixels into the network's input; numbers, or
            tensors of shape (channels, 1, 1).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: TaskOptions,
        train: Data,
        test: Data | None,
        scale: tuple[Any, Any] = (1.0, 0.0),
    ) -> None:
        self.options = options
        self.device = torch.device(options.device)
        self.dtype = torch.float64 if options.precision == "fp64" else torch.float32
        # Parameters stay contiguous: Horovod reduces no other layout. The input alone in
        # channels_last makes the convolutions take that faster path.
        self.model = model.to(self.device, self.dtype)
        self.optimizer = make_optimizer(self.model, options)
        self.train, self.test = train, test
        self.scale = tuple(
            torch.as_tensor(value, dtype=self.dtype).to(self.device) for value in scale
        )
        self.low_precision = LOW_PRECISION.get(options.precision)
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=options.precision == "fp16" and self.device.type == "cuda"
        )

    def _input(self, pixels: torch.Tensor) -> torch.Tensor:
        x = pixels.to(self.device, self.dtype, non_blocking=True) * self.scale[0] + self.scale[1]
        return x.contiguous(memory_format=torch.channels_last) if x.shape[1] > 1 else x

    def update(self, batch: Loaded, *, learning_rate: float, seed: int) -> torch.Tensor:
        """See ``Task``."""
        torch.manual_seed(seed)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), device=self.device)
        if len(batch.y) or self.needs_empty_forward:
            loss = self._loss(batch)
            # One that is not finite makes the gradients so, and by them all ranks learn of it.
            self.scaler.scale(loss * (1 + 0 * loss.detach())).backward()
        self.not_finite = None
        if not self.scaler.is_enabled() and (bad := self._not_finite()):
            self.not_finite = NotFinite(bad, self._own_trouble(batch, loss, seed))
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss.detach()

    def _loss(self, batch: Loaded) -> torch.Tensor:
        y = batch.y.to(self.device, non_blocking=True)
        self.model.train()
        with torch.autocast(
            self.device.type, self.low_precision, enabled=self.low_precision is not None
        ):
            logits = self.model(self._input(batch.x))
        logits = logits.to(self.dtype)
        return F.cross_entropy(logits, y) if len(y) else logits.sum() * 0

    @torch.no_grad()
    def _not_finite(self) -> str:
        """The first parameter whose gradient is not finite; empty: none."""
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        # A sum is as finite as what it is of, and one pass tells.
        sums = [(p, p.grad.sum()) for p in parameters if p.grad is not None]
        if not sums or torch.stack([total for _, total in sums]).isfinite().all():
            return ""
        first = next(p for p, total in sums if not total.isfinite())
        return next(name for name, p in self.model.named_parameters() if p is first)

    def _own_trouble(self, batch: Loaded, loss: torch.Tensor, seed: int) -> str:
        """What this rank has contributed; its own gradients are gone, so they are made again."""
        if not loss.isfinite():
            return f"its loss is {float(loss)}"
        if not len(batch.y) or self.needs_empty_forward:  # its layers would wait for other ranks
            return ""
        torch.manual_seed(seed)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        gradients = torch.autograd.grad(self._loss(batch), [p for _, p in named], allow_unused=True)
        for (name, _), gradient in zip(named, gradients, strict=True):
            if gradient is not None and not gradient.isfinite().all():
                return f"its gradient of {name}"
        return ""

    @torch.no_grad()
    def evaluate(self, batch: Loaded) -> tuple[float, int]:
        """See ``Task``."""
        self.model.eval()
        y = batch.y.to(self.device)
        logits = self.model(self._input(batch.x)).to(torch.float64)
        loss = F.cross_entropy(logits, y, reduction="sum")
        return float(loss), int((logits.argmax(1) == y).sum())

    @torch.no_grad()
    def parameter_norm(self) -> float:
        """See ``Task``."""
        squares = [p.double().square().sum() for p in self.model.parameters() if p.requires_grad]
        return float(torch.stack(squares).sum().sqrt())

    def loss_values(self, losses: list[Any]) -> list[float]:
        """See ``Task``."""
        return torch.stack(losses).tolist() if losses else []


def make_optimizer(model: torch.nn.Module, options: TaskOptions) -> torch.optim.Optimizer:
    """The optimizer that ``options`` name; its learning rate is set before each step.

    Raises:
        UsageError: an unknown name.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            parameters, lr=1.0, momentum=options.momentum, weight_decay=options.weight_decay
        )
    if options.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=1.0, weight_decay=options.weight_decay)
    if options.optimizer == "adamw":
        return torch.optim.AdamW(parameters, lr=1.0, weight_decay=options.weight_decay)
    raise UsageError(f"--optimizer {options.optimizer}: choose one of sgd, adam, adamw")
