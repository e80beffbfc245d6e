"""A task in PyTorch: the training step and the evaluation, for any network and data."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import clip_grad_norm_
from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Indices, bounds
from hvdtrain.system.machine import accelerator
from hvdtrain.tasks.augmented import edges
from hvdtrain.tasks.dataset import Batch, InMemoryBase, unknown_class
from hvdtrain.tasks.guard_pytorch import Guard, is_fused, values
from hvdtrain.tasks.metrics import ReadOutput
from hvdtrain.tasks.optimizers_pytorch import averages_of, keep_average, local, make_optimizer
from hvdtrain.tasks.task import LossScale, NotFinite, Task

WIDE_INTEGERS = (torch.int32, torch.int64)
LOW_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16}
KERNEL_ORDER = "reorder_for_peak_memory"  # an option of torch.compile


class InMemory(InMemoryBase):
    """A dataset in the memory of the device: a batch is gathered from one tensor."""

    @override
    def tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    @override
    def send(self, array: NDArray[Any]) -> torch.Tensor:
        return accelerator.send(torch.from_numpy(array), self.labels.device)

    @override
    def fetch(self, indices: Indices) -> Batch:
        index = self.send(indices)
        return Batch(self.images[index], self.labels[index])


def cross_entropy(output: torch.Tensor, y: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """Return the loss of each sample of a classifier, shape (n,), from logits and classes.

    A share ``smoothing`` of each label is spread evenly over all classes (Szegedy et al., 2016).

    Raises:
        UsageError: a label is no class (a GPU reports it otherwise).
    """
    try:
        return F.cross_entropy(output, y, reduction="none", label_smoothing=smoothing)
    except IndexError as error:
        if label := re.match(r"Target (-?\d+) is out of bounds", str(error)):
            raise unknown_class(int(label[1]), output.shape[1]) from error
        raise


def erase(x: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Set a part of each image to 0; return the images.

    Args:
        x: images, shape (n, channels, height, width).
        boxes: top, bottom, left and right edge of each part in pixels, int64, shape (n, 4).
    """
    top, bottom, left, right = boxes[:, :, None].unbind(1)
    rows, columns = (torch.arange(side, device=x.device) for side in x.shape[2:])
    within = (top <= rows) & (rows < bottom), (left <= columns) & (columns < right)
    return x.masked_fill_(within[0][:, None, :, None] & within[1][:, None, None, :], 0)


def mix(first: torch.Tensor, second: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each pair of samples, by the share of the first one."""
    return torch.lerp(second, first, shares.view(-1, *[1] * (first.ndim - 1)))


class TorchTask(Task):
    """A task in PyTorch; its arguments are those of ``Task``."""

    default_losses = staticmethod(cross_entropy)
    _erased, _mixed = staticmethod(erase), staticmethod(mix)

    @override
    def _prepare(self, scale: tuple[Any, Any] | None, *, channels_last: bool) -> None:
        options = self.options
        self.device = torch.device(options.device)
        self.dtype = torch.float64 if options.precision == "fp64" else torch.float32
        self.model.to(self.device, self.dtype)
        accept_any_batch(self.model)
        # Dropout masks depend on the layout, so all strategies use the same one.
        self._layout = torch.channels_last if channels_last else torch.preserve_format
        if channels_last:
            self.model.to(memory_format=self._layout)
        on_gpu = self.device.type != accelerator.CPU
        self.optimizer = make_optimizer(self.model, options, fused=on_gpu)
        if options.ema:
            keep_average(self.optimizer, options.ema)
        self._is_scaled = scale is not None
        self.scale = tuple(
            torch.as_tensor(value, dtype=self.dtype).to(self.device) for value in scale or (1, 0)
        )
        self._zero, self._one = self.scale[0].new_tensor([0, 1])
        low = LOW_PRECISION.get(options.precision)
        self._lowered: Callable[[], AbstractContextManager[Any]] = (
            functools.partial(torch.autocast, self.device.type, low) if low else nullcontext
        )
        scaled = options.precision == "fp16" and on_gpu
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=scaled)
        self._copy = accelerator.Copies(self.device)
        self._guard: Guard | None = None
        self._weights: Callable[[], torch.Tensor] | None = None  # returns the sums of an update

    @override
    def _input(self, pixels: torch.Tensor) -> torch.Tensor:
        if self._is_scaled:
            return network_input(pixels, self.dtype, self.scale, self._layout)
        if pixels.dtype in WIDE_INTEGERS:
            return pixels
        return pixels.to(self.dtype, copy=True, memory_format=self._layout)

    @override
    def update(self, batch: Batch, *, learning_rate: float, seed: int) -> torch.Tensor:
        if self._guard is None:  # the strategy has distributed model and optimizer
            self._guard = Guard(self.model, self.optimizer, self.sum_shards)
            self.model.train()
        elif not self.model.training:  # after an evaluation
            self.model.train()
        deferred = self.deferred
        self._guard.begin(deferred=deferred)
        self._seed(seed)
        batch = self._on_device(batch)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
            for parameter in group["params"]:
                parameter.grad = None  # zero_grad() takes as long as a small net's forward pass
        self.batch_weight = self._weights = None
        *pieces, last = self._pieces(batch)
        losses = []
        for piece in pieces:
            with self.no_sync():
                losses.append(self._backward(piece, batch.count))
        losses.append(self._backward(last, batch.count, is_last=True))
        loss = self._weighted(sum(losses[1:], losses[0]), batch.count)
        self.not_finite = None
        if deferred:
            self._guard.defer()
        elif not self.scaler.is_enabled() and not self._guard.is_finite():
            self.not_finite = self._describe(batch, loss, seed)
            self._guard.restore()
            return loss
        if self.options.clip_norm:
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self._guard.parameters, self.options.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.scaler.is_enabled():
            self._guard.keep_finite()
        return loss

    def _on_device(self, batch: Batch) -> Batch:
        """Return a training batch on the device, its ``boxes`` in pixels."""
        shares, boxes = batch.shares, batch.boxes
        if shares is not None:
            shares = torch.from_numpy(shares).to(self.device, self.dtype)
        if boxes is not None:
            boxes = torch.from_numpy(edges(boxes, batch.x.shape[2:])).to(self.device)
        x, y = self._copy(batch.x), self._copy(batch.y)
        return Batch(x, y, shares, boxes, batch.stand_in)

    @override
    def compile(self) -> None:
        try:  # check, with a small function, whether there is a compiler
            torch.compile(torch.square)(torch.ones(2, device=self.device))
        except Exception as error:  # of many kinds
            message = str(error).strip().partition("\n")[0]
            raise UsageError(f"--compile: torch.compile does not work here: {message}") from error
        # Not by model.compile(), which does not compile a Sequential, code of PyTorch itself.
        # PyTorch 2.13 reorders kernels to save memory, and on a CPU a convolution's backward pass
        # then reads the gradient of a max pooling before it is written: the gradients of the layers
        # below are zero. Older versions do not have the option.
        known = torch._inductor.list_options()
        self.model.forward = torch.compile(
            self.model.forward, options={KERNEL_ORDER: False} if KERNEL_ORDER in known else None
        )

    @property
    @override
    def deferred(self) -> bool:
        return self.may_defer and not self.scaler.is_enabled() and is_fused(self.optimizer)

    @property
    @override
    def loss_scale(self) -> LossScale | None:
        state = self.scaler.state_dict()  # empty if the scaler is disabled
        return LossScale(state["scale"], state["_growth_tracker"]) if state else None

    @override
    def restore_loss_scale(self, saved: LossScale) -> None:
        state = {"scale": saved.scale, "_growth_tracker": saved.updates}
        self.scaler.load_state_dict({**self.scaler.state_dict(), **state})

    @override
    def skipped_updates(self) -> int:
        return self._guard.skipped() if self._guard else 0

    def _pieces(self, batch: Batch) -> list[Batch]:
        """Split ``batch`` into the pieces of the passes, ``--accumulate-steps`` on every rank."""
        number = self.options.accumulate_steps
        cuts = (bounds(batch.count, index, number) for index in range(number))
        return [batch[slice(*cut)] for cut in cuts] if number > 1 else [batch]

    def _add_weights(self, weights: torch.Tensor, piece: Batch, count: int, last: bool) -> None:
        """Add the weights of a piece; with the last one start their sum over the ranks."""
        mine = weights.detach().sum(dtype=torch.float64)
        mine = mine * 0 if piece.stand_in else mine
        self.batch_weight = mine if self.batch_weight is None else self.batch_weight + mine
        if last:
            samples = torch.full_like(mine, count)
            self._weights = self.start_sum(torch.stack([self.batch_weight, samples]))

    @torch.no_grad()
    def _weighted(self, loss: torch.Tensor, count: int) -> torch.Tensor:
        """Divide by the sum of the weights, in place of the number of samples.

        Args:
            loss: sum of the losses of this rank's samples, divided by their number.
            count: that number.
        """
        if self._weights is None:
            return loss
        assert self.batch_weight is not None and self._guard is not None
        total, samples = self._weights()
        gradients = [values(p.grad) for p in self._guard.parameters if p.grad is not None]
        torch._foreach_mul_(gradients, torch.where(total == 0, 0.0, samples / total))
        share = torch.where(self.batch_weight == 0, 0.0, count / self.batch_weight)
        return loss * share.to(self.dtype)

    def _backward(self, piece: Batch, count: int, *, is_last: bool = False) -> torch.Tensor:
        """Add the gradients of ``piece`` of a batch of ``count``; return its share of the loss.

        A stand-in adds nothing: to the others' gradients here, or on a rank that has no samples,
        whose gradients weigh 0.
        """
        self.leave_out(piece.stand_in)
        losses, weights = self._forward(piece)
        if weights is not None:
            self._add_weights(weights, piece, count, is_last)
        loss = losses.detach().sum() / max(1, count)
        # A loss that is not finite makes the gradients so, which inform all ranks.
        factor = self.scaler.scale(torch.addcmul(self._one, self._zero, loss)) / max(1, count)
        losses.backward((factor * 0 if piece.stand_in else factor).expand_as(losses))
        self.leave_out(False)
        return self._zero if piece.stand_in else loss.to(self.dtype)

    def _seed(self, seed: int) -> None:
        # torch.manual_seed would also record the seed, with the text of the stack, for each unused
        # kind of device: a millisecond per step, of 35 on MNIST.
        torch.default_generator.manual_seed(seed)
        if self.device.type != accelerator.CPU:
            accelerator.seed(seed)  # of all devices of this process

    @override
    def _output(self, x: torch.Tensor) -> torch.Tensor:
        with self._lowered():
            output = self.model(x)
        return output.to(self.dtype)

    @override
    def _check(self, losses: torch.Tensor, y: torch.Tensor) -> None:
        if losses.shape != y.shape[:1]:
            raise UsageError(
                f"the losses of {len(y)} samples have the shape {tuple(losses.shape)}: a task "
                "must return one per sample"
            )

    def _describe(self, batch: Batch, loss: torch.Tensor, seed: int) -> NotFinite:
        """Return which gradient of ``batch`` is not finite; all ranks call it."""
        names, parameters = zip(*self.model.named_parameters(), strict=True)
        bad = [
            self._zero if p.grad is None else (~values(p.grad).isfinite()).any().to(self.dtype)
            for p in parameters
        ]
        first = int(self.sum_shards(torch.stack(bad)).nonzero()[0])
        return NotFinite(names[first], self._local_cause(batch, loss, seed))

    def _local_cause(self, batch: Batch, loss: torch.Tensor, seed: int) -> str:
        """Return the cause on this rank, from its recomputed local gradients."""
        if not loss.isfinite():
            return f"its loss is {float(loss)}"
        if batch.stand_in or self.collective_passes:  # the other ranks would have to make it, too
            return ""
        self._seed(seed)
        named = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad]
        loss = self._forward(batch)[0].sum() / batch.count
        gradients = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        for (name, _), gradient in zip(named, gradients, strict=True):
            if gradient is not None and not gradient.isfinite().all():
                return f"its gradient of {name}"
        return ""

    @torch.no_grad()
    @override
    def _evaluated(self, batch: Batch) -> tuple[float, float, ReadOutput]:
        self.model.eval()
        y = self._copy(batch.y)
        output = self.model(self._input(self._copy(batch.x))).to(self.dtype)
        losses, weights = self._losses(self.losses, output, y)
        weight = float(len(y) if weights is None else weights.double().sum())
        read = lambda: (output.double().cpu().numpy(), y.cpu().numpy())  # noqa: E731
        return float(losses.double().sum()), weight, read

    @torch.no_grad()
    @override
    def _set_weights(self, values: list[Any] | None = None) -> list[Any]:
        averaged = averages_of(self.optimizer)
        before = [weight.clone() for weight, _ in averaged]
        values = values or [average for _, average in averaged]
        for (weight, _), value in zip(averaged, values, strict=True):
            weight.copy_(value)
        return before

    @torch.no_grad()
    @override
    def parameter_norm(self) -> float:
        trained = [local(p) for p in self.model.parameters() if p.requires_grad]
        squares = torch.stack([p.double().square().sum() for p in trained])
        return float(self.sum_shards(squares).sum().sqrt())

    @override
    def loss_values(self, losses: list[Any]) -> list[float]:
        return torch.stack(losses).tolist() if len(losses) > 1 else [each.item() for each in losses]


def network_input(
    pixels: torch.Tensor,
    dtype: torch.dtype,
    scale: tuple[torch.Tensor, ...],
    layout: torch.memory_format,
) -> torch.Tensor:
    """Return stored pixels times the factor plus the offset of ``scale``, in the model's layout.

    It makes two passes over the pixels, since it delays each step.
    """
    x = pixels.to(dtype, copy=True, memory_format=layout)
    return torch.addcmul(scale[1], x, scale[0], out=x)


class _OfAnyBatch(_BatchNorm):
    """A layer that accepts a batch with one value per channel, for which PyTorch's raise.

    The part of a rank in an epoch's last batch may be a single sample, of which a ``BatchNorm1d``,
    or the last layers of a network for small images, see one value. Its variance is 0, so the layer
    returns its bias; there is no unbiased variance to track.
    """

    @override
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if self.training and input.numel() == input.shape[1]:
            return torch.batch_norm(
                input, self.weight, self.bias, None, None, True, 0.0, self.eps, False
            )
        return super().forward(input)


class BatchNorm1d(_OfAnyBatch, torch.nn.BatchNorm1d):
    """``nn.BatchNorm1d`` of any batch."""


class BatchNorm2d(_OfAnyBatch, torch.nn.BatchNorm2d):
    """``nn.BatchNorm2d`` of any batch."""


class BatchNorm3d(_OfAnyBatch, torch.nn.BatchNorm3d):
    """``nn.BatchNorm3d`` of any batch."""


_LAYERS: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.BatchNorm1d: BatchNorm1d,
    torch.nn.BatchNorm2d: BatchNorm2d,
    torch.nn.BatchNorm3d: BatchNorm3d,
}


def accept_any_batch(model: torch.nn.Module) -> None:
    """Convert the BatchNorm layers in ``model``, in place; not those of a subclass."""
    for module in model.modules():
        module.__class__ = _LAYERS.get(type(module), type(module))
