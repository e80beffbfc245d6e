"""Updates of a task in PyTorch whose gradients are not finite: they change nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hvdtrain.tasks.optimizers_pytorch import local

Tensors = list[torch.Tensor]


def is_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether one kernel makes the update, and skips it if ``found_inf`` is set."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


class Guard:
    """Detects gradients that are not finite, and restores the buffers that their update changed.

    A fused optimizer makes no update if its ``found_inf`` is 1 (for ``GradScaler``), so nothing
    synchronizes with the device. Here it stays 1 after the first skipped update, until ``skipped``
    is called. ``sum_shards`` is that of the task.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        sum_shards: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        self.parameters = list(model.parameters())  # listing them takes long
        # A module may replace a buffer, but not its dictionary.
        self._buffers = [module._buffers for module in model.modules() if module._buffers]
        self._optimizer, self._sum_shards = optimizer, sum_shards
        device = self.parameters[0].device
        self._found_inf, self._one = torch.zeros((), device=device), torch.ones((), device=device)
        self._skipped: Any = 0  # number of updates on the device, since ``skipped``
        self._before: list[Tensors] = []  # buffers, before each update since ``skipped``
        if is_fused(optimizer):
            optimizer.register_step_pre_hook(_begin_momentum)  # after those of a strategy

    def begin(self, *, deferred: bool) -> None:
        """Begin an update: copy the buffers, which its forward pass may change."""
        if not deferred:
            self._before.clear()
        self._before.append(_copies(self._now()) if self._buffers else [])

    def _now(self) -> Tensors:
        return [b for buffers in self._buffers for b in buffers.values() if b is not None]

    def _pairs(self, before: Tensors) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each buffer and its copy; none if the network has made others, as caches."""
        now = self._now()
        if [buffer.shape for buffer in now] == [copy.shape for copy in before]:
            yield from zip(now, before, strict=True)

    def is_finite(self) -> bool:
        """Return whether all gradients are finite; all ranks of a sharded model call it."""
        if self._find_inf():
            self._found_inf.zero_()
            return False
        return True

    def defer(self) -> None:
        """Let the optimizer skip its step, and all until ``skipped``, if a gradient is not finite.

        The device is not asked whether one is. All ranks of a sharded model call it.
        """
        self._optimizer.found_inf = self._find_inf().clamp_(max=1)
        self._skipped = self._skipped + self._found_inf

    def _find_inf(self) -> torch.Tensor:
        """Set ``_found_inf`` if a gradient is not finite, and return it.

        By the check of ``GradScaler``: one kernel, which multiplies the gradients by 1.
        """
        gradients = [values(p.grad) for p in self.parameters if p.grad is not None]
        for kind in {gradient.dtype for gradient in gradients}:
            alike = [gradient for gradient in gradients if gradient.dtype == kind]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, self._found_inf, self._one)
        return self._sum_shards(self._found_inf)

    @torch.no_grad()
    def keep_finite(self) -> None:
        """End an update that a loss scaler may skip: restore buffers that are not finite."""
        for buffer, before in self._pairs(self._before[-1]):
            if buffer.is_floating_point():
                buffer.copy_(torch.where(buffer.isfinite(), buffer, before))

    @torch.no_grad()
    def restore(self, updates: int = 1) -> None:
        """Restore the buffers to those before the latest ``updates``."""
        for buffer, before in self._pairs(self._before[-updates]):
            if buffer.is_floating_point() or buffer.is_contiguous():  # expanded: cannot be written
                buffer.copy_(before)

    def skipped(self) -> int:
        """Return the number of skipped last updates; restore the buffers that they changed."""
        number = int(self._skipped)
        if number:
            self.restore(number)
        self._before.clear()
        self._found_inf.zero_()
        self._skipped, self._optimizer.found_inf = 0, None
        return number


def values(gradient: Any) -> torch.Tensor:
    """Return the values of this rank's part of a gradient, which may be sparse."""
    if type(gradient) is not torch.Tensor:  # a DTensor; hasattr() of each takes long
        gradient = local(gradient)
    return gradient._values() if gradient.is_sparse else gradient


@torch.no_grad()
def _copies(tensors: Tensors) -> Tensors:
    """Return copies of tensors, made with one kernel per type."""
    copies = [torch.empty_like(tensor) for tensor in tensors]
    for kind in {tensor.dtype for tensor in tensors}:
        alike = [index for index, tensor in enumerate(tensors) if tensor.dtype == kind]
        torch._foreach_copy_([copies[i] for i in alike], [tensors[i] for i in alike])
    return copies


def _begin_momentum(optimizer: Any, *_: Any) -> None:
    """Initialize momentum with zeros; a fused SGD whose first update is skipped would not."""
    for group in optimizer.param_groups:
        for parameter in group["params"] if group.get("momentum") else ():
            if parameter.grad is not None and "momentum_buffer" not in optimizer.state[parameter]:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
