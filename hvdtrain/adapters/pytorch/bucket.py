"""A bucket: gradients of one type and device, summed over the ranks as one flat tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.adapters.common_adapter import Flags

ALIGNMENT = 16  # elements: a cache line of 64 bytes in fp32


class Bucket:
    """Gradients of some parameters of one type and device, in one flat tensor.

    The name is the same on all ranks; the parameters are in the expected order of their gradients,
    those of the optimizer or ``others`` of its model.
    """

    def __init__(
        self, name: str, parameters: list[torch.nn.Parameter], *, others: bool = False
    ) -> None:
        self.name = name
        self.parameters, self.others = parameters, others
        self.handle: Any = None
        self.missing: set[int] | None = None  # pending gradients; None between the passes
        self.before: list[torch.Tensor | None] = []  # gradients before this pass
        self.touched: set[int] = set()  # gradients to which this rank has added in this pass
        self.zeroed = False  # while awaited
        self.unclear = False  # so it is unknown whether to keep this rank's sum

    def allocate(self) -> None:
        """Allocate the flat tensor; not before a parameter is trained."""
        parameters = self.parameters
        lengths = (-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters)
        *starts, length = itertools.accumulate(lengths, initial=0)
        first = parameters[0]
        # After the gradients: for each parameter, the number of ranks that have a gradient, and in
        # the last bucket the numbers of ranks with sums of earlier passes and with each flag.
        size = length + len(parameters) + 1 + len(Flags._fields)
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        tail = self.flat[length:].split([len(parameters), 1, len(Flags._fields)])
        self.holders, self.holds, self.flags = tail
        # In the memory format of the parameters (contiguous, channels_last), for fused optimizers.
        layouts = [torch.empty_like(parameter, device="meta") for parameter in parameters]
        self.views = [
            self.flat.as_strided(layout.shape, layout.stride(), start)
            for start, layout in zip(starts, layouts, strict=True)
        ]

    def open(self) -> None:
        """Begin a backward pass: set aside the gradients of earlier passes."""
        if self.missing is None:
            self.missing = set(range(len(self.parameters)))
            self.holders.fill_(1.0)
            # Those of an earlier pass are views of memory that this pass will overwrite.
            self.before = [
                None if parameter.grad is None else parameter.grad.clone()
                for parameter in self.parameters
            ]

    def expect(self, index: int) -> None:
        """Reset a gradient, unless this rank has added to it in this pass."""
        self.open()
        if index not in self.touched:
            self.touched.add(index)
            self.parameters[index].grad = None

    def has_lost(self) -> bool:
        """Return whether an awaited gradient was set to None by other means than ``zero_grad``."""
        rows = enumerate(self.parameters)
        return any(index not in self.touched and p.grad is None for index, p in rows)

    def fill(self, index: int, weight: Callable[[], float]) -> None:
        """Copy the gradient of a parameter, times ``weight``, into the bucket.

        Horovod can scale too, but only by the same factor on all ranks.
        """
        assert self.missing is not None
        gradient, view = self.parameters[index].grad, self.views[index]
        factor = 0.0 if gradient is None else weight()
        if gradient is None or factor == 0:  # a mean over nothing is nan: 0 times it would be too
            view.zero_()
        else:
            gradient = gradient.to_dense() if gradient.is_sparse else gradient
            torch.mul(gradient.detach(), factor, out=view)
        if gradient is None:
            self.holders[index : index + 1].zero_()  # assigning a host value would synchronize
        self.parameters[index].grad = view
        self.missing.discard(index)

    def close(self, absent: set[int], *, dropped: bool = False) -> None:
        """End the pass: set the gradients to the sums over the ranks plus the previous gradients.

        Parameters in ``absent`` have no gradient here; ``dropped`` discards the previous ones.
        """
        holders = self.holders.tolist() if absent else []  # synchronizes with a GPU
        for index, parameter in enumerate(self.parameters):
            held, view = None if dropped else self.before[index], self.views[index]
            if held is not None:
                view.add_(held)
            # As in one process: a parameter without a gradient on any rank has none.
            unused = index in absent and not holders[index]
            parameter.grad = None if unused and held is None else view
        self.handle, self.missing, self.before, self.touched = None, None, [], set()
