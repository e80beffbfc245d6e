"""A model in stages, which a batch passes in micro-batches, forward and backward.

torch.distributed.pipelining is not used (torch 2.13). Its schedules compute the loss themselves,
which here the task or the user's loop does. A stage receives each micro-batch in a buffer of the
first one's shape, so it fails if a batch is not a multiple of their number, as at the end of an
epoch. And it infers these shapes by an additional forward pass, in which BatchNorm sees a
micro-batch twice, and after the first stage uninitialized memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from hvdtrain.adapters.pytorch.adapter import Wrapper
from hvdtrain.adapters.pytorch.ddp import weigh
from hvdtrain.adapters.pytorch.sharded import ShardedAdapter, UpdateSums
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.torch_distributed import Subgroup
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import bounds
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.system.runtime.waits import SUM

FORWARD = "the forward pass through the stages"
HEADER = 256  # bytes of the message that describes a layout


@dataclass(frozen=True)
class Layout:
    """Layout of a tensor sent between stages, except for its number of samples."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> Layout:
        """Return the layout of ``value``."""
        last = value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return cls(tuple(value.shape[1:]), value.dtype, last and not value.is_contiguous())

    def empty(self, samples: int, device: torch.device) -> torch.Tensor:
        """Return uninitialized memory for ``samples``."""
        whole = torch.empty(samples, *self.shape, dtype=self.dtype, device=device)
        return whole.to(memory_format=torch.channels_last) if self.channels_last else whole

    def message(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` in the form to send: itself if it has this layout."""
        value = value.detach()
        return (value.permute(0, 2, 3, 1) if self.channels_last else value).contiguous()


class Pipeline(UpdateSums, Wrapper):
    """A model of which this rank holds and computes only one stage.

    All ranks of a group of stages must call it with the same batch, and all get the output of the
    last stage. After ``backward`` of their loss, the gradients are those of the global batch.

    Args:
        module: the user's model.
        layers: layers of this stage.
        owners: stage of each parameter and buffer, by name.
        adapter: adapter of this rank.
        stage_group: the ranks that together hold the model, by stage.
        peers: the ranks of the same stage.
        micro_batches: number of micro-batches per batch, at most one per sample.

    Attributes:
        module: the user's model; parameters of other stages have no elements.
        shapes: shapes of all its parameters and buffers, by name.
        freed: ids of the parameters of other stages.
        most: largest number of micro-batches in a training pass.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        layers: Sequence[torch.nn.Module],
        owners: dict[str, int],
        adapter: ShardedAdapter,
        *,
        stage_group: Subgroup,
        peers: Communicator,
        micro_batches: int,
    ) -> None:
        super().__init__()
        self.module, self.adapter = module, adapter
        self._stage_group, self._peers, self._micro_batches = stage_group, peers, micro_batches
        self.stage, self.stages = adapter.world.stage, adapter.world.stages
        self.most = 0
        self._layers = tuple(layers)
        self._names = [name for name, owner in owners.items() if owner == self.stage]
        state = module.state_dict(keep_vars=True)
        self.shapes = {name: tuple(value.shape) for name, value in state.items()}
        self.freed = {id(value) for name, value in state.items() if owners[name] != self.stage}
        for value in state.values():
            if id(value) in self.freed:
                value.data = value.data.new_empty(0)
        # Each once: tied parameters have several names.
        mine = {id(state[name]): state[name] for name in self._names}
        self._trained = [value for value in mine.values() if value.requires_grad]
        self._layouts: dict[Any, Layout] = {}
        self._root = torch.zeros((), device=adapter.device, requires_grad=True)
        self._summing = True
        self._unsummed: list[torch.Tensor | None] = [None] * len(self._trained)

    def stage_state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of this stage (no copies), by name."""
        state = self.module.state_dict(keep_vars=True)
        return {name: state[name] for name in self._names}

    # Forward

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last stage for the batch ``x``, on all ranks of the group."""
        number = max(1, min(self._micro_batches, len(x)))
        cuts = [slice(*bounds(len(x), index, number)) for index in range(number)]
        # Without samples BatchNorm would divide by zero.
        mode = nullcontext() if len(x) else _evaluating(self.module)
        with self.adapter.waits.during(FORWARD), mode:
            passes = Passes(cuts, self._kind(x))
            inputs = self._expect("input", passes, self._rank(-1)) if self.stage else []
            for index, cut in enumerate(cuts):
                chunk, arrival = inputs[index] if inputs else (x[cut], None)
                self._forward(chunk, arrival, passes)
            self._wait([work for work, _ in passes.sent])
            passes.sent.clear()
            result = self._share(len(x), passes)
        if not torch.is_grad_enabled():
            return result
        self.most = max(self.most, number)
        return _Backward.apply(self._root, self, passes, result)

    def _kind(self, x: torch.Tensor) -> Any:
        """Return the key of ``x`` on which the layouts of the messages between stages depend."""
        device = x.device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return tuple(x.shape[1:]), x.dtype, casts, self.module.training

    def _forward(self, x: torch.Tensor, arrival: Any, passes: Passes) -> None:
        """Compute one micro-batch in this stage, after its ``arrival``."""
        if self.stage:
            self._wait([arrival])
            if torch.is_grad_enabled() and x.is_floating_point():
                x.requires_grad_()
        samples, output = len(x), x
        if x.requires_grad and getattr(self._layers[0], "inplace", False):
            output = x.clone()  # a leaf cannot be overwritten
        for layer in self._layers:
            output = layer(output)
        if not isinstance(output, torch.Tensor) or len(output) != samples:
            raise UsageError(
                f"--strategy pipeline: {type(self._layers[-1]).__name__} returns no tensor with a "
                "row per sample, so the model cannot be cut after it"
            )
        passes.kept.append((x, output))
        if self.stage + 1 < self.stages:
            layout = self._sent_layout("output", passes, output, [self._rank(1)])
            passes.sent += self._send(layout.message(output), self._rank(1))

    def _share(self, samples: int, passes: Passes) -> torch.Tensor:
        """Return the output of the last stage, broadcast to all stages."""
        if self.stage + 1 == self.stages:
            whole = torch.cat([output.detach() for _, output in passes.kept])
            others = [rank for rank in self._stage_group.ranks if rank != self._rank(0)]
            layout = self._sent_layout("result", passes, whole, others)
        else:
            layout = self._layout("result", passes, self._stage_group.ranks[-1])
            whole = layout.empty(samples, self.adapter.device)
        sent = layout.message(whole)
        if self.stages > 1 and sent.numel():
            with self.blocked():
                dist.broadcast(sent, src=self._stage_group.ranks[-1], group=self._stage_group.group)
        return whole

    # Backward

    def backward(self, passes: Passes, gradient: torch.Tensor) -> None:
        """Run the backward passes of all micro-batches, and sum gradients over equal stages.

        The last stage uses ``gradient``, that of the whole output.
        """
        if not passes.kept:
            raise agreed(
                UsageError(
                    "--strategy pipeline: a second backward pass from one output of the model: sum "
                    "the losses, or call the model again"
                )
            )
        with self.adapter.waits.during(SUM):
            weight = self.adapter.part_weight
            before = [parameter.grad for parameter in self._trained]
            for parameter in self._trained:
                parameter.grad = None
            self._backward(passes, gradient)
            self._add_up(weight)
            for parameter, old in zip(self._trained, before, strict=True):
                if old is not None:
                    parameter.grad = old if parameter.grad is None else old.add_(parameter.grad)

    def _backward(self, passes: Passes, gradient: torch.Tensor) -> None:
        """Run the backward passes of all micro-batches; integer inputs have no gradient to send."""
        sent: list[Any] = []
        outer: list[tuple[torch.Tensor, Any]] = []
        if self.stage + 1 < self.stages and passes.kept[0][1].is_floating_point():
            outer = self._expect("output", passes, self._rank(1))
        for index, (x, output) in enumerate(passes.kept):
            of_output, arrival = outer[index] if outer else (gradient[passes.cuts[index]], None)
            self._wait([arrival])
            if output.requires_grad and len(output):
                torch.autograd.backward(output, of_output)
            if self.stage and x.is_floating_point():
                layout = self._layouts["input", passes.kind]
                whole = torch.zeros_like(x) if x.grad is None else x.grad
                sent += self._send(layout.message(whole), self._rank(-1))
        passes.kept.clear()
        self._wait([work for work, _ in sent])

    def _add_up(self, weight: float) -> None:
        """Sum the gradients of this pass, and of those not yet summed, over equal stages."""
        for parameter, held in zip(self._trained, self._unsummed, strict=True):
            if held is not None:
                parameter.grad = held if parameter.grad is None else held.add_(parameter.grad)
        if not self._summing:
            self._unsummed = [parameter.grad for parameter in self._trained]
            for parameter in self._trained:
                parameter.grad = None
            return
        self._unsummed = [None] * len(self._trained)
        self.adapter.note_pass()
        for kind in dict.fromkeys(parameter.dtype for parameter in self._trained):
            group = [parameter for parameter in self._trained if parameter.dtype == kind]
            if self.adapter.world.data_size > 1:
                self._sum(group, weight)

    def _sum(self, parameters: Sequence[torch.Tensor], weight: float) -> None:
        """Sum gradients of one type; a parameter without a gradient on any rank has none."""
        holders = torch.tensor([float(parameter.grad is not None) for parameter in parameters])
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        whole = torch.cat([gradient.reshape(-1) for gradient in flat])
        weigh(whole, weight)
        message = torch.cat([whole, holders.to(whole)])
        with self.blocked():
            self._peers.sum_tensor(message, "gradients")
        *sums, holders = message.split([*(p.numel() for p in parameters), len(parameters)])
        for parameter, total, number in zip(parameters, sums, holders.tolist(), strict=True):
            if number:
                gradient = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
                parameter.grad = gradient.detach().copy_(total.view_as(parameter))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip the L2 norm of the gradients of all stages together; return the norm before.

        As ``torch.nn.utils.clip_grad_norm_``, which sees only this rank's gradients.
        """
        gradients = [value.grad for value in self._trained if value.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self._root.device)
        for gradient in gradients:
            squares += gradient.double().square().sum()
        norm = self.adapter.sum_shards(squares).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(scale)
        return norm

    # Interface to the adapter, as in other strategies

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in backward passes; see ``CommonAdapter``."""
        self._summing = False
        try:
            yield
        finally:
            self._summing = True

    # Messages

    def _rank(self, step: int) -> int:
        """Return the rank of the stage ``step`` after this one."""
        return self._stage_group.ranks[self.stage + step]

    def _send(self, message: torch.Tensor, to: int) -> list[Any]:
        """Start sending; return the request, with the message to keep alive until it completes."""
        return [(dist.isend(message, to), message)] if message.numel() else []

    def _expect(self, role: str, passes: Passes, source: int) -> list[tuple[torch.Tensor, Any]]:
        """Start receiving all micro-batches from a rank; return each with its request."""
        layout, messages = self._layout(role, passes, source), []
        for cut in passes.cuts:
            whole = layout.empty(cut.stop - cut.start, self.adapter.device)
            message = layout.message(whole)
            messages.append((whole, dist.irecv(message, source) if message.numel() else None))
        return messages

    def _wait(self, works: Sequence[Any]) -> None:
        with self.blocked():
            for work in works:
                if work is not None:
                    work.wait()

    def _sent_layout(self, role: str, passes: Passes, value: Any, to: Sequence[int]) -> Layout:
        """Return the layout of ``value``; send the first of its kind to the ranks ``to``."""
        key = role, passes.kind
        if key not in self._layouts:
            self._layouts[key] = layout = Layout.of(value)
            kind = str(layout.dtype).removeprefix("torch.")
            # JSON, since a pickle that is received could execute anything.
            header = json.dumps([layout.shape, kind, layout.channels_last]).encode().ljust(HEADER)
            for rank in to:
                dist.send(torch.frombuffer(bytearray(header), dtype=torch.uint8), rank)
        return self._layouts[key]

    def _layout(self, role: str, passes: Passes, source: int) -> Layout:
        """Return the layout of messages from the rank ``source``, which sends it once."""
        key = role, passes.kind
        if key not in self._layouts:
            header = torch.empty(HEADER, dtype=torch.uint8)
            with self.blocked():
                dist.recv(header, source)
            shape, kind, last = json.loads(header.numpy().tobytes())
            self._layouts[key] = Layout(tuple(shape), getattr(torch, kind), last)
        return self._layouts[key]


@dataclass
class Passes:
    """The micro-batches of one batch in one stage, kept for their backward passes."""

    cuts: Sequence[slice]  # of each in the batch
    kind: Any  # key of the layouts of messages between stages
    kept: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # input, output
    sent: list[Any] = field(default_factory=list)  # requests and messages under way


@contextmanager
def _evaluating(module: torch.nn.Module) -> Iterator[None]:
    """Set all layers of ``module`` to evaluation within the block; some may be so already."""
    layers = [(layer, layer.training) for layer in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for layer, training in layers:
            layer.training = training


class _Backward(torch.autograd.Function):
    """Output of a pipeline, whose backward pass is that of this rank's stage.

    It does not wait for the loss of other ranks, which is the same.
    """

    @staticmethod
    def forward(
        ctx: Any, _: torch.Tensor, pipeline: Pipeline, passes: Passes, result: torch.Tensor
    ) -> torch.Tensor:
        ctx.pipeline, ctx.passes = pipeline, passes
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.pipeline.backward(ctx.passes, gradients[0])
        return None, None, None, None
