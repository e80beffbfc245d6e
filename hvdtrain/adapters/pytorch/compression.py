"""Gradients of PyTorch that are sent and summed in a 16-bit type: ``--compression``.

They are multiplied by the weight of the rank's part before they are rounded. The weights of all
ranks sum to 1, so no sum, and no part of one, is larger than the largest gradient of a rank: in
fp16 it overflows only where a gradient itself is beyond 65504. It is infinity then on all ranks,
and treated as any gradient that is not finite.
"""

from __future__ import annotations

from typing import Any

import torch
from typing_extensions import override

from hvdtrain.adapters.pytorch.buckets import Sums

TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class Compressed(Sums):
    """Sums buckets as ``kind``: each gradient, and each sum of two, is rounded to it.

    Args:
        sums: what sums a tensor of that type.
        kind: a value of ``TYPES``.
    """

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
