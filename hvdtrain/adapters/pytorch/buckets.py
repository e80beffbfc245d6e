"""Step 5 for PyTorch: gradients summed over the ranks in a few large buckets during backward.

A bucket is one flat tensor, into which each gradient is copied as backward produces it. When the
bucket is full, its sum over the ranks starts at once, overlapping the rest of the backward pass.
When ``backward`` returns, the gradients are those of the global batch: views of the buckets, so
nothing is copied back. (Buckets are an idea of PyTorch DDP: Li et al., "PyTorch Distributed", VLDB
2020.)

What is summed is whatever stands in ``.grad``, times the weight of the rank's part. The weights of
all ranks sum to 1, so the sum of a sum is the same: passes may be accumulated, and a gradient may
be summed again if any rank may have changed it.

One tensor per bucket also fixes the order of summation: results are bit-equal from run to run.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from hvdtrain.adapters import partition
from hvdtrain.adapters.framework import Rank
from hvdtrain.adapters.pytorch.bucket import Bucket
from hvdtrain.adapters.pytorch.framework import IS_TRAINED, parameters_of
from hvdtrain.adapters.pytorch.sums import (
    STEP,
    TYPES,
    GradientSums,
    TorchStrategy,
    check,
    fill,
)
from hvdtrain.adapters.pytorch.weights import Number, before_gradient
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.waits import SUM, WEIGHTS


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


class Buckets(GradientSums):
    """All gradients of an optimizer, summed over the ranks by the end of each backward pass.

    So are those of the model's other parameters, which may be read too, e.g. by clipping. Frozen
    parameters are summed as soon as they are trained.

    Every rank must make the same passes and steps. Gradients that no backward pass has summed, e.g.
    those of ``torch.autograd.grad`` that were assigned, are summed at the step.

    Args:
        name: name of the optimizer, the same on all ranks.
        optimizer: the optimizer whose gradients are summed.
        sums: sums over all ranks, used only for these buckets.
        adapter: adapter of this rank.
        others_of: function that makes all other sums leave the optimizer's parameters to these,
            and returns the other parameters to sum.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        sums: Sums,
        adapter: Rank,
        others_of: Callable[[Buckets], Sequence[torch.nn.Parameter]] = lambda buckets: (),
    ) -> None:
        self.connect(adapter)
        self.name, self.sums = name, sums
        self._others_of = others_of
        self.summing = True  # over the ranks; False: backward passes accumulate locally
        self._running = False  # a backward pass runs
        self._has_local = False  # gradients of passes within `no_sync`
        self.replaced = False  # by those of another optimizer of the same parameters
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []  # these references keep them, and the hooks on them, alive
        # Weak, so as not to keep a deleted optimizer alive.
        self.optimizer = weakref.ref(optimizer)
        self._sum_all(optimizer)
        self.attach(optimizer)
        optimizer.synchronize = self.synchronize_of(optimizer)  # type: ignore[attr-defined]
        optimizer.add_param_group = self._add_param_group  # type: ignore[method-assign]
        weakref.finalize(optimizer, self.release)

    def _sum_all(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = parameters_of(optimizer)
        self.others = list(self._others_of(self))
        self._build()

    def _build(self) -> None:
        """Distribute the parameters over buckets, and watch their gradients."""
        self.release()
        self.buckets: list[Bucket] = []  # those that are summed
        self._frozen: list[Bucket] = []
        numbers = itertools.count()
        # One bucket at least is summed: the flags are in it.
        of_optimizer = list(filter(IS_TRAINED, self.parameters)) or self.parameters
        used = {id(value) for value in (*of_optimizer, *filter(IS_TRAINED, self.others))}
        for parameters, others in ((self.parameters, False), (self.others, True)):
            trained = [value for value in parameters if id(value) in used]
            frozen = [v for v in parameters if id(v) not in used and may_train(v)]
            for values, buckets in ((trained, self.buckets), (frozen, self._frozen)):
                kinds = [((p.dtype, p.device), p.numel() * p.element_size()) for p in values]
                for group in partition.buckets(kinds):
                    held = [values[index] for index in group]
                    buckets.append(Bucket(f"{self.name}.{next(numbers)}", held, others=others))
        for bucket in self.buckets:
            bucket.allocate()
        self._last = [bucket for bucket in self.buckets if not bucket.others][-1]  # of the own
        for bucket in (*self.buckets, *self._frozen):
            for index, parameter in enumerate(bucket.parameters):
                self._watch(bucket, index, parameter)

    def _watch(self, bucket: Bucket, index: int, parameter: torch.nn.Parameter) -> None:
        handle, node = before_gradient(parameter, functools.partial(self._arriving, bucket, index))
        after = functools.partial(self._arrived, bucket, index)
        trained = parameter.requires_grad
        parameter.requires_grad_()  # a frozen one, too: it may be trained later
        self._handles += [handle, parameter.register_post_accumulate_grad_hook(after)]
        self._nodes.append(node)
        parameter.requires_grad_(trained)

    def release(self) -> None:
        """Sum no gradients any more."""
        for handle in self._handles:
            handle.remove()
        self._handles, self._nodes = [], []

    def detach(self, parameters: set[int]) -> bool:
        """Detach parameters, by their ids, that another optimizer sums from now on.

        Returns:
            Whether some remain: an optimizer of which any is taken must not be used any more.
        """
        if any(id(value) in parameters for value in self.parameters):
            self.replaced = True
            self.release()
        elif any(id(value) in parameters for value in self.others):
            self.others = [value for value in self.others if id(value) not in parameters]
            self._build()
        return not self.replaced

    def _add_param_group(self, param_group: Any) -> None:
        """Replace ``optimizer.add_param_group``: sum the gradients of the new parameters, too."""
        optimizer = self.optimizer()
        assert optimizer is not None
        type(optimizer).add_param_group(optimizer, param_group)
        self._sum_all(optimizer)

    def _add_unfrozen(self) -> None:
        """Sum from now on what was frozen; all ranks do so by the end of the same pass."""
        frozen, self._frozen = self._frozen, []
        for bucket in frozen:
            if any(p.requires_grad or p.grad is not None for p in bucket.parameters):
                bucket.allocate()
                self.buckets.append(bucket)
            else:
                self._frozen.append(bucket)

    def _arriving(self, bucket: Bucket, index: int, _: Any) -> None:
        """Prepare for autograd to add to the gradient of a parameter."""
        if not self.summing:
            self._summed, self._has_local = False, True
            return
        if not self._running:
            self.begin_pass(local=self._has_local)
            self._running = True
            # At the end of the pass, as in DDP and FSDP; there is no public API for it.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        if bucket in self._frozen:
            self._add_unfrozen()
        if bucket.has(index):  # a second time, by a checkpoint; its memory may be on the way
            bucket.parameters[index].grad = None

    def _arrived(self, bucket: Bucket, index: int, _: torch.Tensor) -> None:
        if not self.summing:
            return
        bucket.fill(index, self._weight)
        if not bucket.missing:
            self._start_full()
        self.sums.progress()

    def _start_full(self) -> None:
        """Start the sums of full buckets, as far as the order of the sums permits."""
        for bucket in self.buckets:
            if bucket.handle is None:
                # The signals, in the last one, are known at the end of the pass.
                if bucket.missing == set() and bucket is not self._last:
                    bucket.handle = self.sums.start(bucket.flat, bucket.name)
                elif self.sums.in_order:
                    return

    def _finish(self) -> None:
        """Complete the sums of a backward pass."""
        self._running = self._has_local = False
        self._sum(self.adapter.parts_begun % STEP)
        self.end_pass()

    @override
    def all_parameters(self) -> Iterable[torch.nn.Parameter]:
        return (value for bucket in self.buckets for value in bucket.parameters)

    def _sum(self, moment: int) -> None:
        """Sum all gradients as they are over the ranks, times the weights of their parts."""
        self._add_unfrozen()
        for bucket in self.buckets:
            bucket.fill_missing(self._weight)
        late = any(bucket.late for bucket in self.buckets)
        fill(self._last.signals, self.adapter.flags, moment, late=late)
        with self.blocked(SUM):
            for bucket in self.buckets:
                if bucket.handle is None:
                    bucket.handle = self.sums.start(bucket.flat, bucket.name)
            for bucket in self.buckets:
                self.sums.wait(bucket.handle)
        self.note_flags(self._last.signals)
        late = check(self._last.signals)
        for bucket in self.buckets:
            bucket.close()
        self.mark_summed()
        if late:
            self._sum(STEP)

    def _weight(self) -> Number | None:
        return self.adapter.loss_weight

    @override
    def begin(self) -> None:
        super().begin()
        self._add_unfrozen()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.summing = False
        try:
            yield
        finally:
            self.summing = True

    @override
    def synchronize(self) -> None:
        mine = [bucket for bucket in self.buckets if not bucket.others]
        if not (self._summed and all(bucket.holds_sums() for bucket in mine)):
            self._sum(STEP)

    @override
    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.replaced:
            raise UsageError(
                "optimizer.step() after distribute_optimizer with another optimizer of the same "
                "parameters: use that one, or create and distribute this one again"
            )
        super().begin_step(optimizer)

    @property
    def is_over(self) -> bool:  # type: ignore[override]
        """Whether the optimizer was deleted, or another one sums the gradients."""
        return self.replaced or self.optimizer() is None

    @property
    def messages(self) -> dict[str, int]:  # type: ignore[override]
        """Count and bytes of the messages of a step."""
        nbytes = sum(self.sums.nbytes(bucket.flat) for bucket in self.buckets)
        return {"count": len(self.buckets), "bytes": nbytes}


def may_train(parameter: torch.Tensor) -> bool:
    """Return whether a frozen parameter can be trained later."""
    return parameter.is_floating_point() and not parameter.is_inference()


class BucketStrategy(TorchStrategy):
    """Each rank holds the whole model; gradients are summed in buckets during backward."""

    def __init__(self, adapter: Rank) -> None:
        super().__init__(adapter)
        self._distributions = 0
        self._scalars: Sums | None = None  # for the counts of `weight_loss`

    @abstractmethod
    def open_sums(self) -> Sums:
        """Return the sums for the buckets of another optimizer; all ranks call it together."""

    @override
    def start_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        if self._scalars is None:
            with self.adapter.waits.during(WEIGHTS):
                self._scalars = self.open_sums()
        sums = self._scalars
        handle = sums.start(values, "weights")

        def wait() -> torch.Tensor:
            with self.adapter.waits.during(WEIGHTS):
                sums.wait(handle)
            return values

        return wait

    @override
    def distribute(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        name = f"gradients.{self._distributions}" if self._distributions else "gradients"
        self._distributions += 1
        sums, kind = self.open_sums(), TYPES.get(self.adapter.comm_options.compression)
        sums = Compressed(sums, kind) if kind else sums
        others_of = functools.partial(self._others_of, weakref.ref(model))
        self.add_sums(Buckets(name, optimizer, sums, self.adapter, others_of))
        return model, optimizer

    def _others_of(self, model: weakref.ref[Any], buckets: Buckets) -> list[torch.nn.Parameter]:
        """Detach what ``buckets`` sums from others; return the parameters that none sums."""
        taken = {id(value) for value in buckets.parameters}
        others = [known for known in self.gradient_sums if known is not buckets]
        left = [known for known in others if known.detach(taken)]
        summed = {id(value) for known in left for value in (*known.parameters, *known.others)}
        parameters = () if (module := model()) is None else module.parameters()
        return [value for value in parameters if id(value) not in taken | summed]
