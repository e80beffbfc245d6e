"""A bucket: gradients of one type and device, summed over the ranks as one flat tensor."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from hvdtrain.adapters.pytorch.sums import SIGNALS
from hvdtrain.adapters.pytorch.weights import Number, weigh

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
        self.flat: Any = None  # the tensor, once it is allocated
        self.handle: Any = None
        self.missing: set[int] | None = None  # gradients still to come; None between the sums
        self.absent: set[int] = set()  # this rank has no gradient, or only that of a stand-in
        self.late: list[tuple[int, torch.Tensor]] = []  # came after the sum had started

    def allocate(self) -> None:
        """Allocate the flat tensor; not before a parameter is trained."""
        parameters = self.parameters
        lengths = (-(-parameter.numel() // ALIGNMENT) * ALIGNMENT for parameter in parameters)
        *starts, length = itertools.accumulate(lengths, initial=0)
        first = parameters[0]
        # After the gradients: for each parameter, the number of ranks that have a gradient, and in
        # the last bucket the signals.
        size = length + len(parameters) + SIGNALS
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.holders, self.signals = self.flat[length:].split([len(parameters), SIGNALS])
        # In the memory format of the parameters (contiguous, channels_last), for fused optimizers.
        layouts = [torch.empty_like(parameter, device="meta") for parameter in parameters]
        self.views = [
            self.flat.as_strided(layout.shape, layout.stride(), start)
            for start, layout in zip(starts, layouts, strict=True)
        ]

    def has(self, index: int) -> bool:
        """Return whether the gradient of a parameter has come, before the sum is complete."""
        return self.missing is not None and index not in self.missing

    def holds_sums(self) -> bool:
        """Return whether every gradient is none, or a view of the bucket, which holds a sum."""
        rows = zip(self.parameters, self.views, strict=True)
        return all(parameter.grad is None or parameter.grad is view for parameter, view in rows)

    def fill(self, index: int, weight: Callable[[], Number | None]) -> None:
        """Copy the gradient of a parameter, times ``weight``, into the bucket; None: a stand-in's.

        If it is a sum over the ranks, on all of them, it remains so: the weights sum to 1. (Horovod
        can scale too, but only by the same factor on all ranks.)
        """
        if self.missing is None:
            self.missing, self.absent = set(range(len(self.parameters))), set()
            self.holders.fill_(1.0)
        gradient, view = self.parameters[index].grad, self.views[index]
        factor = None if gradient is None else weight()
        self.parameters[index].grad = view
        if gradient is not None:
            gradient = (gradient.to_dense() if gradient.is_sparse else gradient).detach()
        if self.has(index):  # what autograd has produced in addition, in the same pass
            if gradient is None or factor is None:
                return
            if self.handle is None:
                more = torch.empty_like(view)
                weigh(gradient, factor, out=more)
                view.add_(more)
            else:
                self.late.append((index, gradient))
            return
        self.missing.discard(index)
        if gradient is None or factor is None:
            view.zero_()
            self.absent.add(index)
            self.holders[index : index + 1].zero_()  # assigning a host value would synchronize
        else:
            weigh(gradient, factor, out=view)

    def fill_missing(self, weight: Callable[[], Number | None]) -> None:
        """Fill what has not come."""
        for index in range(len(self.parameters)):
            if not self.has(index):
                self.fill(index, weight)

    def close(self) -> None:
        """Set the gradients to the sums: none where no rank has one, as in one process."""
        holders = self.holders.tolist() if self.absent else []  # synchronizes with a GPU
        for index, (parameter, view) in enumerate(zip(self.parameters, self.views, strict=True)):
            parameter.grad = None if index in self.absent and not holders[index] else view
        self.handle, self.missing = None, None
        for index, gradient in self.late:
            parameter = self.parameters[index]
            parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        self.late = []
