"""A task in PyTorch: the training step and the evaluation, for any network and data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.utils import clip_grad_norm_
from typing_extensions import override

from hvdtrain.config.options import Options
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices, bounds
from hvdtrain.system.machine import accelerator
from hvdtrain.workloads.columns import CLASSES, Columns
from hvdtrain.workloads.data.dataset import Batch, Dataset, Indexed, digest_of
from hvdtrain.workloads.metrics import Accuracy, Consumer, Metric
from hvdtrain.workloads.task import NotFinite, Task

Losses = Callable[[torch.Tensor, Any], torch.Tensor]

LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}


class InMemory(Indexed):
    """A dataset that fits into the memory of the device: a batch is cut from one tensor."""

    def __init__(self, images: NDArray[Any], labels: NDArray[Any], device: Any) -> None:
        self.images = torch.from_numpy(np.array(images)).to(device)
        self.labels = torch.from_numpy(np.array(labels)).to(device)
        self.samples = len(labels)
        self.digest = digest_of(labels, images)

    @override
    def fetch(self, indices: Indices) -> Batch:
        index = torch.from_numpy(indices).to(self.labels.device)
        return Batch(self.images[index], self.labels[index])


def cross_entropy(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the loss of each sample of a classifier, shape (n,), from logits and classes."""
    return F.cross_entropy(output, y, reduction="none")


class TorchTask(Task):
    """Any network, trained on the mean of a loss; a classifier unless told otherwise.

    Args:
        model: network for float samples, such as images of shape (n, channels, height, width).
        options: those of the trainer, every default filled in.
        train: samples to train on.
        test: samples to evaluate on.
        scale: factor and offset that turn stored pixels into the network's input; numbers, or
            tensors of shape (channels, 1, 1).
        losses: the loss of each sample, shape (n,), from the network's output and ``y``.
        metrics: of an evaluation; by the first the best checkpoint is kept.
        columns: what ``--predict`` writes of each sample; class and probability by default.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        options: Options,
        train: Dataset,
        test: Dataset | None,
        scale: tuple[Any, Any] = (1.0, 0.0),
        *,
        losses: Losses = cross_entropy,
        metrics: Sequence[Metric] = (Accuracy(),),
        columns: Columns = CLASSES,
    ) -> None:
        self.options, self.losses, self.metrics = options, losses, metrics
        self.columns = columns
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
        on_gpu = self.device.type != accelerator.CPU
        scaled = options.precision == "fp16" and on_gpu
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)

    def _input(self, pixels: torch.Tensor) -> torch.Tensor:
        x = pixels.to(self.device, self.dtype, non_blocking=True) * self.scale[0] + self.scale[1]
        return (
            x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 and x.shape[1] > 1 else x
        )

    @override
    def update(self, batch: Batch, *, learning_rate: float, seed: int) -> torch.Tensor:
        self._seed(seed)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        loss = torch.zeros((), dtype=self.dtype, device=self.device)
        *pieces, last = self._pieces(batch)
        for piece in pieces:
            with self.no_sync():
                loss += self._backward(piece, batch.count)
        if last.count or self.needs_empty_forward:
            loss += self._backward(last, batch.count)
        self.not_finite = None
        if not self.scaler.is_enabled() and (bad := self._not_finite()):
            self.not_finite = NotFinite(bad, self._own_trouble(batch, loss, seed))
        else:
            if self.options.clip_norm:
                self.scaler.unscale_(self.optimizer)
                clip_grad_norm_(self.model.parameters(), self.options.clip_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        return loss

    def _pieces(self, batch: Batch) -> list[Batch]:
        """Cut ``batch`` into what one pass is over: ``--accumulate-steps`` pieces, or fewer."""
        number = self.options.accumulate_steps
        if not self.needs_empty_forward:
            number = max(1, min(number, batch.count))
        cuts = (bounds(batch.count, place, number) for place in range(number))
        return [batch[slice(*cut)] for cut in cuts] if number > 1 else [batch]

    def _backward(self, piece: Batch, count: int) -> torch.Tensor:
        """Add the gradients of ``piece`` of a batch of ``count``; return its share of the loss."""
        loss = self._loss(piece, count)
        # One that is not finite makes the gradients so, and by them all ranks learn of it.
        self.scaler.scale(loss * (1 + 0 * loss.detach())).backward()
        return loss.detach()

    def _seed(self, seed: int) -> None:
        # torch.manual_seed would also note the seed, with the text of the stack, for each kind of
        # device that is not in use: a millisecond per step, of 35 on MNIST.
        torch.default_generator.manual_seed(seed)
        if self.device.type != accelerator.CPU:
            accelerator.seed(seed)  # of all that this process computes on

    def _loss(self, batch: Batch, count: int) -> torch.Tensor:
        """Return the sum of the losses of ``batch`` over ``count``, the samples of an update."""
        y = batch.y.to(self.device, non_blocking=True)
        self.model.train()
        with torch.autocast(
            self.device.type, self.low_precision, enabled=self.low_precision is not None
        ):
            output = self.model(self._input(batch.x))
        # As a sum over a count the loss of no sample is 0, and so are its gradients.
        return self._each(output.to(self.dtype), y).sum() / max(1, count)

    def _each(self, output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        losses = self.losses(output, y)
        if losses.shape != (len(y),):
            raise UsageError(
                f"the losses of {len(y)} samples have the shape {tuple(losses.shape)}: a task "
                "gives one loss per sample"
            )
        return losses

    @torch.no_grad()
    def _not_finite(self) -> str:
        """Return the name of the first parameter whose gradient is not finite; empty: none."""
        # In one pass: a sum with such a term is not finite, nor is one that overflows.
        named = [(name, p) for name, p in self.model.named_parameters() if p.grad is not None]
        if not named:
            return ""
        sums = self.sum_shards(torch.stack([_own(p.grad).sum() for _, p in named]))
        bad = (~sums.isfinite()).nonzero()
        return named[int(bad[0])][0] if len(bad) else ""

    def _own_trouble(self, batch: Batch, loss: torch.Tensor, seed: int) -> str:
        """Tell what this rank contributed; its own gradients are gone, so they are made again."""
        if not loss.isfinite():
            return f"its loss is {float(loss)}"
        if not batch.count or self.needs_empty_forward:  # its layers would wait for other ranks
            return ""
        self._seed(seed)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        loss = self._loss(batch, batch.count)
        gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        for (name, _), gradient in zip(named, gradients, strict=True):
            if gradient is not None and not gradient.isfinite().all():
                return f"its gradient of {name}"
        return ""

    @torch.no_grad()
    @override
    def evaluate(self, batch: Batch, metrics: Sequence[Consumer]) -> float:
        self.model.eval()
        y = batch.y.to(self.device)
        output = self.model(self._input(batch.x)).to(torch.float64)
        for metric in metrics:
            metric.update(Batch(batch.x, y.cpu().numpy()), output.cpu().numpy())
        return float(self._each(output, y).sum())

    @torch.no_grad()
    @override
    def parameter_norm(self) -> float:
        trained = [_own(p) for p in self.model.parameters() if p.requires_grad]
        squares = torch.stack([p.double().square().sum() for p in trained])
        return float(self.sum_shards(squares).sum().sqrt())

    @override
    def loss_values(self, losses: list[Any]) -> list[float]:
        return torch.stack(losses).tolist() if losses else []


def _own(value: Any) -> Any:
    """Return what this process has of a tensor that may be in parts (a ``DTensor``)."""
    return value.to_local() if hasattr(value, "to_local") else value


def make_optimizer(model: torch.nn.Module, options: Options) -> torch.optim.Optimizer:
    """Return the optimizer that ``options`` name; its learning rate is set before each step."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    decay = options.weight_decay or 0.0
    if options.optimizer == "sgd":
        return torch.optim.SGD(parameters, lr=1.0, momentum=options.momentum, weight_decay=decay)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[options.optimizer]
    return kind(parameters, lr=1.0, weight_decay=decay)
