"""The eight steps for PyTorch over a pipeline: the layers of a model in stages, one per rank.

A batch is cut into micro-batches, which go through the stages one behind the other: all forward,
then all backward (Huang et al., "GPipe", NeurIPS 2019). Of several groups of stages each holds the
whole model, and one share of the data; ranks of the same stage sum their gradients.

torch.distributed.pipelining is not what does it. Its schedules compute the loss themselves, where
here the task (or a user's own loop) does; a stage receives each micro-batch in a buffer of the
first one's shape, so it fails where a batch is not a multiple of their number, as at the tail of
an epoch; and it finds these shapes out by one more forward pass, after which BatchNorm has seen a
micro-batch twice, and behind the first stage memory that nobody has filled (torch 2.13).
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import torch.distributed as dist
from typing_extensions import override

from hvdtrain.adapters.common import in_a_row
from hvdtrain.adapters.pytorch.common import (
    Wrapper,
    array_of,
    load_optimizer,
    optimizer_tensors,
    tensor_of,
)
from hvdtrain.adapters.pytorch.ddp import weigh
from hvdtrain.adapters.pytorch.sharded import Piece, ShardedAdapter, own_piece
from hvdtrain.adapters.pytorch.stages import check_number, costs_of, layers_of, owners_of
from hvdtrain.adapters.replicas import compare
from hvdtrain.adapters.state import check_names
from hvdtrain.collectives.base import Alone, Communicator
from hvdtrain.collectives.torch_distributed import Some, TorchDistributed
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import MODEL_FILE, TRAINING_FILE, Arrays, Checkpoint
from hvdtrain.steps.sharding import bounds
from hvdtrain.steps.summary import Bubble, StepSplit
from hvdtrain.steps.world import World
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.system.runtime.waits import SUM

FORWARD = "the forward pass through the stages"
FEW = 4  # micro-batches per stage, unless told otherwise: the bubble is a fifth at most (GPipe)
HEADER = 256  # bytes


class PipelineAdapter(ShardedAdapter):
    """Each rank holds one stage of the model, with its gradients and optimizer state."""

    name = "pipeline"
    evaluates_together = True
    communicator: TorchDistributed
    copy: Some  # the ranks that hold one model together, by stage
    peers: Communicator  # the ranks of the same stage

    @override
    def initialize(self, *, short_steps: bool = False) -> World:
        world = super().initialize(short_steps=short_steps)
        stages = self.levers.stages or world.size
        if world.size % stages:
            raise agreed(
                UsageError(
                    f"--stages {stages}: {plural(world.size, 'rank')} cannot be put together in "
                    f"groups of {stages}: start a multiple of {stages}"
                )
            )
        self.world = replace(world, stages=stages)
        everyone = range(world.size)
        self.copy = self.communicator.split(
            [everyone[first : first + stages] for first in everyone[::stages]]
        )
        several = self.world.data_size > 1
        same = [everyone[stage::stages] for stage in range(stages)]
        self.peers = self.communicator.split(same) if several else Alone()
        return self.world

    @property
    def micro_batches(self) -> int:
        """Into how many a batch is cut, if it has so many samples."""
        return self.levers.micro_batches or FEW * self.world.stages

    @property
    @override
    def data_communicator(self) -> Communicator:
        return self.peers

    @property
    @override
    def writers(self) -> int:
        return self.world.stages

    # What cannot be had

    @override
    def check_precision(self, precision: str) -> None:
        if precision == "fp16":
            said = "a stage does not know of what overflows in another; give --precision bf16"
            raise agreed(UsageError(f"--precision fp16 is not for --strategy pipeline: {said}"))

    @override
    def synchronize_batchnorm(self, task: Any) -> None:
        said = "BatchNorm sees one micro-batch at a time; leave it out, or use ddp"
        raise agreed(UsageError(f"--sync-batchnorm is not for --strategy pipeline: {said}"))

    @override
    def compile(self, task: Any) -> None:
        # It would compile the whole model, of which no rank computes all.
        raise UsageError("--compile is not for --strategy pipeline; use ddp")

    # The steps

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        known = {id(one) for one in model.parameters()}
        given = [one for group in optimizer.param_groups for one in group["params"]]
        try:
            if optimizer.state or any(id(one) not in known for one in given):
                raise UsageError(
                    "distribute_optimizer: --strategy pipeline keeps of the parameters those of "
                    "this rank's stage, so give it an optimizer of this model's parameters that "
                    "has no state yet; resume loads one"
                )
            layers = layers_of(model)
            check_number(layers, self.world.stages)
            places = in_a_row(costs_of(layers), self.world.stages)
            stages = [[layers[place] for place in stage] for stage in places]
            owners = owners_of(model, stages)
        except UsageError as error:
            raise agreed(error) from None  # every rank sees the same
        for value in self.named_state(model).values():  # later no rank has them all
            sent = value.detach().contiguous()
            dist.broadcast(sent, src=0)
            value.data.copy_(sent)
        pipeline = Pipeline(model, stages[self.world.stage], owners, self)
        self._replicas.append(pipeline)
        optimizer.register_step_pre_hook(lambda *_: self._check_pass())
        optimizer.register_step_pre_hook(lambda *_: pipeline.end_update())
        return pipeline, optimizer

    @override
    def sum_shards(self, values: Any) -> Any:
        if self._replicas:
            # The stage that is done first waits here for the others' backward passes.
            with self.waits.during(SUM), self._replicas[0].blocked():
                self.copy.sum_tensor(values, "")
        return values

    @override
    def bubble(self, split: StepSplit | None) -> Bubble | None:
        number = max((one.most for one in self._replicas), default=0)
        if not number or self.world.stages == 1:
            return None
        parts = [split.data, split.compute, split.communication, split.waiting] if split else []
        known = [part for part in parts if part is not None]
        measured = sum(known[2:]) / sum(known) if len(known) == 4 else None
        stages = self.world.stages
        return Bubble(stages, number, (stages - 1) / (number + stages - 1), measured)

    # The state: that of this rank's stage

    @override
    def is_sharded(self, model: Any, optimizer: Any) -> bool:
        return isinstance(model, Pipeline)

    @override
    def compare(self, model: Any, state: Checkpoint, why: str, *, when: str = "") -> str:
        if not isinstance(model, Pipeline):
            return super().compare(model, state, why, when=when)
        when = f"{when}in stage {self.world.stage} "
        same = range(self.world.stage, self.world.size, self.world.stages)
        digest = self.communicator.together(
            lambda: compare(self.peers, state, why, when=when, ranks=same), alike=True
        )
        stages = self.copy.gather(digest.encode())
        return hashlib.sha256(b"".join(stages)).hexdigest()

    @override
    def send_state(self, model: Any, optimizer: Any) -> str:
        if not isinstance(model, Pipeline):
            return super().send_state(model, optimizer)
        # Step 5 has sent what rank 0 had, and each rank has read its part of a checkpoint.
        said = "report it: this is right after the broadcast"
        return self.compare(model, self._own_state(model, optimizer), said)

    @override
    def replicated(self, model: Any, optimizer: Any) -> Checkpoint:
        if not isinstance(model, Pipeline):
            return super().replicated(model, optimizer)
        if self.world.data_size == 1:
            return Checkpoint({}, {})  # nothing is there twice
        state, trained = self._own_state(model, optimizer), self.trained_names(model)
        own = {name: value for name, value in state.model.items() if name in trained}
        return replace(state, model=own)

    def _own_state(self, model: Pipeline, optimizer: Any) -> Checkpoint:
        tensors = {} if optimizer is None else optimizer_tensors(optimizer)
        return Checkpoint(
            {name: array_of(value) for name, value in model.own_state().items()},
            {name: array_of(value) for name, value in tensors.items()},
        )

    @override
    def export_state(self, model: Any, optimizer: Any) -> Checkpoint:
        """Return the whole state on every rank; to look at a small one, not to save it."""
        if not isinstance(model, Pipeline):
            return super().export_state(model, optimizer)
        own = self._own_state(model, optimizer)
        whole: list[Arrays] = []
        for tensors in (own.model, own.training):
            arrays = {name: np.array(value) for name, value in tensors.items()}
            found: Arrays = {}
            for one in self.copy.gather(safetensors.numpy.save(arrays)):
                found |= safetensors.numpy.load(one)
            whole.append(found)
        return Checkpoint({name: whole[0][name] for name in model.shapes}, whole[1])

    @override
    def import_state(self, model: Any, optimizer: Any, state: Checkpoint) -> None:
        if not isinstance(model, Pipeline):
            super().import_state(model, optimizer, state)
            return
        trouble = f"{state.path or 'the state of rank 0'} is not of this model"
        shapes = {name: SimpleNamespace(shape=shape) for name, shape in model.shapes.items()}
        check_names(shapes, state.model, trouble)
        with torch.no_grad():
            for name, value in model.own_state().items():
                value.copy_(tensor_of(state.model[name]))
        if optimizer is not None:
            load_optimizer(
                optimizer,
                state,
                lambda place, like, value: None if id(like) in model.freed else tensor_of(value),
            )

    @override
    def pieces(self, model: Any, optimizer: Any) -> Iterator[Piece]:
        if self.world.data_rank:
            return
        rank, trained = self.world.rank, self.trained_names(model)
        for name, value in model.own_state().items():
            yield replace(own_piece(MODEL_FILE, name, value, rank), infinite=name not in trained)
        for name, value in optimizer_tensors(optimizer).items():  # of what this rank updates
            yield own_piece(TRAINING_FILE, name, value, rank)

    @override
    def local_buffers(self, model: Any) -> Arrays:
        found = super().local_buffers(model)
        if not isinstance(model, Pipeline):
            return found
        return {name: value for name, value in found.items() if name in model.own_state()}

    @override
    def set_local_buffers(self, model: Any, arrays: Arrays) -> None:
        if isinstance(model, Pipeline):  # those of a checkpoint are of all stages
            arrays = {name: value for name, value in arrays.items() if name in model.own_state()}
        super().set_local_buffers(model, arrays)


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
        adapter: PipelineAdapter,
    ) -> None:
        super().__init__()
        self.module, self.adapter = module, adapter
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
        number = max(1, min(self.adapter.micro_batches, len(x)))
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
            others = [rank for rank in self.adapter.copy.ranks if rank != self._rank(0)]
            layout = self._told("result", passes, whole, others)
            sent = layout.message(whole)
        else:
            layout = self._layout("result", passes, self.adapter.copy.ranks[-1])
            whole = layout.empty(samples, self.adapter.device)
            sent = layout.message(whole)
        if self.stages > 1 and sent.numel():
            with self.blocked():
                ranks, group = self.adapter.copy.ranks, self.adapter.copy.group
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
            self.adapter.peers.sum_tensor(message, "gradients")
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
        return self.adapter.copy.ranks[self.stage + step]

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
