"""Gradients that all strategies of PyTorch sum over the ranks: when, and what is sent with them.

A backward pass sums the gradients, weighted by the rank's part; the step of an optimizer, or its
``synchronize``, sums what no pass has. With each sum a rank sends signals: flags, and the moment of
the sum, of which there must be one. The strategies differ in how gradients travel.
"""

from __future__ import annotations

import atexit
import functools
import sys
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from hvdtrain.adapters.framework import UNKNOWN, Flags, Rank
from hvdtrain.adapters.pytorch import elementwise
from hvdtrain.adapters.pytorch.framework import (
    array_of,
    optimizer_tensors,
    parameters_of,
    warn_once,
)
from hvdtrain.adapters.pytorch.weights import Accumulation, LossWeight, number_of
from hvdtrain.adapters.strategy import BaseStrategy
from hvdtrain.collectives.base import Communicator
from hvdtrain.config.strategies import NONE
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import Checkpoint
from hvdtrain.steps.sharding import Part, Shards
from hvdtrain.system.machine import accelerator
from hvdtrain.system.runtime.exit import agreed as on_all_ranks
from hvdtrain.system.runtime.waits import WEIGHTS

# Of --compression. Gradients are multiplied by the weight of the rank's part before rounding. The
# weights of all ranks sum to 1, so no partial sum exceeds the largest gradient: fp16 overflows only
# if a gradient exceeds 65504. The sum is then infinite on all ranks, and handled like any gradient
# that is not finite.
TYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
STEP = 4  # moment of a sum outside of backward passes; those have the number of the part modulo 4
# A rank sends with each sum: its flags, whether it has late gradients, and the moment, of which
# there must be one.
SIGNALS = len(Flags._fields) + 1 + STEP + 1


def fill(tensor: torch.Tensor, flags: Flags, moment: int, *, late: bool = False) -> None:
    """Set ``tensor`` to the signals of this rank, as numbers that can be summed.

    Args:
        tensor: ``SIGNALS`` elements.
        flags: the flags of this rank.
        moment: number of the part of a backward pass, modulo ``STEP``; ``STEP`` outside of passes.
        late: whether this rank has gradients that the sum does not contain.
    """
    tensor.zero_()
    at = [index for index, flag in enumerate((*flags, late)) if flag]
    for index in (*at, len(Flags._fields) + 1 + moment):
        tensor[index : index + 1].fill_(1.0)  # assigning would synchronize with a GPU


def agreed(sums: torch.Tensor) -> Flags:
    """Return the flags of all ranks from the ``sums`` of signals; this synchronizes with a GPU."""
    return Flags(*(value > 0 for value in sums[: len(Flags._fields)].tolist()))


def check(sums: torch.Tensor, *, by_all: bool = True) -> bool:
    """Return whether any rank has late gradients, from the ``sums`` of signals.

    Raises:
        UsageError: the ranks were at different moments. It is reported once if these sums are
            checked ``by_all`` ranks.
    """
    late, *moments = sums[len(Flags._fields) :].tolist()
    if sum(map(bool, moments)) > 1:
        error = UsageError(
            "the ranks make different backward passes or steps: every rank must make each of "
            "them, in a closure too, also on a stand-in (`part.count` is 0: do not skip it), "
            "and assign gradients on all ranks or on none"
        )
        raise on_all_ranks(error) if by_all else error
    return late > 0


class GradientSums(ABC):
    """Gradients of a model or an optimizer, summed over the ranks; see ``BaseStrategy``."""

    adapter: Rank
    blocked_seconds = 0.0  # total wait for sums
    messages: dict[str, int] | None = None  # of the gradients of an update; None: not counted
    is_over = False  # others sum the gradients, or nothing is trained any more
    _summed = False  # the gradients are sums: of the last pass, or of what was assigned
    _unread: tuple[torch.Tensor, Any] | None = None  # a copy of signals, and the event of its end

    def connect(self, adapter: Rank) -> None:
        """Set the adapter of this rank; no constructor, as ``DistributedDataParallel`` has one."""
        self.adapter = adapter
        self._stepped: weakref.WeakSet[Any] = weakref.WeakSet()  # optimizers, since the last sum
        # Of each optimizer. The gradients of other parameters are averaged with the first.
        self._accumulations: weakref.WeakKeyDictionary[Any, Accumulation] = (
            weakref.WeakKeyDictionary()
        )

    def begin(self) -> None:
        """Expect a backward pass, or gradients that are assigned: a part or a closure begins."""
        self._summed = False

    @abstractmethod
    def synchronize(self) -> None:
        """Sum the gradients over the ranks now, unless a backward pass has; all ranks call it.

        The step does so, too. Call it before gradients that were assigned are read or clipped.
        """

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients locally in backward passes; see ``BaseStrategy``."""

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Synchronize before each step of ``optimizer``, or each time after its closure."""
        self._accumulations[optimizer] = Accumulation()
        optimizer.register_step_pre_hook(once_per_step(self._before_step))

    def synchronize_of(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Return the ``synchronize`` of ``optimizer``."""
        known = weakref.ref(optimizer)

        def synchronize() -> None:
            self._use_once(known())
            self.synchronize()

        return synchronize

    def _use_once(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Sum again if a step of ``optimizer`` has used the sums: they may be changed in place."""
        if optimizer in self._stepped:
            self._summed = False
            self._stepped.discard(optimizer)

    def begin_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Begin a step of ``optimizer``, which uses each sum once."""
        self._use_once(optimizer)

    def _before_step(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> Any:
        """Return the arguments of the step with a closure that synchronizes; None: it has none."""
        self.begin_step(optimizer)
        _, *positional = arguments
        closure, *rest = positional or [named.get("closure")]
        if closure is None:
            self._end_update(optimizer)
            return None

        def summed() -> Any:
            self.begin()
            loss = closure()
            self._end_update(optimizer)
            return loss

        return (optimizer, summed, *rest), {k: v for k, v in named.items() if k != "closure"}

    def _end_update(self, optimizer: torch.optim.Optimizer) -> None:
        self.synchronize()
        self._stepped.add(optimizer)
        self._accumulations[optimizer].reset()

    @abstractmethod
    def all_parameters(self) -> Iterable[torch.nn.Parameter]:
        """Return the parameters whose gradients are summed."""

    def begin_pass(self, *, local: bool) -> None:
        """Begin a pass before its first gradient; ``local``: see ``Accumulation.begin``."""
        weight = self.adapter.pass_weight
        if weight is None and not self._has_weights:
            for accumulation in self._accumulations.values():
                accumulation.begin(None, ())
            return
        for accumulation, updated, others in self._with_parameters():
            accumulation.begin(weight, updated, others, local=local)

    def end_pass(self) -> None:
        """End a pass, whose gradients were summed."""
        if self._has_weights:
            for accumulation, updated, others in self._with_parameters():
                accumulation.end(updated, others)

    @property
    def _has_weights(self) -> bool:
        return any(each.has_weights for each in self._accumulations.values())

    def _with_parameters(self) -> Iterator[tuple[Accumulation, list[Any], list[Any]]]:
        """Yield each optimizer's accumulation, its parameters, and other parameters."""
        updated = {id(value): parameters_of(key) for key, value in self._accumulations.items()}
        known = {id(value) for values in updated.values() for value in values}
        others = [value for value in self.all_parameters() if id(value) not in known]
        for accumulation in self._accumulations.values():
            yield accumulation, updated[id(accumulation)], others
            others = []

    def expect_weight(self) -> None:
        """Expect a pass with a weight, after which one that has failed is over."""
        for accumulation in self._accumulations.values():
            accumulation.abort()

    @contextmanager
    def blocked(self, call: str) -> Iterator[None]:
        """Count the time within the block as waiting for other ranks, in ``call``."""
        started = time.perf_counter()
        with self.adapter.waits.during(call):
            yield
        self.blocked_seconds += time.perf_counter() - started

    def mark_summed(self) -> None:
        """Record that all gradients are sums."""
        self._summed = True
        self._stepped.clear()

    def note_flags(self, signals: torch.Tensor) -> None:
        """Let the adapter read the flags of all ranks from the sums of ``signals``, on demand."""
        self.adapter.read_flags = functools.partial(agreed, signals)

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


class TorchStrategy(BaseStrategy):
    """A strategy that sums gradients of PyTorch over the ranks."""

    unsummed: tuple[torch.dtype, ...] = ()  # types of gradients that the library cannot sum
    updates = ""  # the part of the model that a rank updates, if not the whole

    def __init__(self, adapter: Rank) -> None:
        super().__init__(adapter)
        # Weak, so as not to keep a deleted model or optimizer alive.
        self._references: list[weakref.ref[Any]] = []
        self._loss_weight: LossWeight | None = None  # the newest; its sum may be under way

    @override
    def check(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        none = self.adapter.comm_options.compression == NONE
        for value in (*model.parameters(), *parameters_of(optimizer)):
            unsummed = self.unsummed + (() if none else (torch.complex64,))
            if value.requires_grad and value.dtype in unsummed:
                raise UsageError(
                    f"distribute_optimizer: --strategy {self.name} cannot sum {value.dtype}, which "
                    "the model has: keep the parameters in float32 (complex ones as real and "
                    "imaginary parts), or use --strategy ddp without --compression"
                )
        text = elementwise.check(optimizer, self.name, self.updates) if self.updates else ""
        if text and self.adapter.communicator.is_root:
            warn_once(text)

    def add_sums(self, sums: GradientSums) -> None:
        """Use the gradient sums of a model or an optimizer while it exists."""
        others = (known for known in self.gradient_sums if known is not sums)
        self._references = [weakref.ref(known) for known in (*others, sums)]
        if self.adapter.read_flags is None:
            self.adapter.read_flags = lambda: UNKNOWN

    @override
    def weigh(self, count: Any, optimizers: Iterable[Any]) -> None:
        if self.adapter.world.size == 1:
            super().weigh(count, optimizers)
            return
        number = number_of(count, self.adapter)
        self._complete_count()
        self.adapter.pass_weight = self._loss_weight = LossWeight(number, self.start_sum)
        for sums in self.gradient_sums:
            sums.expect_weight()

    def _complete_count(self) -> None:
        """Wait for the sum of the last count, also if no pass has used it."""
        if self._loss_weight:
            _ = self._loss_weight.total
        else:
            atexit.register(self._complete_count)  # MPI would fail to end

    @property
    @override
    def gradient_sums(self) -> list[Any]:
        known = (reference() for reference in self._references)
        return [sums for sums in known if sums is not None and not sums.is_over]

    @override
    def begin_part(self, shards: Shards, part: Part) -> None:
        for sums in self.gradient_sums:
            sums.begin()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with ExitStack() as stack:
            for sums in self.gradient_sums:
                stack.enter_context(sums.no_sync())
            yield

    @override
    def sum_tensor(self, values: torch.Tensor, name: str) -> torch.Tensor:
        return self.adapter.communicator.sum_tensor(values.clone().contiguous(), name)

    def state_of_root(self, optimizer: torch.optim.Optimizer) -> Checkpoint:
        """Return rank 0's whole state of an ``optimizer`` that is not sharded yet."""
        communicator = self.adapter.communicator
        arrays = communicator.on_root(
            lambda: {name: array_of(value) for name, value in optimizer_tensors(optimizer).items()}
        )
        return Checkpoint({}, communicator.broadcast_arrays(arrays or {}))


class ProcessGroupStrategy(TorchStrategy):
    """A strategy over torch.distributed, with Gloo, or NCCL on GPUs."""

    runtime = "torch.distributed"
    collective_passes = True

    @override
    def connect(self) -> Communicator:
        from hvdtrain.collectives.torch_distributed import TorchDistributed

        kind, backend = accelerator.kind(), accelerator.backend()
        if kind != accelerator.CPU and not backend:
            raise UsageError(
                f"--strategy {self.name}: this PyTorch has no communication backend for {kind}; "
                "use --strategy horovod or mpi, which sum in host memory"
            )
        return TorchDistributed(gpu=bool(backend))

    @override
    def start_sum(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        work = dist.all_reduce(values, group=self._scalars, async_op=True)

        def wait() -> torch.Tensor:
            with self.adapter.waits.during(WEIGHTS):
                work.wait()
            return values

        return wait

    @functools.cached_property
    def _scalars(self) -> Any:
        """The process group of ``start_sum``; a gradient's sum of another rank is not mistaken."""
        from hvdtrain.collectives.torch_distributed import FOREVER

        with self.adapter.waits.during(WEIGHTS):
            return dist.new_group(timeout=FOREVER)


def once_per_step(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``hook``, of an optimizer's step, which is not called again for a step within it.

    If the step of a class calls that of its base class, PyTorch calls the hooks for each.
    """

    def called(optimizer: Any, arguments: Any, named: Any) -> Any:
        step = sys._getframe(1)  # of PyTorch, which calls the hooks and then the optimizer's code
        frame = step.f_back
        while frame and not (
            frame.f_code is step.f_code and frame.f_locals.get("self") is optimizer
        ):
            frame = frame.f_back
        return None if frame else hook(optimizer, arguments, named)

    return called


def make_dense(model: torch.nn.Module) -> None:
    """Make the gradients of embeddings dense: sparse ones cannot be summed."""
    for layer in model.modules():
        if isinstance(layer, (torch.nn.Embedding, torch.nn.EmbeddingBag)):
            layer.sparse = False
