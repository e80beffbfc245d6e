"""The strategy of DistributedDataParallel for PyTorch, with Gloo, or NCCL on GPUs.

DDP sums gradients in buckets during the backward pass (Li et al., "PyTorch Distributed", VLDB
2020) and divides by the number of ranks. Here a communication hook multiplies each bucket by the
part's share of the global batch instead, so uneven parts are handled correctly. Gradients of passes
that bypass the wrapper of DDP, or that were assigned, are summed at the end of the pass or at the
step.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from typing_extensions import override

from hvdtrain.adapters.framework import Rank
from hvdtrain.adapters.partition import buckets
from hvdtrain.adapters.pytorch.bucket import Bucket
from hvdtrain.adapters.pytorch.framework import IS_TRAINED, parameters_of, unwrapped
from hvdtrain.adapters.pytorch.sums import (
    SIGNALS,
    STEP,
    TYPES,
    GradientSums,
    ProcessGroupStrategy,
    fill,
    make_dense,
)
from hvdtrain.adapters.pytorch.weights import before_gradient, weigh
from hvdtrain.errors import UsageError
from hvdtrain.system.machine import accelerator
from hvdtrain.system.output import stderr
from hvdtrain.system.runtime.waits import SUM


class Ddp(ProcessGroupStrategy):
    """Each rank holds the whole model; DDP sums the gradients."""

    name = "ddp"

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        wrapped = self._wrapped(model)
        wrapped.check_summed(optimizer)
        wrapped.attach(optimizer)
        optimizer.synchronize = wrapped.synchronize_of(optimizer)
        return wrapped, optimizer

    def _wrapped(self, model: Any) -> WeightedDdp:
        """Return the wrapper of the model: that of an earlier call if the same is trained."""
        module = unwrapped(model)
        parameters = {id(value) for value in module.parameters()}
        for known in self.gradient_sums:
            if known.module is module and known.is_current():
                return known
        for known in self.gradient_sums:
            if any(id(value) in parameters for value in known.parameters()):
                known.release()
        wrapped = WeightedDdp(module, self.adapter)
        self.add_sums(wrapped)
        return wrapped


class WeightedDdp(DistributedDataParallel, GradientSums):
    """A model whose gradients are those of the global batch when ``backward`` returns."""

    def __init__(self, model: torch.nn.Module, adapter: Rank) -> None:
        _silence_unused_warning(adapter.device)
        make_dense(model)
        with warnings.catch_warnings():
            # The replacement of broadcast_buffers still sends them once.
            warnings.simplefilter("ignore", FutureWarning)
            super().__init__(
                model,
                broadcast_buffers=False,  # running statistics are local to each rank
                init_sync=False,  # step 6 does it
                # A parameter without a gradient on any rank has none, as in one process. And the
                # buckets do not change after the first pass, so a resumed run is bit-reproducible.
                find_unused_parameters=True,
                gradient_as_bucket_view=True,
            )
        # Convolutions produce such gradients; each is copied into its bucket.
        warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")
        self.connect(adapter)
        self._trained = {id(value) for value in model.parameters() if value.requires_grad}
        self.frozen = [value for value in model.parameters() if not value.requires_grad]
        self.register_forward_pre_hook(_check_released)
        self.register_forward_hook(_check_first_pass)
        self._running = False  # a backward pass runs
        self._is_begun = False  # one that may have a weight
        self._has_local = False  # gradients of passes within `no_sync`
        self._nodes: list[Any] = []  # these references keep them, and the hooks on them, alive
        self._unsummed: set[int] = set()  # ids of parameters whose gradients DDP has not summed
        self._memory: set[int] = set()  # addresses of the sums
        # Of each optimizer, the number of its parameter groups in step 5.
        self._groups: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        trained = [value for value in model.parameters() if value.requires_grad]
        kinds = [((p.dtype, p.device), p.numel() * p.element_size()) for p in trained]
        self._buckets = [Bucket("", [trained[i] for i in group]) for group in buckets(kinds)]
        watch = _Watch(self, WeightedDdp.arrived)
        for value in trained:
            value.register_post_accumulate_grad_hook(watch)
        self._is_checked = False
        # Sums under way: work, future, message, and the type of the gradients.
        self._sums: list[tuple[Any, Any, torch.Tensor, torch.dtype]] = []
        self._trouble: UsageError | None = None
        # A reference to itself, in C++, would never be collected.
        self.register_comm_hook(weakref.ref(self), lambda model, bucket: model()._start_sum(bucket))

    def is_current(self) -> bool:
        """Return whether the parameters that are trained now are those that DDP sums."""
        return self._trained == {id(value) for value in self.parameters() if value.requires_grad}

    def check_summed(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise ``UsageError`` if a trained parameter, also of ``optimizer``, is not summed."""
        values = (*self.frozen, *parameters_of(optimizer))
        if any(value.requires_grad and id(value) not in self._trained for value in values):
            raise UsageError(
                f"--strategy {self.adapter.name} sums only the gradients of parameters that are of "
                "the model and trained in step 5: after unfreezing some, or adding some to the "
                "optimizer, call distribute_optimizer again, with a new optimizer"
            )

    def release(self) -> None:
        """Sum no gradients any more."""
        self._remove_autograd_hooks()
        self.is_over = True

    def check_graph(self, outputs: Sequence[torch.Tensor]) -> None:
        """Raise ``UsageError``, at the first pass, for a reentrant checkpoint.

        It hides its parameters, so DDP takes them for unused; its own error does not say so.
        """
        nodes: list[Any] = [] if self._is_checked else [value.grad_fn for value in outputs]
        self._is_checked, seen = True, set(nodes)
        while nodes:
            node = nodes.pop()
            if node.name() == "CheckpointFunctionBackward":
                raise UsageError(
                    f"--strategy {self.adapter.name} cannot sum the gradients of a reentrant "
                    "checkpoint: call torch.utils.checkpoint with use_reentrant=False"
                )
            new = {following for following, _ in node.next_functions if following} - seen
            seen |= new
            nodes += new

    def arrived(self, parameter: torch.Tensor) -> None:
        """Record that autograd has added to the gradient of ``parameter``."""
        self._summed = False
        if not self.require_backward_grad_sync:
            self._has_local = True
            return
        self._unsummed.add(id(parameter))
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    @override
    def all_parameters(self) -> Iterable[torch.nn.Parameter]:
        return self.parameters()

    @override
    def expect_weight(self) -> None:
        super().expect_weight()
        self._is_begun = False
        if not self._nodes:
            before = _Watch(self, WeightedDdp.arriving)
            trained = (value for value in self.parameters() if id(value) in self._trained)
            self._nodes = [before_gradient(value, before) for value in trained]

    def arriving(self, _: Any) -> None:
        """Begin a backward pass that may have a weight."""
        if self._is_begun or not self.require_backward_grad_sync:
            return
        self.begin_pass(local=self._has_local)
        self._is_begun = True

    def _end_pass(self) -> None:
        if not self._is_begun:
            self.begin_pass(local=False)
        self._running = self._has_local = self._is_begun = False
        # After DDP's own callback, which sets the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._sum_rest)

    def _sum_rest(self) -> None:
        """Sum what a pass that bypassed this wrapper, or the second of a forward pass, has left."""
        self._summed = not self._unsummed
        if self._unsummed:
            self.synchronize()
        self.end_pass()

    @override
    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        self._groups[optimizer] = len(optimizer.param_groups)
        super().attach(optimizer)

    @override
    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        more = len(optimizer.param_groups) > self._groups[optimizer]
        if more or any(map(IS_TRAINED, self.frozen)):
            self.check_summed(optimizer)
        super().begin_step(optimizer)

    @override
    def synchronize(self) -> None:
        gradients = (value.grad for value in self.parameters())
        held = (value is None or _address(value) in self._memory for value in gradients)
        if self._summed and all(held):
            return
        weight = self.adapter.loss_weight
        signals = torch.empty(SIGNALS, device=self.adapter.device)
        fill(signals, self.adapter.flags, STEP)
        with self.blocked(SUM):
            dist.all_reduce(signals)
            self.check_signals(signals, now=True)
            for bucket in self._buckets:
                if bucket.flat is None:
                    bucket.allocate()
                    self._memory.add(_address(bucket.flat))
                bucket.fill_missing(lambda: weight)
                dist.all_reduce(bucket.flat)
                bucket.close()
        self.note_flags(signals)
        self.mark_summed()
        self._unsummed.clear()

    def _start_sum(self, bucket: Any) -> Any:
        """Start summing a bucket over all ranks, in place; before the first, the signals."""
        gradients = bucket.buffer()
        self._memory.add(_address(gradients))
        self._unsummed.difference_update(map(id, bucket.parameters()))
        try:
            weight = self.adapter.loss_weight
        except UsageError as error:  # raised within the hook, it would lose its type
            self._trouble, weight = error, None
        weigh(gradients, weight, out=gradients)
        kind = TYPES.get(self.adapter.comm_options.compression, gradients.dtype)
        if not self._sums:
            signals = torch.empty(SIGNALS, device=gradients.device)
            fill(signals, self.adapter.flags, self.adapter.parts_begun % STEP)
            self._start_future(signals, signals.dtype)
            # At the end of the pass, before DDP's callback; there is no public API for it.
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        return self._start_future(gradients.to(kind), gradients.dtype)

    def _start_future(self, message: torch.Tensor, kind: torch.dtype) -> Any:
        devices: Any = [message.device] if message.device.type != accelerator.CPU else None
        future: Any = torch.futures.Future(devices=devices)
        self._sums.append((dist.all_reduce(message, async_op=True), future, message, kind))
        return future

    def _finish(self) -> None:
        """Wait for the sums of this pass; DDP then copies them to the gradients."""
        sums, self._sums = self._sums, []
        with self.blocked(SUM):
            for number, (work, future, message, kind) in enumerate(sums):
                work.wait()
                if not number:
                    self.check_signals(message)
                future.set_result(message.to(kind))
        sizes = [message.numel() * message.element_size() for _, _, message, _ in sums[1:]]
        self.messages = {"count": len(sizes), "bytes": sum(sizes)}
        self.note_flags(sums[0][2])
        self._stepped.clear()
        if self._trouble:
            raise self._trouble


class _Watch:
    """A hook of parameters; weak, so as not to keep a deleted model alive."""

    def __init__(self, model: WeightedDdp, action: Callable[[WeightedDdp, Any], None]) -> None:
        self._model, self._action = weakref.ref(model), action

    def __call__(self, value: Any) -> None:
        if (model := self._model()) is not None and not model.is_over:
            self._action(model, value)


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_first_pass(model: Any, _: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        leaves = _pytree.tree_leaves(output)
        model.check_graph([x for x in leaves if getattr(x, "grad_fn", None) is not None])


def _check_released(model: Any, *_: Any) -> None:
    if model.is_over:
        raise UsageError(
            "distribute_optimizer was called again for this model: use the one that it returned"
        )


@functools.cache
def _silence_unused_warning(device: torch.device) -> None:
    """Discard DDP's warning, printed once per process, that there are no unused parameters.

    DDP writes it directly to the standard error. (Adding an unused parameter instead would make
    the host wait for the GPU in each pass.)
    """
    layer = torch.nn.PReLU(device=device)  # one parameter, no random initialization
    wrapped = DistributedDataParallel(layer, find_unused_parameters=True, init_sync=False)
    with stderr.without(lambda _: True):
        wrapped(torch.zeros(1, 1, device=device))
