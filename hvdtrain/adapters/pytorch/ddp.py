"""The eight steps for PyTorch over DistributedDataParallel, with Gloo, or NCCL on GPUs.

DDP sums gradients in buckets during the backward pass (Li et al., "PyTorch Distributed", VLDB
2020) and divides by the number of ranks. Here a communication hook multiplies each bucket by the
part's share of the global batch instead, so uneven parts are handled correctly. Gradients of passes
that bypass the wrapper of DDP, or that were assigned, are summed at the end of the pass or at the
step.
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
from hvdtrain.adapters.partition import buckets
from hvdtrain.adapters.pytorch.adapter import (
    IS_TRAINED,
    PyTorchAdapter,
    parameters_of,
    unwrapped,
)
from hvdtrain.adapters.pytorch.bucket import Bucket
from hvdtrain.adapters.pytorch.sums import (
    SIGNALS,
    STEP,
    TYPES,
    agreed,
    before_step,
    check,
    fill,
    once_per_step,
)
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
    collective_passes = True

    def __init__(self) -> None:
        super().__init__()
        # Gradient sums of each model; weak, so as not to keep a deleted model alive.
        self._references: list[weakref.ref[Any]] = []
        # Sums of all ranks' flags at the last update, of whichever model.
        self.sent: torch.Tensor | None = None

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

        def prepare(optimizer: Any, arguments: Any, named: Any) -> Any:
            if len(optimizer.param_groups) > groups or any(map(IS_TRAINED, wrapped.frozen)):
                wrapped.check_summed(optimizer)
            wrapped.begin_step(optimizer)
            return before_step(wrapped, arguments, named)

        optimizer.register_step_pre_hook(once_per_step(prepare))
        optimizer.synchronize = wrapped.synchronize
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
        super().begin_part(shards, part)
        for sums in self.gradient_sums:
            sums.begin()

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
    _unread: tuple[torch.Tensor, Any] | None = None  # a copy of signals, and the event of its end

    @contextmanager
    def blocked(self, call: str) -> Iterator[None]:
        """Count the time within the block as waiting for other ranks, in ``call``."""
        started = time.perf_counter()
        with self.adapter.waits.during(call):
            yield
        self.blocked_seconds += time.perf_counter() - started

    def check_signals(self, signals: torch.Tensor, *, now: bool = False) -> bool:
        """``check`` the signals: on a GPU, unless ``now``, those of the sum before.

        Reading these would make the host wait for the GPU in each pass. So an error is raised one
        pass late there, and the last pass is not checked.
        """
        on_gpu = signals.device.type != accelerator.CPU
        if now or not on_gpu:
            return check(signals, by_all=not on_gpu)
        unread, self._unread = self._unread, accelerator.copy_to_host(signals)
        if unread is None:
            return False
        copy, event = unread
        event.synchronize()
        return check(copy)

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
        self.register_forward_hook(_check_first_pass)
        self.released = False  # another wrapper sums the gradients
        self._running = False  # a backward pass runs
        self._summed = False  # the gradients of the last pass, or those that were assigned
        self._unsummed: set[int] = set()  # ids of parameters whose gradients DDP has not summed
        self._memory: set[int] = set()  # addresses of the sums
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, since the last sum
        trained = [value for value in model.parameters() if value.requires_grad]
        kinds = [((p.dtype, p.device), p.numel() * p.element_size()) for p in trained]
        self._buckets = [Bucket("", [trained[i] for i in group]) for group in buckets(kinds)]
        watch = _Watch(self)
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
        self.released = True

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
            return
        self._unsummed.add(id(parameter))
        if not self._running:
            self._running = True
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)

    def _end_pass(self) -> None:
        self._running = False
        # After DDP's own callback, which sets the gradients.
        torch.autograd.Variable._execution_engine.queue_callback(self._sum_rest)

    def _sum_rest(self) -> None:
        """Sum what a pass that bypassed this wrapper, or the second of a forward pass, has left."""
        self._summed = not self._unsummed
        if self._unsummed:
            self.synchronize()

    def begin(self) -> None:
        """Begin a part, or a closure."""
        self._summed = False

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a step of ``optimizer``, which uses each sum once."""
        if optimizer in self._stepped:
            self._summed = False
        self._stepped.add(optimizer)

    def synchronize(self) -> None:
        """See ``Summing``."""
        gradients = (value.grad for value in self.parameters())
        held = (value is None or _address(value) in self._memory for value in gradients)
        if self._summed and all(held):
            return
        weight = self.adapter.part_weight
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
        self._note(signals)

    def _note(self, signals: torch.Tensor) -> None:
        """Record that all gradients are sums."""
        self.adapter.sent = signals
        self._summed = True
        self._unsummed.clear()
        self._stepped.clear()

    def _start_sum(self, bucket: Any) -> Any:
        """Start summing a bucket over all ranks, in place; before the first, the signals."""
        gradients = bucket.buffer()
        self._memory.add(_address(gradients))
        self._unsummed.difference_update(map(id, bucket.parameters()))
        try:
            weight = self.adapter.part_weight
        except UsageError as error:  # raised within the hook, it would lose its type
            self._trouble, weight = error, 0.0
        weigh(gradients, weight)
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
        self.adapter.sent = sums[0][2]
        self._stepped.clear()
        if self._trouble:
            raise self._trouble


class _Watch:
    """A hook of parameters; weak, so as not to keep a deleted model alive."""

    def __init__(self, model: WeightedDdp) -> None:
        self._model = weakref.ref(model)

    def __call__(self, parameter: torch.Tensor) -> None:
        if (model := self._model()) is not None and not model.released:
            model.arrived(parameter)


def _address(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr()


def _check_first_pass(model: Any, _: Any, output: Any) -> None:
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        leaves = _pytree.tree_leaves(output)
        model.check_graph([x for x in leaves if getattr(x, "grad_fn", None) is not None])


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
