"""The strategy of FSDP2 for PyTorch: parameters, gradients and optimizer state in parts.

``fully_shard`` shards each parameter along its first dimension (Zhao et al., "PyTorch FSDP", VLDB
2023; ZeRO, stage 3). A unit of the model is gathered for its forward and its backward pass, and
its gradients are reduced and scattered, after multiplication by the part's share of the global
batch, so uneven parts are handled correctly.

What it shares with other strategies is in two more files: ``sums.py`` (which sums belong to a step,
and the signals sent with them) and ``adapters/state_view.py`` (how pieces are saved and loaded).
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from typing_extensions import override

from hvdtrain.adapters.framework import Rank
from hvdtrain.adapters.partition import balanced_owners
from hvdtrain.adapters.pytorch.elementwise import ROWS
from hvdtrain.adapters.pytorch.framework import TorchView, parameters_of, tensor_of
from hvdtrain.adapters.pytorch.sums import (
    SIGNALS,
    STEP,
    TYPES,
    GradientSums,
    ProcessGroupStrategy,
    fill,
    make_dense,
)
from hvdtrain.adapters.pytorch.weights import weigh
from hvdtrain.adapters.state_view import StateView
from hvdtrain.collectives.torch_distributed import FOREVER
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import MODEL_FILE, TRAINING_FILE, Piece
from hvdtrain.system.machine import accelerator
from hvdtrain.system.runtime.exit import agreed as on_all_ranks
from hvdtrain.system.runtime.waits import SUM, Waits

GATHERING = "the gathering of the parameters"
READING = "item() of a sharded tensor"
ITEM = torch.ops.aten._local_scalar_dense.default  # what item(), float() and bool() call
# Names since PyTorch 2.13, and before.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
UNIT_BYTES = 2**20  # smaller blocks are not worth a separate all-gather
SHAPES = 64  # of inputs for which the code of a block is compiled; PyTorch stops at 8


class Fsdp(ProcessGroupStrategy):
    """Each rank holds its rows of each parameter, and their gradients and optimizer state."""

    name = "fsdp"
    evaluates_together = True
    shards_state = True
    updates = ROWS
    unsummed = (torch.complex64,)

    @override
    def check(self, model: Any, optimizer: Any) -> None:
        super().check(model, optimizer)
        known = {id(value) for value in model.parameters()}
        if any(id(value) not in known for value in parameters_of(optimizer)):
            raise UsageError(
                "distribute_optimizer: --strategy fsdp shards the parameters of the model: use an "
                "optimizer of these"
            )

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        sums = self._sums_of(model) or self._shard(model, optimizer)
        # Their fused kernels do not support DTensor.
        if isinstance(optimizer, (torch.optim.SGD, torch.optim.Adagrad)):
            optimizer._step_supports_amp_scaling = False
            for group in optimizer.param_groups:
                group["fused"] = None
        optimizer.sum_shards = self.sum_shards  # for the norms of LARS and LAMB
        self.add_sums(sums)
        sums.attach(optimizer)
        return model, optimizer

    @override
    def view(self, model: Any, optimizer: Any = None) -> StateView:
        return RowsView(self.adapter, model) if self._sums_of(model) else super().view(model)

    def _sums_of(self, model: Any) -> Communication | None:
        """Return the sums of a model that is sharded already."""
        return next((known for known in self.gradient_sums if known.model is model), None)

    def _shard(self, model: Any, optimizer: Any) -> Communication:
        """Shard a model that is not yet, and let the optimizer have its new parameters."""
        check_parameters(model)
        make_dense(model)
        adapter, device = self.adapter, self.adapter.device.type
        state = self.state_of_root(optimizer)  # e.g. that of Adagrad, which begins with one
        names = {id(value): name for name, value in model.named_parameters()}
        # After sharding no rank has them whole.
        for value in TorchView(adapter, model).tensors()[MODEL_FILE].values():
            if not value.is_contiguous():  # fully_shard takes no other
                value.data = value.data.contiguous()
            dist.broadcast(value.detach(), src=0)
        mesh = init_device_mesh(device, (adapter.world.size,))
        for unit in (*units(model), model):
            fully_shard(unit, mesh=mesh)
        model.register_forward_hook(_reshard)
        read_whole(device, adapter.waits)
        now = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [now[names[id(value)]] for value in group["params"]]
        optimizer.state.clear()  # of the former parameters
        RowsView(adapter, model).restore_optimizer(optimizer, state)
        return Communication(model, adapter)

    @override
    def compile(self, task: Any) -> None:
        # Each block is compiled by itself. Those of one class differ in height and width of their
        # input, which would become symbols, and PyTorch cannot compile each convolution with those.
        torch._dynamo.config.automatic_dynamic_shapes = False
        torch._dynamo.config.cache_size_limit = SHAPES
        super().compile(task)

    @override
    def sum_shards(self, values: Any) -> Any:
        if self.gradient_sums:
            with self.adapter.waits.during(SUM):
                dist.all_reduce(values)
        return values


class RowsView(TorchView):
    """This rank's rows of each parameter and of its optimizer state."""

    sharded = True

    @override
    def broadcast(self, optimizer: Any) -> str:
        # Step 5 has sent the parameters, and each rank has read its rows of a checkpoint.
        return self.send(dict(self.model.named_buffers()))

    @override
    def set_tensor(self, tensor: torch.Tensor, saved: Any) -> None:
        _local(tensor).copy_(self._rows(tensor, saved))

    @override
    def optimizer_state(self, index: int, parameter: Any, saved: Any) -> torch.Tensor:
        # Sharded if it has the shape of the parameter.
        rows = self._rows(parameter, saved)
        if not isinstance(parameter, DTensor) or saved.shape != tuple(parameter.shape):
            return rows
        sharded = torch.empty_like(parameter, dtype=rows.dtype, requires_grad=False)
        _local(sharded).copy_(rows)
        return sharded

    def _rows(self, like: torch.Tensor, stored: Any) -> torch.Tensor:
        """Return this rank's rows of the ``stored`` values of the whole tensor ``like``."""
        if isinstance(like, DTensor) and stored.shape == tuple(like.shape):
            world = self.adapter.world
            most = -(-stored.shape[0] // world.size)
            first = min(world.rank * most, stored.shape[0])
            stored = stored[first : min(first + most, stored.shape[0])]
        return tensor_of(stored)

    @override
    def array(self, tensor: Any) -> np.ndarray[Any, Any]:
        return super().array(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    @override
    def pieces(self, optimizer: Any) -> Iterator[Piece]:
        tensors = self.tensors(optimizer)
        model, size = tensors[MODEL_FILE].values(), self.adapter.world.size
        sizes = [value.numel() * value.element_size() for value in model]
        owners = dict(zip(map(id, model), balanced_owners(sizes, size), strict=True))
        parameters = parameters_of(optimizer) if optimizer else []
        for piece in super().pieces(optimizer):
            value = like = tensors[piece.kind][piece.name]
            if piece.kind == TRAINING_FILE:
                like = parameters[int(piece.name.partition("/")[0])]
            owner = owners[id(like)]
            fetch = functools.partial(self._gather, value, owner)
            yield replace(piece, owner=owner, fetch=fetch, replicated=False)

    def _gather(self, value: torch.Tensor, owner: int) -> torch.Tensor | None:
        """Return the whole tensor on its owner; all ranks must call it, also if not sharded."""
        world, local = self.adapter.world, _local(value).detach().cpu()
        here = owner == world.rank
        if not isinstance(value, DTensor):
            return local if here else None
        most = -(-value.shape[0] // world.size)
        padded = local.new_zeros(most, *value.shape[1:])
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in range(world.size)] if here else None
        dist.gather(padded, parts, dst=owner)
        return torch.cat(parts)[: value.shape[0]] if parts else None


class Communication(GradientSums):
    """Gathers the parameters of a model and sums its gradients, replacing FSDP's collectives.

    FSDP2 calls ``all_gather`` and ``reduce_scatter`` for each unit.
    """

    def __init__(self, model: Any, adapter: Rank) -> None:
        self.connect(adapter)
        self.model = model
        self._counted = {"count": 0, "bytes": 0}
        self._running = False  # a backward pass runs
        self._unsummed = False  # gradients of passes within `no_sync`
        # Gradients after the last backward pass, by the ids of their parameters.
        self._known: dict[int, weakref.ref[Any]] = {}
        for unit in model.modules():
            if isinstance(unit, FSDPModule):
                unit.set_gradient_divide_factor(1.0)  # the weights of the parts sum to 1
                unit.set_custom_all_gather(UnitCollective(self.all_gather))  # type: ignore[arg-type]
                unit.set_custom_reduce_scatter(UnitCollective(self.reduce_scatter))  # type: ignore[arg-type]

    @override
    def all_parameters(self) -> Iterable[torch.nn.Parameter]:
        return self.model.parameters()

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.model.set_requires_gradient_sync(True)
            self._unsummed = True

    def all_gather(
        self, whole: torch.Tensor, part: torch.Tensor, group: Any, async_op: bool
    ) -> Any:
        """Gather the parameters of a unit."""
        with self.blocked(GATHERING):
            return all_gather(whole, part, group=group, async_op=async_op)

    def reduce_scatter(
        self, part: torch.Tensor, whole: torch.Tensor, group: Any, async_op: bool
    ) -> Any:
        """Sum the weighted gradients of a unit; each rank receives its rows."""
        if not self._running:
            self.begin_pass(local=self._unsummed)
            self._running = True
            # At the end of the pass; there is no public API for it.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_pass)
        weigh(whole, self.adapter.loss_weight, out=whole)
        kind = TYPES.get(self.adapter.comm_options.compression, whole.dtype)
        sent, received = whole.to(kind), part.to(kind)  # no copies if they are of that type
        self._counted["count"] += 1
        self._counted["bytes"] += sent.numel() * sent.element_size()
        with self.blocked(SUM):
            work = reduce_scatter(received, sent, group=group, async_op=async_op)
        if received is not part:
            if async_op:
                work.wait()
            part.copy_(received)
        return work

    def _gradients(self) -> dict[int, Any]:
        return {id(p): p.grad for p in self.model.parameters() if p.grad is not None}

    def _end_pass(self) -> None:
        self._running = self._unsummed = False
        self.mark_summed()
        self.end_pass()
        self._known = {key: weakref.ref(grad) for key, grad in self._gradients().items()}

    @override
    def synchronize(self) -> None:
        """Sum the signals of all ranks, before an update on all of them.

        Raises:
            UsageError: there are gradients that no backward pass has summed. A rank has only its
                rows of them, so they cannot be summed here.
        """
        known = {key: reference() for key, reference in self._known.items()}
        assigned = any(known.get(key) is not grad for key, grad in self._gradients().items())
        part = self.adapter.current_part if not self._summed else None
        if part and part.stand_in and not assigned:
            raise UsageError(
                "no backward pass was made on a stand-in (`part.count` is 0): with --strategy fsdp "
                "every rank must make each pass"
            )
        if self._unsummed:
            raise UsageError(
                "--strategy fsdp sums the gradients of passes within no_sync() with those of the "
                "next pass: make the last one before step() outside of it"
            )
        self.messages, self._counted = self._counted, {"count": 0, "bytes": 0}
        sent = torch.empty(SIGNALS, device=self.adapter.device)
        fill(sent, self.adapter.flags, self.adapter.parts_begun % STEP, late=assigned)
        with self.blocked(SUM):
            dist.all_reduce(sent)
        if self.check_signals(sent, now=assigned):
            error = UsageError(
                "--strategy fsdp cannot sum gradients that were assigned to .grad: change those of "
                "backward() in place, or use --strategy horovod, ddp or zero"
            )
            raise on_all_ranks(error) if self.adapter.device.type == accelerator.CPU else error
        self.note_flags(sent)


class UnitCollective:
    """A collective of a unit, with the interface that FSDP2 calls."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory for one call."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: Any,
        op: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Run the collective; the sum is the only operation."""
        return self._run(output_tensor, input_tensor, group, async_op)


def read_whole(device: str, waits: Waits) -> None:
    """Let ``item()`` of a parameter, sum, norm or maximum return the whole; all ranks must call it.

    PyTorch returns that of this rank's rows. The numbers have a process group of their own: a rank
    that reads one alone must not receive the gradients of others.
    """
    handlers = DTensor._op_dispatcher._custom_op_handlers  # there is no public API for it
    if ITEM in handlers:
        return
    mesh: Any = DeviceMesh.from_group(dist.new_group(timeout=FOREVER), device)

    def item(_: Any, values: tuple[Any, ...], __: Any) -> Any:
        value, local = values[0], values[0].to_local()
        is_whole = all(placement.is_replicate() for placement in value.placements)
        if not is_whole and value.device_mesh.mesh.tolist() == mesh.mesh.tolist():
            shape, stride = value.shape, value.stride()
            with waits.during(READING):
                sharded = DTensor.from_local(
                    local, mesh, value.placements, shape=shape, stride=stride
                )
                local = sharded.full_tensor()
        return local.item()

    handlers[ITEM] = item  # type: ignore[assignment]


def units(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the units that are gathered separately: large blocks in sequence, not nested.

    Elements of a ``Sequential`` or ``ModuleList`` are called as modules, so gathering before each
    call suffices; other children may not be. A block that shares parameters with the rest of the
    model is no unit.
    """
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)  # these are not called
    uses = Counter(id(value) for _, value in model.named_parameters(remove_duplicate=False))

    def is_unshared(block: torch.nn.Module) -> bool:
        here = Counter(id(value) for _, value in block.named_parameters(remove_duplicate=False))
        return all(uses[value] == number for value, number in here.items())

    def search(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
        row = isinstance(module, (torch.nn.Sequential, torch.nn.ModuleList))
        for block in module.children():
            size = sum(value.numel() * value.element_size() for value in block.parameters())
            if row and not isinstance(block, lists) and size >= UNIT_BYTES and is_unshared(block):
                yield block
            else:
                yield from search(block)

    return list(search(model))


def check_parameters(model: torch.nn.Module) -> None:
    """Raise ``UsageError``, naming a parameter, if FSDP2 cannot shard the model."""
    kind = next((parameter.dtype for parameter in model.parameters()), None)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0:
            trouble = "is a scalar: use the shape (1,)"
        elif not parameter.numel():
            trouble = "is empty: omit it, or register a buffer instead"
        elif parameter.dtype != kind:
            trouble = f"is {parameter.dtype}, others are {kind}: use one type"
        else:
            continue
        raise UsageError(
            f"distribute_optimizer: --strategy fsdp cannot shard the parameter {name}, which "
            f"{trouble}"
        )


def _reshard(model: Any, *_: Any) -> None:
    """Free the parameters gathered last if no backward pass will do it."""
    if not torch.is_grad_enabled():
        model.reshard()


def _local(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
