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
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hvdtrain.adapters import partition
from hvdtrain.adapters.common_adapter import Flags, RankHooks
from hvdtrain.adapters.pytorch.adapter import IS_TRAINED, parameters_of
from hvdtrain.adapters.pytorch.bucket import Bucket
from hvdtrain.adapters.pytorch.sums import (
    STEP,
    Sums,
    agreed,
    before_step,
    check,
    fill,
    once_per_step,
)
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.waits import SUM


class Buckets:
    """All gradients of an optimizer, summed over the ranks by the end of each backward pass.

    So are those of the model's other parameters, which may be read too, e.g. by clipping. Frozen
    parameters are summed as soon as they are trained.

    Every rank must make the same passes and steps. Gradients that no backward pass has summed, e.g.
    those of ``torch.autograd.grad`` that were assigned, are summed at the step.

    Args:
        name: name of the optimizer, the same on all ranks.
        optimizer: the optimizer whose gradients are summed.
        sums: sums over all ranks, used only for these buckets.
        hooks: functions of this rank.
        others_of: function that makes all other sums leave the optimizer's parameters to these,
            and returns the other parameters to sum.
    """

    def __init__(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        sums: Sums,
        hooks: RankHooks,
        others_of: Callable[[Buckets], Sequence[torch.nn.Parameter]] = lambda buckets: (),
    ) -> None:
        self.name, self.sums, self.hooks = name, sums, hooks
        self._others_of = others_of
        self.summing = True  # over the ranks; False: backward passes accumulate locally
        self.blocked_seconds = 0.0  # total wait for sums
        self._running = False  # a backward pass runs
        self._summed = False  # the gradients of the last pass, or those that were assigned
        self.replaced = False  # by those of another optimizer of the same parameters
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []  # these references keep them, and the hooks on them, alive
        # Weak, so as not to keep a deleted optimizer alive.
        self.optimizer = weakref.ref(optimizer)
        self._sum_all(optimizer)
        optimizer.register_step_pre_hook(once_per_step(self._before_step))
        optimizer.synchronize = self.synchronize  # type: ignore[attr-defined]
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
        trained = parameter.requires_grad
        parameter.requires_grad_()  # a frozen one, too: it may be trained later
        node: Any = parameter.expand_as(parameter).grad_fn
        node = node.next_functions[0][0]
        before = functools.partial(self._arriving, bucket, index)
        after = functools.partial(self._arrived, bucket, index)
        self._handles.append(node.register_prehook(before))
        self._handles.append(parameter.register_post_accumulate_grad_hook(after))
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
            self._summed = False
            return
        if not self._running:
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
        bucket.fill(index, self.hooks.weight)
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
        self._running = False
        self._sum(self.hooks.part() % STEP)

    def _sum(self, moment: int) -> None:
        """Sum all gradients as they are over the ranks, times the weights of their parts."""
        self._add_unfrozen()
        for bucket in self.buckets:
            bucket.fill_missing(self.hooks.weight)
        late = any(bucket.late for bucket in self.buckets)
        fill(self._last.signals, self.hooks.flags(), moment, late=late)
        started = time.perf_counter()
        with self.hooks.waits(SUM):
            for bucket in self.buckets:
                if bucket.handle is None:
                    bucket.handle = self.sums.start(bucket.flat, bucket.name)
            for bucket in self.buckets:
                self.sums.wait(bucket.handle)
        self.blocked_seconds += time.perf_counter() - started
        self.hooks.summed(self._last.signals)
        late = check(self._last.signals)
        for bucket in self.buckets:
            bucket.close()
        self._summed = True
        if late:
            self._sum(STEP)

    def begin(self) -> None:
        """Begin a part."""
        self._summed = False
        self._add_unfrozen()

    def synchronize(self) -> None:
        """See ``Summing``."""
        mine = [bucket for bucket in self.buckets if not bucket.others]
        if not (self._summed and all(bucket.holds_sums() for bucket in mine)):
            self._sum(STEP)

    def _before_step(self, _: Any, arguments: Any, named: Any) -> Any:
        if self.replaced:
            raise UsageError(
                "optimizer.step() after distribute_optimizer with another optimizer of the same "
                "parameters: use that one, or create and distribute this one again"
            )
        replaced = before_step(self, arguments, named)
        if replaced is None:
            self._summed = False
        return replaced

    @property
    def messages(self) -> dict[str, int]:
        """Count and bytes of the messages of a step."""
        nbytes = sum(self.sums.nbytes(bucket.flat) for bucket in self.buckets)
        return {"count": len(self.buckets), "bytes": nbytes}

    @property
    def flags(self) -> Flags:
        """The flags of all ranks at the last step: whether any rank had set it."""
        return agreed(self._last.signals)


def may_train(parameter: torch.Tensor) -> bool:
    """Return whether a frozen parameter can be trained later."""
    return parameter.is_floating_point() and not parameter.is_inference()
