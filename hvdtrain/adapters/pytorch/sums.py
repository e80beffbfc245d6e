"""Asynchronous sums of PyTorch tensors over the ranks, also in a 16-bit type: ``--compression``.

Gradients are multiplied by the weight of the rank's part before rounding. The weights of all ranks
sum to 1, so no partial sum exceeds the largest gradient: fp16 overflows only if a gradient exceeds
65504. The sum is then infinite on all ranks, and handled like any gradient that is not finite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from typing_extensions import override

from hvdtrain.adapters.common_adapter import Flags

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


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


def fill(tensor: torch.Tensor, flags: Flags) -> None:
    """Set ``tensor`` to the ``flags`` of this rank, as numbers that can be summed."""
    for index, flag in enumerate(flags):
        tensor[index : index + 1].fill_(float(flag))  # assigning would synchronize with a GPU


def agreed(sums: torch.Tensor) -> Flags:
    """Return the flags of all ranks from their ``sums``; this synchronizes with a GPU."""
    return Flags(*(value > 0 for value in sums.tolist()))
