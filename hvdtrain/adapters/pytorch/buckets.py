"""Step 5 for PyTorch: gradients summed over the ranks in a few large buckets during backward.

A bucket is one flat tensor, into which each gradient is copied as backward produces it. When the
bucket is full, its sum over the ranks starts at once, overlapping the rest of the backward pass.
When ``backward`` returns, the gradients are those of the global batch: views of the buckets, so
nothing is copied back. (Buckets are an idea of PyTorch DDP: Li et al., "PyTorch Distributed", VLDB
2020.)

Each backward pass adds its sum to the previous gradients, as in one process: passes may be
accumulated, and ``zero_grad`` resets them.

One tensor per bucket also fixes the order of summation: results are bit-equal from run to run.
"""

from __future__ import annotations

import functools
import itertools
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.hooks import RemovableHandle

from hvdtrain.adapters import partition
from hvdtrain.adapters.common_adapter import Flags, RankHooks
from hvdtrain.adapters.pytorch.adapter import IS_TRAINED, parameters_of
from hvdtrain.adapters.pytorch.bucket import Bucket
from hvdtrain.adapters.pytorch.sums import Sums, agreed, fill
from hvdtrain.errors import UsageError
from hvdtrain.system.runtime.waits import SUM

GRAD_FN = vars(torch._C.TensorBase)["grad_fn"].__get__
# What ``Module.zero_grad(set_to_none=False)`` calls, also that of a module around the model.
ZEROING = (GRAD_FN, torch.Tensor.requires_grad_, torch.Tensor.zero_)


class Buckets:
    """All gradients of an optimizer, summed over the ranks by the end of each backward pass.

    So are those of the model's other parameters, which may be read too, e.g. by clipping. Frozen
    parameters are summed as soon as they are trained.

    Every rank must make the same passes and steps. A rank whose part is empty may skip its backward
    pass: it contributes zeros when its gradients are first accessed, at the step, or at the latest
    before the next collective call.

    A rank that skipped its pass cannot tell whether ``zero_grad`` came before or after it (when the
    tail of an accumulation is dropped). The others can: with their next pass they send whether
    they still hold its sums.

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
        self._running = self._summed = False  # a backward pass runs; one of this part was summed
        self.awaited = False  # the sum of a pass that this rank skips
        self._holds = False  # sums of earlier passes, if there are gradients
        self.replaced = False  # by those of another optimizer of the same parameters
        self._handles: list[RemovableHandle] = []
        self._nodes: list[Any] = []  # these references keep them, and the hooks on them, alive
        # Weak, so as not to keep a deleted optimizer alive.
        self.optimizer = weakref.ref(optimizer)
        self._sum_all(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        optimizer.zero_grad = self.zero_grad  # type: ignore[method-assign]
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

    def leave(self, parameters: set[int]) -> bool:
        """Leave parameters, by their ids, to the sums of another optimizer.

        Returns:
            Whether some remain: an optimizer of which any is taken must not be used any more.
        """
        self.whole()
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
        self.whole()
        self._sum_all(optimizer)

    def _thaw(self) -> None:
        """Sum from now on what was frozen; all ranks do so by the end of the same pass."""
        frozen, self._frozen = self._frozen, []
        for bucket in frozen:
            if any(map(IS_TRAINED, bucket.parameters)):
                bucket.allocate()
                self.buckets.append(bucket)
            else:
                self._frozen.append(bucket)

    def _arriving(self, bucket: Bucket, index: int, _: Any) -> None:
        """Reset the gradient of a parameter before autograd adds to it."""
        if self.summing and not self._running:
            self._running = True
            # At the end of the pass, as in DDP and FSDP; there is no public API for it.
            torch.autograd.Variable._execution_engine.queue_callback(self.finish)
        if bucket in self._frozen:
            self._thaw()
        bucket.expect(index)

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
                if bucket.missing == set():
                    self._start(bucket)
                elif self.sums.in_order:
                    return

    def _start(self, bucket: Bucket) -> None:
        if bucket is self._last:
            bucket.holds.fill_(float(self._holds_sums()))
            fill(bucket.flags, self.hooks.flags())
        bucket.handle = self.sums.start(bucket.flat, bucket.name)

    def _holds_sums(self) -> bool:
        mine = [bucket for bucket in self.buckets if not bucket.others]
        held = (bucket.before or [p.grad for p in bucket.parameters] for bucket in mine)
        known = self._holds and not self._last.unclear
        return known and any(gradient is not None for row in held for gradient in row)

    def finish(self) -> None:
        """Complete the sums of all gradients over the ranks."""
        absent = []
        self._thaw()
        if self.awaited and any(bucket.has_lost() for bucket in self.buckets):
            raise UsageError(
                "gradients of a part without samples were set to None before the other ranks' were "
                "added: use zero_grad of the optimizer, or of the model that was distributed"
            )
        for bucket in self.buckets:
            bucket.open()
            missing = set(bucket.missing or ())
            absent.append(missing - bucket.touched)
            for index in missing:
                bucket.expect(index)
                bucket.fill(index, self.hooks.weight)
            if bucket.handle is None:
                self._start(bucket)
        started = time.perf_counter()
        with self.hooks.waits(SUM):
            for bucket in self.buckets:
                self.sums.wait(bucket.handle)
        self.blocked_seconds += time.perf_counter() - started
        self.hooks.summed(self._last.flags)
        held = self._last.holds > 0 if any(bucket.unclear for bucket in self.buckets) else True
        for bucket, indices in zip(self.buckets, absent, strict=True):
            bucket.close(indices, dropped=bucket.unclear and not held)
            bucket.unclear = self.awaited and bucket.zeroed
        self._running = self.awaited = False
        self._summed = self._holds = True

    def begin(self, *, empty: bool) -> None:
        """Begin a part; if it is ``empty``, this rank may skip the backward pass.

        Its gradients are then completed at the first access, in the step, or by ``whole``: not at
        once, since the other ranks may need this one before they reach their pass.
        """
        self.whole()  # after an empty part, if several parts are accumulated
        self._summed = False
        self._thaw()
        self.awaited = empty and self.hooks.may_skip() and torch.is_grad_enabled()
        for bucket in self.buckets if self.awaited else ():
            bucket.open()
            bucket.zeroed = False
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
                parameter.grad = view.as_subclass(Awaited)
                parameter.grad.buckets = self

    def zero_grad(self, set_to_none: bool = True, *, others: bool = False) -> None:
        """Replace ``optimizer.zero_grad``: keep awaited gradients.

        ``others``: reset also those of the model's other parameters, if they are awaited.
        """
        self._summed = self._holds = False
        optimizer = self.optimizer()
        if not self.awaited and optimizer is not None:
            type(optimizer).zero_grad(optimizer, set_to_none)
        for bucket in self.buckets:
            if others or not bucket.others:
                bucket.zeroed, bucket.unclear = self.awaited, self.awaited and bucket.unclear
                if bucket.missing is not None:
                    bucket.before, bucket.touched = [None] * len(bucket.parameters), set()

    def whole(self) -> None:
        """Complete the gradients now, if they are awaited."""
        if self.awaited:
            self.finish()

    def _before_step(self, *_: Any) -> None:
        if self.replaced:
            raise UsageError(
                "optimizer.step() after distribute_optimizer with another optimizer of the same "
                "parameters: use that one, or create and distribute this one again"
            )
        if not (self._summed or self.hooks.may_skip()):
            raise UsageError(
                "optimizer.step() without a previous backward pass: with several optimizers every "
                "rank must make all backward passes, even on a part without samples (its loss may "
                "be nan; it is ignored)"
            )
        if self.awaited or not self._summed:
            self.finish()
        self._summed = False
        for bucket in self.buckets:
            bucket.unclear = False

    @property
    def messages(self) -> dict[str, int]:
        """Count and bytes of the messages of a step."""
        nbytes = sum(self.sums.nbytes(bucket.flat) for bucket in self.buckets)
        return {"count": len(self.buckets), "bytes": nbytes}

    @property
    def flags(self) -> Flags:
        """The flags of all ranks at the last step: whether any rank had set it."""
        return agreed(self._last.flags)


def may_train(parameter: torch.Tensor) -> bool:
    """Return whether a frozen parameter can be trained later."""
    return parameter.is_floating_point() and not parameter.is_inference()


class Awaited(torch.Tensor):
    """A gradient that other ranks still compute: any access waits until it is complete."""

    buckets: Buckets

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Wait, then call ``func`` with the gradients as plain tensors; zeroing does not wait."""
        if func in ZEROING and (owner := args[0].__dict__["buckets"]).awaited:
            if func == torch.Tensor.zero_:
                owner.zero_grad(others=True)
            return None if func == GRAD_FN else args[0]

        def plain(value: Any) -> Any:
            if not isinstance(value, Awaited):
                return value
            value.__dict__["buckets"].whole()
            with torch._C.DisableTorchFunctionSubclass():
                return value.as_subclass(torch.Tensor)

        args, kwargs = _pytree.tree_map(plain, (args, kwargs or {}))
        return func(*args, **kwargs)


def keep_awaited(model: torch.nn.Module) -> None:
    """Make ``zero_grad`` of ``model`` and of its layers keep them; torch's would discard them."""
    for module in model.modules():
        module.__dict__["zero_grad"] = ZeroGrad(module)


class ZeroGrad:
    """``zero_grad`` of a distributed ``model``, which keeps awaited gradients."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model

    def __call__(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as ``Module.zero_grad`` does."""
        gradients = [parameter.grad for parameter in self.model.parameters()]
        awaited = {grad.__dict__["buckets"] for grad in gradients if isinstance(grad, Awaited)}
        for owner in awaited:
            owner.zero_grad(set_to_none, others=True)
        if not awaited:
            type(self.model).zero_grad(self.model, set_to_none)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle the original method: a copy is not distributed, and needs no hvdtrain."""
        return functools.partial, (type(self.model).zero_grad, self.model)
