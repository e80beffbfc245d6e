"""The eight steps for PyTorch over DistributedDataParallel, with Gloo, or NCCL on GPUs.

DDP sums gradients in buckets during the backward pass (Li et al., "PyTorch Distributed", VLDB
2020) and divides by the number of ranks. Here a communication hook multiplies each bucket by the
part's share of the global batch instead, so uneven and empty parts are handled correctly. Every
rank makes each forward and backward pass, even on a part without samples.
"""

from __future__ import annotations

import functools
import time
import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree
from typing_extensions import override

from hvdtrain.adapters.common_adapter import Flags
from hvdtrain.adapters.pytorch.adapter import (
    IS_TRAINED,
    PyTorchAdapter,
    parameters_of,
    unwrapped,
)
from hvdtrain.adapters.pytorch.sums import TYPES, agreed, fill
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.torch_distributed import TorchDistributed
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.system.machine import accelerator
from hvdtrain.system.output import stderr
from hvdtrain.system.runtime.waits import SUM


class DdpAdapter(PyTorchAdapter):
    """Each rank holds the whole model; DDP sums the gradients."""

    name = "ddp"
    runtime = "torch.distributed"
    needs_empty_forward = True

    def __init__(self) -> None:
        super().__init__()
        # Gradient sums of each model; weak, so as not to keep a deleted model alive.
        self._references: list[weakref.ref[Any]] = []
        # Sums of all ranks' flags at the last update, of whichever model.
        self.sent: torch.Tensor | None = None
        self._pass_due = False  # the current part is empty, and no pass was made so far

    @override
    def connect(self) -> Communicator:
        kind, backend = accelerator.kind(), accelerator.backend()
        if kind != accelerator.CPU and not backend:
            raise UsageError(
                f"--strategy {self.name}: this PyTorch has no communication backend for {kind}; "
                "use --strategy horovod or mpi, which sum in host memory"
            )
        return TorchDistributed(gpu=bool(backend))

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        wrapped = self._wrapped(model)
        wrapped.check_summed(optimizer)
        groups = len(optimizer.param_groups)

        def check(optimizer: Any, *_: Any) -> None:
            self._check_pass()
            if len(optimizer.param_groups) > groups or any(map(IS_TRAINED, wrapped.frozen)):
                wrapped.check_summed(optimizer)

        optimizer.register_step_pre_hook(check)
        return wrapped, optimizer

    def _wrapped(self, model: Any) -> WeightedDdp:
        """Return the wrapper of the model: that of an earlier call if the same is trained."""
        module = unwrapped(model)
        parameters = {id(value) for value in module.parameters()}
        sums = self.gradient_sums
        for known in sums:
            if known.module is module and known.is_current():
                return known
        for known in sums:
            if any(id(value) in parameters for value in known.parameters()):
                known.release()
        self._references = [weakref.ref(known) for known in sums if not known.released]
        wrapped = WeightedDdp(module, self)
        self.add_sums(wrapped)
        return wrapped

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for sums in self.gradient_sums:
                stack.enter_context(sums.no_sync())
            yield

    @override
    def begin_part(self, shards: Shards, part: Part) -> None:
        self._check_pass()
        super().begin_part(shards, part)
        self._pass_due = bool(self.gradient_sums) and not part.count

    def _check_pass(self) -> None:
        """Raise if the pass of an empty part was skipped: the next sums would be mixed up."""
        if self._pass_due:
            raise UsageError(
                "no backward pass was made on a part without samples: with --strategy "
                f"{self.name} every rank must make all passes (its loss may be nan; it is ignored)"
            )

    def note_pass(self) -> None:
        """Record that gradients of the current part are being summed."""
        self._pass_due = False

    def add_sums(self, sums: Any) -> None:
        """Use the gradient sums of a model while it exists."""
        others = (known for known in self.gradient_sums if known is not sums)
        self._references = [weakref.ref(known) for known in (*others, sums)]

    @property
    @override
    def gradient_sums(self) -> Sequence[Any]:
        known = (reference() for reference in self._references)
        return [sums for sums in known if sums is not None]


class ModelSums:
    """Sums of the gradients of a model, and how long this rank waits for others."""

    adapter: DdpAdapter
    blocked_seconds = 0.0
    messages: dict[str, int] | None = None  # of the gradients of an update; None: not counted

    @contextmanager
    def blocked(self, call: str) -> Iterator[None]:
        """Count the time within the block as waiting for other ranks, in ``call``."""
        started = time.perf_counter()
        with self.adapter.waits.during(call):
            yield
        self.blocked_seconds += time.perf_counter() - started

    @property
    def flags(self) -> Flags:
        """The flags of all ranks at the last update: whether any rank had set it.

        They are equal on all ranks, although a deleted model may exist longer on some of them.
        """
        sent = self.adapter.sent
        return Flags(stop=False, saving=True) if sent is None else agreed(sent)


class WeightedDdp(ModelSums, DistributedDataParallel):
    """A model whose gradients are those of the global batch when ``backward`` returns."""

    def __init__(self, model: torch.nn.Module, adapter: DdpAdapter) -> None:
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
        self.adapter = adapter
        self._trained = {id(value) for value in model.parameters() if value.requires_grad}
        self.frozen = [value for value in model.parameters() if not value.requires_grad]
        self.register_forward_pre_hook(_check_released)
        self.register_forward_hook(_watch_passes)
        self.released = False  # another wrapper sums the gradients
        self.due = False  # a forward pass was made whose gradients are to be summed
        # Sums under way: work, future, message, and the type of the gradients.
        self._sums: list[tuple[Any, Any, torch.Tensor, torch.dtype]] = []
        self._trouble: UsageError | None = None
        # A reference to itself, in C++, would never be collected.
        self.register_comm_hook(
            weakref.ref(self), lambda model, bucket: model()._start_sum(bucket.buffer())
        )

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
        self.released = True

    def check_pass(self, _: torch.Tensor) -> None:
        """Raise ``UsageError`` at the end of a backward pass that has left local gradients.

        DDP sums those of the first backward pass after a forward pass.
        """
        if self.due or not self.require_backward_grad_sync:
            return
        self.due = True  # checked once
        gradients = [(value, value.grad) for value in self.parameters()]
        before = [(grad, grad._version if grad is not None else 0) for _, grad in gradients]

        def check() -> None:
            self.due = False
            now = [value.grad for value, _ in gradients]
            for gradient, (known, version) in zip(now, before, strict=True):
                if gradient is not known or (known is not None and known._version != version):
                    raise UsageError(
                        f"--strategy {self.adapter.name} sums the gradients of one backward pass "
                        "per forward pass: sum the losses before backward(), or call the model "
                        "again before each"
                    )

        torch.autograd.Variable._execution_engine.queue_callback(check)

    def _start_sum(self, gradients: torch.Tensor) -> Any:
        """Start summing a bucket over all ranks, in place; before the first, the flags."""
        try:
            weight = self.adapter.part_weight
        except UsageError as error:  # raised within the hook, it would lose its type
            self._trouble, weight = error, 0.0
        weigh(gradients, weight)
        kind = TYPES.get(self.adapter.comm_options.compression, gradients.dtype)
        if not self._sums:
            self.adapter.note_pass()
            flags = gradients.new_empty(len(Flags._fields), dtype=kind)
            fill(flags, self.adapter.flags)
            self._start_future(flags, kind)
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
        self.due = False
        sums, self._sums = self._sums, []
        with self.blocked(SUM):
            for work, future, message, kind in sums:
                work.wait()
                future.set_result(message.to(kind))
        self.adapter.sent = sums[0][2]
        sizes = [message.numel() * message.element_size() for _, _, message, _ in sums[1:]]
        self.messages = {"count": len(sizes), "bytes": sum(sizes)}
        if self._trouble:
            raise self._trouble


def _watch_passes(model: Any, _: Any, output: Any) -> None:
    """Check each backward pass through ``output``."""
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        model.due = model.require_backward_grad_sync
        for value in _pytree.tree_leaves(output):
            if isinstance(value, torch.Tensor) and value.grad_fn is not None:
                value.register_hook(model.check_pass)


def _check_released(model: Any, *_: Any) -> None:
    if model.released:
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


def make_dense(model: torch.nn.Module) -> None:
    """Make the gradients of embeddings dense: sparse ones cannot be summed."""
    for layer in model.modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            layer.sparse = False


def weigh(gradients: torch.Tensor, weight: float) -> None:
    """Multiply ``gradients`` in place by ``weight``, the part's share of the global batch."""
    if weight:
        gradients.mul_(weight)
    else:  # the mean over no samples is nan: 0 times it would be too
        gradients.zero_()
