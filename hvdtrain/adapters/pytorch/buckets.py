"""Step 5 for PyTorch: gradients summed over the ranks in a few large buckets, as they appear.

A bucket is one flat tensor. As backward produces a gradient, it is copied to its place there, and
when the bucket is full its sum over the ranks starts at once, beside the rest of the backward
pass. The gradients become views of the bucket, so nothing is copied back. (The idea of buckets is
PyTorch DDP's: Li et al., "PyTorch Distributed", VLDB 2020.)

One tensor a bucket also means one order of summation: results are bit-equal from run to run.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

BUCKET_BYTES = 25 * 2**20
ALIGNMENT = 16  # elements; so that each gradient begins on a cache line

Reduce = Callable[[torch.Tensor, str], Any]
"""(bucket, name) -> handle: start summing ``bucket`` over all ranks, in place."""


class Bucket:
    """Gradients of some parameters of one type and device, in one flat tensor.

    Args:
        name: the same on all ranks.
        parameters: in the order in which their gradients are expected.
    """

    def __init__(self, name: str, parameters: list[torch.nn.Parameter]) -> None:
        self.name = name
        self.parameters = parameters
        starts, length = [], 0
        for parameter in parameters:
            starts.append(length)
            length += -(-parameter.numel() // ALIGNMENT) * ALIGNMENT
        first = parameters[0]
        # One element more than the gradients: the last bucket carries a request to stop in it.
        self.flat = torch.zeros(length + 1, dtype=first.dtype, device=first.device)
        self.views = [
            self.flat[start : start + parameter.numel()].view(parameter.shape)
            for start, parameter in zip(starts, parameters, strict=True)
        ]
        self.handle: Any = None
        self.missing = set(range(len(parameters)))

    def fill(self, index: int, weight: float) -> None:
        """Copy the gradient of a parameter, times ``weight``, to its place; let it live there.

        Horovod would scale too, but only by a factor that is the same on all ranks.
        """
        gradient = self.parameters[index].grad
        view = self.views[index]
        if gradient is None or weight == 0:  # a mean over nothing is nan: 0 times it would be too
            view.zero_()
        else:
            torch.mul(gradient.detach(), weight, out=view)
        self.parameters[index].grad = view
        self.missing.discard(index)


class Buckets:
    """All gradients of an optimizer, reduced over the ranks before each of its steps.

    Every rank must take the same steps; a rank without samples takes its step without a backward
    pass, and contributes zeros.

    Args:
        parameters: all parameters of the optimizer that need a gradient.
        reduce: starts a sum over all ranks and returns a handle.
        wait: waits for a handle.
        weight: the factor of this rank's gradients in this step; 0 makes them zeros, whatever
            they are.
    """

    def __init__(
        self,
        parameters: list[torch.nn.Parameter],
        reduce: Reduce,
        wait: Callable[[Any], Any],
        weight: Callable[[], float],
    ) -> None:
        self.reduce, self.wait, self.weight = reduce, wait, weight
        self.buckets = [
            Bucket(f"gradients.{number}", group)
            for number, group in enumerate(_grouped(parameters))
        ]
        self.stop_wanted: Callable[[], bool] = lambda: False
        self.blocked_seconds = 0.0  # in which we waited for sums, in all
        self._reduced = False
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                parameter.register_post_accumulate_grad_hook(self._hook(bucket, index))

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def arrived(_: torch.Tensor) -> None:
            if index not in bucket.missing:
                raise RuntimeError(
                    "two backward passes before one optimizer.step(): each step takes one"
                )
            self._reduced = False
            bucket.fill(index, self.weight())
            if not bucket.missing:
                self._start(bucket)

        return arrived

    def _start(self, bucket: Bucket) -> None:
        if bucket is self.buckets[-1]:
            bucket.flat[-1] = float(self.stop_wanted())
        bucket.handle = self.reduce(bucket.flat, bucket.name)

    def finish(self) -> None:
        """Wait until all gradients are the sums over the ranks; ``optimizer.step`` does it too."""
        for bucket in self.buckets:
            for index in sorted(bucket.missing):
                bucket.fill(index, self.weight())
            if bucket.handle is None:
                self._start(bucket)
        started = time.perf_counter()
        for bucket in self.buckets:
            self.wait(bucket.handle)
            bucket.handle = None
            bucket.missing = set(range(len(bucket.parameters)))
        self.blocked_seconds += time.perf_counter() - started
        self._reduced = True

    def before_step(self, *_: Any) -> None:
        """What the optimizer calls before each step: its gradients are then reduced."""
        if not self._reduced:
            self.finish()
        self._reduced = False

    @property
    def messages(self) -> dict[str, int]:
        """Count and bytes of the messages of a step."""
        nbytes = sum(bucket.flat.numel() * bucket.flat.element_size() for bucket in self.buckets)
        return {"count": len(self.buckets), "bytes": nbytes}

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank wanted to stop at the last step; the same answer on all ranks."""
        return bool(self.buckets[-1].flat[-1] > 0)


def _grouped(parameters: list[torch.nn.Parameter]) -> list[list[torch.nn.Parameter]]:
    # Backward reaches the last layers first, so the buckets go from the back to the front.
    groups: list[list[torch.nn.Parameter]] = []
    size, kind = 0, None
    for parameter in reversed(parameters):
        this = (parameter.dtype, parameter.device)
        if not groups or size >= BUCKET_BYTES or this != kind:
            groups.append([])
            size, kind = 0, this
        groups[-1].append(parameter)
        size += parameter.numel() * parameter.element_size()
    return groups
