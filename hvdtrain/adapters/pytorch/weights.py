"""Weights of losses that are means over something else than samples: tokens, pixels, boxes.

Before a backward pass each rank specifies the count of its items. Their sum over the ranks, a
message of its own in float64, starts at once; the first gradient waits for it. (A bucket of
gradients may have 16 bits, in which 4,097 is 4,096, and a count times a gradient may overflow.) The
gradients of the pass are weighted by the rank's share of the sum. Those of earlier passes of the
same update are set aside meanwhile, and then both are averaged by the sums of their counts.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch

from hvdtrain.adapters.framework import Rank, not_a_count
from hvdtrain.errors import UsageError
from hvdtrain.system.machine import accelerator

Number = Any
"""A float; on a GPU a float64 tensor without dimensions, which the host does not read."""
StartSum = Callable[[torch.Tensor], Callable[[], torch.Tensor]]
"""Starts the sum of a tensor over all ranks; returns the function that waits for it."""


class LossWeight:
    """The weight of this rank's loss in one backward pass.

    Args:
        count: number of items over which the loss of this rank is a mean.
        start: starts the sum over all ranks.
    """

    def __init__(self, count: Number, start: StartSum) -> None:
        self.count, self._on_gpu = count, isinstance(count, torch.Tensor)
        message = count.clone() if self._on_gpu else torch.tensor(count, dtype=torch.float64)
        self._wait = start(message)

    @cached_property
    def total(self) -> Number:
        """The sum of the counts of all ranks."""
        total = self._wait()
        return total if self._on_gpu else total.item()

    @cached_property
    def share(self) -> Number:
        """The factor of this rank's gradients; 0 on all ranks if the sum is 0."""
        return _quotient(self.count, self.total)


def _quotient(part: Number, whole: Number) -> Number:
    if isinstance(whole, torch.Tensor):
        return torch.where(whole == 0, 0.0, part / whole)
    return part / whole if whole else 0.0


def number_of(count: Any, adapter: Rank) -> Number:
    """Return the ``count`` of ``weight_loss``, 0 on a stand-in; an invalid one on a GPU is nan.

    Raises:
        UsageError: it is no number, negative or not finite.
    """
    part, device = adapter.current_part, adapter.device
    count = 0 if part and part.stand_in else count
    on_gpu = device.type != accelerator.CPU
    if on_gpu and isinstance(count, torch.Tensor) and count.numel() == 1:
        number = count.detach().to(device, torch.float64).reshape(())
        return torch.where(number.isfinite() & (number >= 0), number, math.nan)
    try:
        value = float(count)
    except (TypeError, ValueError, RuntimeError):  # the latter of a tensor with several elements
        value = math.nan
    if not 0 <= value < math.inf:
        raise not_a_count(count)
    return torch.tensor(value, dtype=torch.float64, device=device) if on_gpu else value


def weigh(gradients: torch.Tensor, factor: Number | None, out: torch.Tensor) -> None:
    """Set ``out`` to ``gradients`` times ``factor``, the weight of the loss.

    If it is 0, the mean over no items, and so the gradients, may be nan; 0 times nan is nan.
    """
    if isinstance(factor, torch.Tensor):
        torch.mul(gradients, factor, out=out).masked_fill_(factor == 0, 0.0)
    elif factor:
        torch.mul(gradients, factor, out=out)
    else:
        out.zero_()


class Accumulation:
    """The weighted passes of an optimizer's update, whose gradients it averages by their counts.

    An update begins after a step of the optimizer, or when its gradients are None or zero.
    """

    def __init__(self) -> None:
        self._total: Number | None = None  # sum of the counts of the weighted passes; None: none
        self._is_plain = False  # there were passes without a weight
        self._weight: LossWeight | None = None  # of the last weighted pass
        self._is_open = False  # that pass has not ended
        self._versions: list[int] = []  # of the gradients at its end
        # Parameters, their gradients of earlier passes, and copies of these.
        self._earlier: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    @property
    def has_weights(self) -> bool:
        """Whether a pass of this update has a weight."""
        return self._is_open or self._total is not None

    def reset(self) -> None:
        """Begin another update."""
        self._total, self._is_plain = None, False

    def begin(
        self,
        weight: LossWeight | None,
        updated: Sequence[torch.Tensor],
        others: Sequence[torch.Tensor] = (),
        *,
        local: bool = False,
    ) -> None:
        """Begin a backward pass, before its first gradient.

        Args:
            weight: weight of its loss; None: each sample weighs the same.
            updated: parameters of the optimizer.
            others: parameters whose gradients are averaged with them.
            local: whether there were passes within ``no_sync`` before it.

        Raises:
            UsageError: the passes of an update have weights in part, or two have the same one.
        """
        if (weight or self._total is not None) and self._is_cleared(_gradients(updated)):
            self.reset()
        if weight is None:
            mixed, self._is_plain = self._total is not None, True
        else:
            mixed = self._is_plain or local
        if mixed:
            raise UsageError(
                "weighted and unweighted backward passes in one update: call weight_loss(count) "
                "before each of them or before none, and make none within no_sync()"
            )
        if weight is None:
            return
        if weight is self._weight:
            raise UsageError(
                "weight_loss(count) weighs one backward pass: call it before each (and checkpoints "
                "of torch.utils with use_reentrant=False)"
            )
        self._weight, self._is_open = weight, True
        if self._total is not None:
            held = [(p, p.grad) for p in (*updated, *others) if p.grad is not None]
            self._earlier = [(value, gradient, gradient.clone()) for value, gradient in held]
            for value, _ in held:
                value.grad = None

    def _is_cleared(self, gradients: Sequence[torch.Tensor]) -> bool:
        if not gradients:
            return True
        # The host reads those of a GPU only if they were changed, e.g. by zero_grad, since a pass.
        changed = [gradient._version for gradient in gradients] != self._versions
        return changed and not any(bool(gradient.any()) for gradient in gradients)

    @torch.no_grad()
    def end(self, updated: Sequence[torch.Tensor], others: Sequence[torch.Tensor] = ()) -> None:
        """End a backward pass, whose gradients were summed: merge those of the earlier ones."""
        if not self._is_open:
            return
        if not _gradients(updated):  # a pass of another optimizer's
            self.abort()
            return
        assert self._weight is not None
        self._is_open, total = False, self._weight.total
        if self._total is None:
            self._total = total
        else:
            self._total = self._total + total
            share = _quotient(total, self._total)
            for gradient in _gradients((*updated, *others)):
                gradient.mul_(share)
            for value, gradient, copy in self._earlier:
                _values(copy).mul_(1 - share)
                if value.grad is None:  # its memory is that of the sums
                    value.grad = gradient.copy_(copy)
                else:
                    value.grad.add_(copy)
            self._earlier = []
        self._versions = [gradient._version for gradient in _gradients(updated)]

    @torch.no_grad()
    def abort(self) -> None:
        """Drop what remains of a pass that has failed."""
        self._is_open = False
        for value, gradient, copy in self._earlier:
            value.grad = gradient.copy_(copy)
        self._earlier = []


def _gradients(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return this rank's parts of the gradients."""
    return [_values(value.grad) for value in parameters if value.grad is not None]


def _values(gradient: Any) -> torch.Tensor:
    """Return the values of this rank's part of a gradient."""
    part: torch.Tensor = gradient.to_local() if hasattr(gradient, "to_local") else gradient
    return part


def before_gradient(parameter: torch.Tensor, hook: Callable[[Any], None]) -> tuple[Any, Any]:
    """Call ``hook`` before autograd adds to the gradient of ``parameter``, now frozen or not.

    Returns:
        The handle of the hook, and the node of the graph that has it: a reference must be kept.
    """
    trained = parameter.requires_grad
    parameter.requires_grad_()
    node: Any = parameter.expand_as(parameter).grad_fn
    node = node.next_functions[0][0]
    parameter.requires_grad_(trained)
    return node.register_prehook(hook), node


class LocalPasses:
    """The weighted passes of an optimizer in one process, whose results are those of several."""

    def __init__(self, optimizer: torch.optim.Optimizer, adapter: Rank) -> None:
        self._adapter, self._running = weakref.ref(adapter), False
        self._accumulation = Accumulation()
        self._parameters: dict[int, torch.Tensor] = {}
        self._updated: Sequence[torch.Tensor] = ()
        self._others: Sequence[torch.Tensor] = ()
        self._nodes: list[Any] = []
        optimizer.register_step_post_hook(lambda *_: self._accumulation.reset())
        weakref.finalize(optimizer, self._nodes.clear)  # else they would never be collected

    def expect(self, updated: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> None:
        """Expect a pass with the gradients of an optimizer's parameters, and of ``others``."""
        is_first = not self._parameters
        self._updated, self._others, self._running = updated, others, False
        for value in (*updated, *others):
            if id(value) not in self._parameters:
                self._parameters[id(value)] = value
                self._nodes.append(before_gradient(value, self._arriving))
        self._accumulation.abort()
        if is_first and any(value.grad is not None for value in updated):
            self._accumulation.begin(None, updated)  # unless zero_grad follows

    def _arriving(self, _: Any) -> None:
        adapter = self._adapter()
        if self._running or adapter is None:
            return
        self._accumulation.begin(adapter.pass_weight, self._updated, self._others)
        self._running = True
        # At the end of the pass; there is no public API for it.
        torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    @torch.no_grad()
    def _finish(self) -> None:
        self._running = False
        adapter = self._adapter()
        weight = adapter.pass_weight if adapter else None
        if weight and (isinstance(weight.share, torch.Tensor) or not weight.share):
            for gradient in _gradients((*self._updated, *self._others)):
                weigh(gradient, weight.share, out=gradient)  # may be nan
        self._accumulation.end(self._updated, self._others)
