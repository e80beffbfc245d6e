"""A model in stages: a batch goes through them in micro-batches, forward and back.

torch.distributed.pipelining is not what does it. Its schedules compute the loss themselves, where
here the task (or a user's own loop) does; a stage receives each micro-batch in a buffer of the
first one's shape, so it fails where a batch is not a multiple of their number, as at the tail of
an epoch; and it finds these shapes out by one more forward pass, after which BatchNorm has seen a
micro-batch twice, and behind the first stage memory that nobody has filled (torch 2.13).
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from hvdtrain.adapters.pytorch.common import Wrapper
from hvdtrain.adapters.pytorch.ddp import weigh
from hvdtrain.adapters.pytorch.sharded import ShardedAdapter
from hvdtrain.collectives.base import Communicator
from hvdtrain.collectives.torch_distributed import Some
from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import bounds
from hvdtrain.system.runtime.waits import SUM

FORWARD = "the forward pass through the stages"
HEADER = 256  # bytes of the message that tells a layout


@dataclass(frozen=True)
class Layout:
    """What a tensor looks like that a stage hands over; all but the number of its samples."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    channels_last: bool

    @classmethod
    def of(cls, value: torch.Tensor) -> Layout:
        """Return that of ``value``."""
        last = value.ndim == 4 and value.is_contiguous(memory_format=torch.channels_last)
        return cls(tuple(value.shape[1:]), value.dtype, last and not value.is_contiguous())

    def empty(self, samples: int, device: torch.device) -> torch.Tensor:
        """Return memory for some samples."""
        whole = torch.empty(samples, *self.shape, dtype=self.dtype, device=device)
        return whole.to(memory_format=torch.channels_last) if self.channels_last else whole

    def message(self, value: torch.Tensor) -> torch.Tensor:
        """Return ``value`` as it is sent: itself, where it has this layout."""
        value = value.detach()
        return (value.permute(0, 2, 3, 1) if self.channels_last else value).contiguous()


class Pipeline(Wrapper):
    """A model of which this rank computes one stage, and holds nothing else.

    All ranks of a group of stages call it with the same batch, and all get the output of the last
    stage. When ``backward`` of their loss returns, the gradients are those of the global batch.

    Args:
        module: the model that was given.
        layers: of this stage.
        owners: the stage of each parameter and buffer, by name.
        adapter: of this rank.
        copy: the ranks that hold the model together, by stage.
        peers: the ranks of the same stage.
        micro_batches: into how many a batch is cut, if it has so many samples.

    Attributes:
        module: the model that was given; parameters of other stages have no elements.
        shapes: of all its parameters and buffers, by name.
        freed: ids of the parameters of other stages.
        most: micro-batches in a pass of the training, at most.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        layers: Sequence[torch.nn.Module],
        owners: dict[str, int],
        adapter: ShardedAdapter,
        *,
        copy: Some,
        peers: Communicator,
        micro_batches: int,
    ) -> None:
        super().__init__()
        self.module, self.adapter = module, adapter
        self._copy, self._peers, self._micro_batches = copy, peers, micro_batches
        self.stage, self.stages = adapter.world.stage, adapter.world.stages
        self.most = 0
        self.blocked_seconds = 0.0
        self.messages: dict[str, int] | None = None  # gradients are not all that is sent
        self._layers = tuple(layers)
        self._own = [name for name, owner in owners.items() if owner == self.stage]
        state = module.state_dict(keep_vars=True)
        self.shapes = {name: tuple(value.shape) for name, value in state.items()}
        self.freed = {id(value) for name, value in state.items() if owners[name] != self.stage}
        for value in state.values():
            if id(value) in self.freed:
                value.data = value.data.new_empty(0)
        self._trained = [
            value for name, value in state.items() if name in self._own and value.requires_grad
        ]
        self._layouts: dict[Any, Layout] = {}
        self._root = torch.zeros((), device=adapter.device, requires_grad=True)
        self._summing = True
        self._unsummed: list[torch.Tensor | None] = [None] * len(self._trained)
        self._stops: Any = 0.0  # how many ranks wanted to stop before the last update

    def own_state(self) -> dict[str, torch.Tensor]:
        """Return the parameters and buffers of this stage themselves, by name."""
        state = self.module.state_dict(keep_vars=True)
        return {name: state[name] for name in self._own}

    # Forward

    @override
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the last stage for the batch ``x``, on all ranks of the group."""
        number = max(1, min(self._micro_batches, len(x)))
        cuts = [slice(*bounds(len(x), place, number)) for place in range(number)]
        training = self.module.training
        with self.adapter.waits.during(FORWARD):
            if not len(x):  # BatchNorm would divide by nothing
                self.module.eval()
            passes = Passes(cuts, self._kind(x))
            inputs = self._expect("input", passes, self._rank(-1)) if self.stage else []
            for place, cut in enumerate(cuts):
                given, arrival = inputs[place] if inputs else (x[cut], None)
                self._forward(given, arrival, passes)
            self._wait([work for work, _ in passes.sent])
            passes.sent.clear()
            result = self._share(len(x), passes)
            self.module.train(training)
        if not torch.is_grad_enabled():
            return result
        self.most = max(self.most, number)
        return _Backward.apply(self._root, self, passes, result)

    def _kind(self, x: torch.Tensor) -> Any:
        """Return what the layouts depend on that stages hand over for ``x``."""
        device = x.device.type
        casts = torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
        return tuple(x.shape[1:]), x.dtype, casts, self.module.training

    def _forward(self, x: torch.Tensor, arrival: Any, passes: Passes) -> None:
        """Take one micro-batch through this stage, which waits for its ``arrival``."""
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
                "row per sample, so the model cannot be cut behind it"
            )
        passes.kept.append((x, output))
        if self.stage + 1 < self.stages:
            layout = self._told("output", passes, output, [self._rank(1)])
            passes.sent += self._send(layout.message(output), self._rank(1))

    def _share(self, samples: int, passes: Passes) -> torch.Tensor:
        """Return the output of the last stage, which sends it to the others."""
        last = self.stage + 1 == self.stages
        if last:
            whole = torch.cat([output.detach() for _, output in passes.kept])
            others = [rank for rank in self._copy.ranks if rank != self._rank(0)]
            layout = self._told("result", passes, whole, others)
            sent = layout.message(whole)
        else:
            layout = self._layout("result", passes, self._copy.ranks[-1])
            whole = layout.empty(samples, self.adapter.device)
            sent = layout.message(whole)
        if self.stages > 1 and sent.numel():
            with self.blocked():
                ranks, group = self._copy.ranks, self._copy.group
                dist.broadcast(sent, src=ranks[-1], group=group)
        return whole

    # Backward

    def backward(self, passes: Passes, gradient: torch.Tensor) -> None:
        """Take all micro-batches back through this stage, and sum over the ranks of its kind.

        Args:
            passes: of the forward pass.
            gradient: of the whole output; the last stage's counts.
        """
        with self.adapter.waits.during(SUM):
            weight = self.adapter.part_weight
            before = [one.grad for one in self._trained]
            for one in self._trained:
                one.grad = None
            self._backward(passes, gradient)
            self._add_up(weight)
            for one, old in zip(self._trained, before, strict=True):
                if old is not None:
                    one.grad = old if one.grad is None else old.add_(one.grad)

    def _backward(self, passes: Passes, gradient: torch.Tensor) -> None:
        """Take all micro-batches back; a gradient of what is no number is not sent."""
        sent: list[Any] = []
        outer: list[tuple[torch.Tensor, Any]] = []
        if self.stage + 1 < self.stages and passes.kept[0][1].is_floating_point():
            outer = self._expect("output", passes, self._rank(1))
        for place, (x, output) in enumerate(passes.kept):
            of_output, arrival = outer[place] if outer else (gradient[passes.cuts[place]], None)
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
        """Sum over the ranks of this stage what this pass, and those not summed, have added."""
        for one, held in zip(self._trained, self._unsummed, strict=True):
            if held is not None:
                one.grad = held if one.grad is None else held.add_(one.grad)
        if not self._summing:
            self._unsummed = [one.grad for one in self._trained]
            for one in self._trained:
                one.grad = None
            return
        self._unsummed = [None] * len(self._trained)
        self.adapter.note_pass()
        for kind in dict.fromkeys(one.dtype for one in self._trained):
            some = [one for one in self._trained if one.dtype == kind]
            if self.adapter.world.data_size > 1:
                self._sum(some, weight)

    def _sum(self, some: Sequence[torch.Tensor], weight: float) -> None:
        """Sum gradients of one type; what no rank has a gradient of has none."""
        there = torch.tensor([float(one.grad is not None) for one in some])
        flat = [torch.zeros_like(one) if one.grad is None else one.grad for one in some]
        whole = torch.cat([one.reshape(-1) for one in flat])
        weigh(whole, weight)
        message = torch.cat([whole, there.to(whole)])
        with self.blocked():
            self._peers.sum_tensor(message, "gradients")
        *sums, there = message.split([*(one.numel() for one in some), len(some)])
        for one, total, anyone in zip(some, sums, there.tolist(), strict=True):
            if anyone:
                gradient = torch.empty_like(one) if one.grad is None else one.grad
                one.grad = gradient.detach().copy_(total.view_as(one))

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale the gradients of all stages down to this L2 norm over them; return what it was.

        As ``torch.nn.utils.clip_grad_norm_``, which sees this rank's alone.
        """
        gradients = [one.grad for one in self._trained if one.grad is not None]
        squares = torch.zeros((), dtype=torch.float64, device=self._root.device)
        for one in gradients:
            squares += one.double().square().sum()
        norm = self.adapter.sum_shards(squares).sqrt()
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for one in gradients:
            one.mul_(scale)
        return norm

    # What the adapter asks for, as of other strategies

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let backward passes add up on each rank; see ``CommonAdapter``."""
        self._summing = False
        try:
            yield
        finally:
            self._summing = True

    def end_update(self) -> None:
        """Send the wish to stop; before an update, on all ranks."""
        wanted = float(self.adapter.stop_wanted)
        self._stops = torch.full((1,), wanted, device=self.adapter.device)
        with self.adapter.waits.during(SUM), self.blocked():
            dist.all_reduce(self._stops)

    @property
    def stop_agreed(self) -> bool:
        """Whether any rank wanted to stop before the last update."""
        return bool(self._stops > 0)

    # Messages

    def _rank(self, step: int) -> int:
        """Return the rank that has the stage so many steps behind this one."""
        return self._copy.ranks[self.stage + step]

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Count the seconds within as ones in which this rank waits for others."""
        started = time.perf_counter()
        yield
        self.blocked_seconds += time.perf_counter() - started

    def _send(self, message: torch.Tensor, to: int) -> list[Any]:
        """Begin to send; return what to wait for, with the message, to be kept until then."""
        return [(dist.isend(message, to), message)] if message.numel() else []

    def _expect(self, what: str, passes: Passes, source: int) -> list[tuple[torch.Tensor, Any]]:
        """Begin to receive all micro-batches from a rank; return each with what to wait for."""
        layout, found = self._layout(what, passes, source), []
        for cut in passes.cuts:
            whole = layout.empty(cut.stop - cut.start, self.adapter.device)
            message = layout.message(whole)
            found.append((whole, dist.irecv(message, source) if message.numel() else None))
        return found

    def _wait(self, works: Sequence[Any]) -> None:
        with self.blocked():
            for work in works:
                if work is not None:
                    work.wait()

    def _told(self, what: str, passes: Passes, value: torch.Tensor, to: Sequence[int]) -> Layout:
        """Return the layout of ``value``; the first of its kind is told to the ranks ``to``."""
        key = what, passes.kind
        if key not in self._layouts:
            self._layouts[key] = layout = Layout.of(value)
            kind = str(layout.dtype).removeprefix("torch.")
            told = json.dumps([layout.shape, kind, layout.channels_last]).encode().ljust(HEADER)
            for rank in to:
                dist.send(torch.frombuffer(bytearray(told), dtype=torch.uint8), rank)
        return self._layouts[key]

    def _layout(self, what: str, passes: Passes, source: int) -> Layout:
        """Return the layout of what comes from the rank ``source``, which tells it once."""
        key = what, passes.kind
        if key not in self._layouts:
            header = torch.empty(HEADER, dtype=torch.uint8)
            with self.blocked():
                dist.recv(header, source)
            shape, kind, last = json.loads(header.numpy().tobytes())
            self._layouts[key] = Layout(tuple(shape), getattr(torch, kind), last)
        return self._layouts[key]


class Passes:
    """The micro-batches of one batch in one stage: what their backward passes need.

    Attributes:
        cuts: where they are in the batch.
        kind: what the layouts depend on that stages hand over.
        kept: input and output of each.
        sent: what is being sent.
    """

    def __init__(self, cuts: Sequence[slice], kind: Any) -> None:
        self.cuts, self.kind = cuts, kind
        self.kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.sent: list[Any] = []


class _Backward(torch.autograd.Function):
    """The output of a pipeline, whose backward pass is that of this rank's stage.

    It waits for nobody else's loss: other ranks compute the same one.
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
