"""Step 5 for PyTorch: gradients summed over the ranks in a few large buckets, as they appear.

A bucket is one flat tensor. As backward produces a gradient, it is copied to its place there, and
when the bucket is full its sum over the ranks starts at once, beside the rest of the backward
pass. When ``backward`` returns, the gradients are those of the global batch: views of the buckets,
so nothing is copied back. (The idea of buckets is PyTorch DDP's: Li et al., "PyTorch Distributed",
VLDB 2020.)

Each backward pass adds its sum to what the gradients held before, as in one process: passes may be
accumulated, and ``zero_grad`` begins anew.

One tensor per bucket also means one order of summation: results are bit-equal from run to run.
"""

from __future__ import annotations

import functools
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils import _pytree

from hvdtrain.adapters.common import in_buckets
from hvdtrain.config.levers import BUCKET_BYTES
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.waits import SUM

ALIGNMENT = 16  # elements; so that each gradient begins on a cache line


class Sums(ABC):
    """Sums buckets over all ranks, in place, while this one goes on."""

    in_order = False
    """Whether sums are paired by the order in which a rank starts them, not by name."""

    @abstractmethod
    def start(self, bucket: torch.Tensor, name: str) -> Any:
        """Start summing ``bucket``, and return a handle."""

    @abstractmethod
    def wait(self, handle: Any) -> None:
        """Wait until the bucket of ``handle`` holds the sum."""

    def nbytes(self, bucket: torch.Tensor) -> int:
        """Return how many bytes are sent for ``bucket``."""
        return bucket.numel() * bucket.element_size()

    def progress(self) -> None:  # noqa: B027 (most have a thread for it)
        """Let the sums that were started go on."""


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
        # After the gradients: for each parameter, how many ranks have a gradient of it, and in the
        # last bucket how many ranks hold sums of earlier passes, and the request to stop.
        size = length + len(parameters) + 2
        self.flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        self.found = self.flat[length:-2]
        # Laid out as the parameters are (contiguous, channels_last): fused optimizers want that.
        layouts = [torch.empty_like(one, device="meta") for one in parameters]
        self.views = [
            self.flat.as_strided(layout.shape, layout.stride(), start)
            for start, layout in zip(starts, layouts, strict=True)
        ]
        self.handle: Any = None
        self.missing: set[int] | None = None  # gradients yet to come; None between the passes
        self.before: list[torch.Tensor | None] = []  # what they held before this pass
        self.own: set[int] = set()  # gradients that hold what this rank has computed since

    def open(self) -> None:
        """Begin a backward pass: keep aside what earlier ones have left in the gradients."""
        if self.missing is None:
            self.missing = set(range(len(self.parameters)))
            self.found.fill_(1.0)
            # Those of an earlier pass are views of what this pass is about to overwrite.
            self.before = [
                None if one.grad is None else one.grad.clone() for one in self.parameters
            ]

    def expect(self, index: int) -> None:
        """Let what is about to be added to a gradient stand alone there, or beside our own."""
        self.open()
        if index not in self.own:
            self.own.add(index)
            self.parameters[index].grad = None

    def fill(self, index: int, weight: Callable[[], float]) -> None:
        """Copy the gradient of a parameter, times ``weight``, to its place.

        Horovod would scale too, but only by a factor that is the same on all ranks.
        """
        assert self.missing is not None
        gradient, view = self.parameters[index].grad, self.views[index]
        factor = 0.0 if gradient is None else weight()
        if gradient is None or factor == 0:  # a mean over nothing is nan: 0 times it would be too
            view.zero_()
        else:
            torch.mul(gradient.detach(), factor, out=view)
        if gradient is None:
            self.found[index : index + 1].zero_()  # a number of the host would be waited for
        self.parameters[index].grad = view
        self.missing.discard(index)

    def close(self, absent: set[int], *, dropped: bool = False) -> None:
        """End the pass: the gradients are the sums over the ranks, and what was there before.

        Args:
            absent: those that this rank had no gradient of.
            dropped: what was there before does not count.
        """
        found = self.found.tolist() if absent else []  # on a GPU it would be waited for
        for index, parameter in enumerate(self.parameters):
            held, view = None if dropped else self.before[index], self.views[index]
            if held is not None:
                view.add_(held)
            # As in one process: what no rank has a gradient of has none.
            unused = index in absent and not found[index]
            parameter.grad = None if unused and held is None else view
        self.handle, self.missing, self.before, self.own = None, None, [], set()


class Buckets:
    """All gradients of an optimizer, summed over the ranks by the end of each backward pass.

    Every rank must make the same passes and steps. A rank whose part is empty may leave its
    backward pass out: it contributes zeros, when its gradients are looked at, when the step is
    made, or at last before whatever all ranks do next.

    Such a rank cannot tell whether ``zero_grad`` came before the pass that it left out, or after
    it, as where the tail of an accumulation is dropped. Those that made the pass can: in the next
    one they say whether they still hold its sums.

    Args:
        name: of this optimizer, the same on all ranks.
        optimizer: its gradients.
        sums: over all ranks, for these buckets alone.
        weight: the factor of this rank's gradients in this pass; 0 makes them zeros, whatever
            they are.
        full: bytes from which on a bucket takes no other gradient.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        sums: Sums,
        weight: Callable[[], float],
        full: int = BUCKET_BYTES,
    ) -> None:
        self.sums, self.weight = sums, weight
        parameters = [
            parameter
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        ]
        self.buckets = _grouped(name, parameters, full)
        self.stop_wanted: Callable[[], bool] = lambda: False
        # Whether the passes of all ranks are known from the parts, so that one can be left out.
        self.may_skip: Callable[[], bool] = lambda: True
        self.waiting: Callable[[str], AbstractContextManager[None]] = lambda call: nullcontext()
        self.summing = True  # by this backward pass; else it adds to this rank's gradients alone
        self.blocked_seconds = 0.0  # in which we waited for sums, in all
        self._running = self._summed = False  # a backward pass; a pass of this part was summed
        self._awaited = False  # the sum of a pass that this rank leaves out
        self._zeroed = False  # meanwhile
        self._unclear = False  # so whether the sum that this rank has counts
        self._holds = False  # sums of earlier passes, if the gradients are there
        # Whoever holds the node keeps it, and the hook on it, alive.
        self._nodes = []
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                node: Any = parameter.expand_as(parameter).grad_fn
                node = node.next_functions[0][0]
                node.register_prehook(functools.partial(self._arriving, bucket, index))
                self._nodes.append(node)
                hook = functools.partial(self._arrived, bucket, index)
                parameter.register_post_accumulate_grad_hook(hook)
        optimizer.register_step_pre_hook(self._before_step)
        # Not to keep it alive: an optimizer that is gone makes no passes.
        self.optimizer = weakref.ref(optimizer)
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]

    def _arriving(self, bucket: Bucket, index: int, _: Any) -> None:
        """Let the gradient that autograd is about to add to a parameter stand alone there."""
        if self.summing and not self._running:
            self._running = True
            # At the end of the pass, as DDP and FSDP do it; there is no public name for it.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        bucket.expect(index)

    def _arrived(self, bucket: Bucket, index: int, _: torch.Tensor) -> None:
        if not self.summing:
            return
        bucket.fill(index, self.weight)
        if not bucket.missing:
            self._start_full()
        self.sums.progress()

    def _start_full(self) -> None:
        """Start the sums of the buckets that are full, and may be started."""
        for bucket in self.buckets:
            if bucket.handle is None:
                if bucket.missing == set():
                    self._start(bucket)
                elif self.sums.in_order:
                    return

    def _start(self, bucket: Bucket) -> None:
        if bucket is self.buckets[-1]:
            bucket.flat[-2:-1].fill_(float(self._holds_sums()))
            bucket.flat[-1:].fill_(float(self.stop_wanted()))
        bucket.handle = self.sums.start(bucket.flat, bucket.name)

    def _holds_sums(self) -> bool:
        held = (bucket.before or [one.grad for one in bucket.parameters] for bucket in self.buckets)
        known = self._holds and not self._unclear
        return known and any(one is not None for gradients in held for one in gradients)

    def finish(self) -> None:
        """Wait until all gradients are the sums over the ranks."""
        absent = []
        for bucket in self.buckets:
            bucket.open()
            missing = set(bucket.missing or ())
            absent.append(missing - bucket.own)
            for index in missing:
                bucket.expect(index)
                bucket.fill(index, self.weight)
            if bucket.handle is None:
                self._start(bucket)
        started = time.perf_counter()
        with self.waiting(SUM):
            for bucket in self.buckets:
                self.sums.wait(bucket.handle)
        self.blocked_seconds += time.perf_counter() - started
        dropped = self._unclear and not self.buckets[-1].flat[-2] > 0
        for bucket, indices in zip(self.buckets, absent, strict=True):
            bucket.close(indices, dropped=dropped)
        self._unclear = self._awaited and self._zeroed
        self._running = self._awaited = False
        self._summed = self._holds = True

    def begin(self, *, empty: bool) -> None:
        """Begin a part; where it is ``empty``, this rank need not make the backward pass.

        Its gradients then become whole when they are first touched, in the step, or by ``whole``:
        not at once, since the other ranks may need this one before they come to their pass.
        """
        self.whole()  # the part before was empty, and more are accumulated
        self._summed = self._zeroed = False
        self._awaited = empty and self.may_skip() and torch.is_grad_enabled()
        for bucket in self.buckets if self._awaited else ():
            bucket.open()
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view.as_subclass(Awaited)
                parameter.grad.buckets = self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Take the place of ``optimizer.zero_grad``: what is awaited stays."""
        self._summed = self._holds = False
        optimizer = self.optimizer()
        if self._awaited:
            self._zeroed = True
        elif optimizer is not None:
            self._unclear = False
            type(optimizer).zero_grad(optimizer, set_to_none)
        for bucket in self.buckets:
            if bucket.missing is not None:
                bucket.before, bucket.own = [None] * len(bucket.parameters), set()

    def whole(self) -> None:
        """Make the gradients whole now, if they are awaited."""
        if self._awaited:
            self.finish()

    def _before_step(self, *_: Any) -> None:
        if not (self._summed or self.may_skip()):
            raise UsageError(
                "optimizer.step() without a backward pass before it: with several optimizers a "
                "backward pass may reach the parameters of each, so every rank makes them all, "
                "also on a part without samples (its loss may be nan, it counts for nothing)"
            )
        if self._awaited or not self._summed:
            self.finish()
        self._summed = self._unclear = False

    @property
    def messages(self) -> dict[str, int]:
        """Count and bytes of the messages of a step."""
        nbytes = sum(self.sums.nbytes(bucket.flat) for bucket in self.buckets)
        return {"count": len(self.buckets), "bytes": nbytes}

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank wanted to stop at the last step; the same answer on all ranks."""
        return bool(self.buckets[-1].flat[-1] > 0)


class Awaited(torch.Tensor):
    """A gradient that other ranks still compute: whoever touches it waits until it is whole."""

    buckets: Buckets

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait, then call ``func`` with the gradients as plain tensors."""

        def plain(value: Any) -> Any:
            if not isinstance(value, Awaited):
                return value
            value.__dict__["buckets"].whole()
            with torch._C.DisableTorchFunctionSubclass():
                return value.as_subclass(torch.Tensor)

        args, kwargs = _pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def _zero_awaited(original: Callable[..., None]) -> Callable[..., None]:
    """Return ``Module.zero_grad`` so that what is awaited stays, as by an optimizer's."""

    @functools.wraps(original)
    def zero_grad(module: torch.nn.Module, set_to_none: bool = True) -> None:
        gradients = [one.grad for one in module.parameters()]
        awaited = {one.__dict__["buckets"] for one in gradients if isinstance(one, Awaited)}
        for buckets in awaited:
            buckets.zero_grad(set_to_none)
        if not awaited:
            original(module, set_to_none)

    return zero_grad


torch.nn.Module.zero_grad = _zero_awaited(torch.nn.Module.zero_grad)  # type: ignore[method-assign]


def _grouped(name: str, parameters: list[torch.nn.Parameter], full: int) -> list[Bucket]:
    kinds = [((p.dtype, p.device), p.numel() * p.element_size()) for p in parameters]
    return [
        Bucket(f"{name}.{number}", [parameters[place] for place in group])
        for number, group in enumerate(in_buckets(kinds, full))
    ]
