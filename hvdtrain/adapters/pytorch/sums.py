"""Asynchronous sums of PyTorch tensors over the ranks, also in a 16-bit type: ``--compression``.

Gradients are multiplied by the weight of the rank's part before rounding. The weights of all ranks
sum to 1, so no partial sum exceeds the largest gradient: fp16 overflows only if a gradient exceeds
65504. The sum is then infinite on all ranks, and handled like any gradient that is not finite.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import torch
from typing_extensions import override

from hvdtrain.adapters.common_adapter import Flags
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.exit import agreed as on_all_ranks

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
STEP = 4  # moment of a sum outside of backward passes; those have the number of the part modulo 4
# A rank sends with each sum: its flags, whether it has late gradients, and the moment, of which
# there must be one.
SIGNALS = len(Flags._fields) + 1 + STEP + 1


class Sums(ABC):
    """Asynchronous sums of buckets over all ranks, in place."""

    in_order = False
    """Whether the sums of different ranks are matched by the order of their start, not by name."""

    @abstractmethod
    def start(self, bucket: torch.Tensor, name: str) -> Any:
        """Start summing ``bucket``, and return a handle."""

    @abstractmethod
    def wait(self, handle: Any) -> None:
        """Wait until the bucket of ``handle`` holds the sum."""

    def nbytes(self, bucket: torch.Tensor) -> int:
        """Return the number of bytes sent for ``bucket``."""
        return bucket.numel() * bucket.element_size()

    def progress(self) -> None:  # noqa: B027 (most libraries have a thread for it)
        """Progress the sums under way."""


class Compressed(Sums):
    """Sums of buckets in ``kind``: each gradient and each sum of two is rounded to it."""

    def __init__(self, sums: Sums, kind: torch.dtype) -> None:
        self.sums, self.kind, self.in_order = sums, kind, sums.in_order

    @override
    def start(self, bucket: torch.Tensor, name: str) -> Any:
        sent = bucket.to(self.kind)
        return self.sums.start(sent, name), sent, bucket

    @override
    def wait(self, handle: Any) -> None:
        inner, sent, bucket = handle
        self.sums.wait(inner)
        bucket.copy_(sent)

    @override
    def progress(self) -> None:
        self.sums.progress()

    @override
    def nbytes(self, bucket: torch.Tensor) -> int:
        return bucket.numel() * self.kind.itemsize


def fill(tensor: torch.Tensor, flags: Flags, moment: int, *, late: bool = False) -> None:
    """Set ``tensor`` to the signals of this rank, as numbers that can be summed.

    Args:
        tensor: ``SIGNALS`` elements.
        flags: the flags of this rank.
        moment: number of the part of a backward pass, modulo ``STEP``; ``STEP`` outside of passes.
        late: whether this rank has gradients that the sum does not contain.
    """
    tensor.zero_()
    at = [index for index, flag in enumerate((*flags, late)) if flag]
    for index in (*at, len(Flags._fields) + 1 + moment):
        tensor[index : index + 1].fill_(1.0)  # assigning would synchronize with a GPU


def agreed(sums: torch.Tensor) -> Flags:
    """Return the flags of all ranks from the ``sums`` of signals; this synchronizes with a GPU."""
    return Flags(*(value > 0 for value in sums[: len(Flags._fields)].tolist()))


def check(sums: torch.Tensor, *, by_all: bool = True) -> bool:
    """Return whether any rank has late gradients, from the ``sums`` of signals.

    Raises:
        UsageError: the ranks were at different moments. It is reported once if these sums are
            checked ``by_all`` ranks.
    """
    late, *moments = sums[len(Flags._fields) :].tolist()
    if sum(map(bool, moments)) > 1:
        error = UsageError(
            "the ranks make different backward passes or steps: every rank must make each of "
            "them, in a closure too, also on a stand-in (`part.count` is 0: do not skip it), "
            "and assign gradients on all ranks or on none"
        )
        raise on_all_ranks(error) if by_all else error
    return late > 0


class Summing(Protocol):
    """Gradients that are summed over the ranks by a backward pass, or before the step."""

    def begin(self) -> None:
        """Expect a backward pass, or gradients that are assigned."""

    def synchronize(self) -> None:
        """Sum the gradients over the ranks now, unless a backward pass has; all ranks call it.

        The step does so, too. Call it before gradients that were assigned are read or clipped.
        """


def before_step(gradients: Summing, arguments: Any, named: Any) -> Any:
    """Synchronize ``gradients`` for ``optimizer.step``: now, or each time after its closure.

    Returns:
        The arguments of the step with such a closure; None: it has none.
    """
    optimizer, *positional = arguments
    closure, *rest = positional or [named.get("closure")]
    if closure is None:
        gradients.synchronize()
        return None

    def summed() -> Any:
        gradients.begin()
        loss = closure()
        gradients.synchronize()
        return loss

    return (optimizer, summed, *rest), {k: v for k, v in named.items() if k != "closure"}


def once_per_step(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``hook``, of an optimizer's step, which is not called again for a step within it.

    If the step of a class calls that of its base class, PyTorch calls the hooks for each.
    """

    def called(optimizer: Any, arguments: Any, named: Any) -> Any:
        step = sys._getframe(1)  # of PyTorch, which calls the hooks and then the optimizer's code
        frame = step.f_back
        while frame and not (
            frame.f_code is step.f_code and frame.f_locals.get("self") is optimizer
        ):
            frame = frame.f_back
        return None if frame else hook(optimizer, arguments, named)

    return called
