"""The eight steps for PyTorch over a pipeline: the layers of a model in stages, one per rank.

A batch is split into micro-batches, which pass the stages one after the other: all forward, then
all backward (Huang et al., "GPipe", NeurIPS 2019). If there are several groups of stages, each
holds the whole model and processes a share of the data; ranks of equal stage sum their gradients.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.numpy
import torch
from typing_extensions import override

from hvdtrain.adapters.partition import balanced_cuts
from hvdtrain.adapters.pytorch.adapter import TorchView, tensor_of
from hvdtrain.adapters.pytorch.pipeline_schedule import Pipeline
from hvdtrain.adapters.pytorch.sharded import Piece, ShardedAdapter, ShardedView, broadcast
from hvdtrain.adapters.state_view import Take, compare, digests_of
from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.collectives.torch_distributed import Subgroup, TorchDistributed
from hvdtrain.config.comm_options import check_stages
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import Arrays, Checkpoint
from hvdtrain.steps.summary import Bubble, StepSplit
from hvdtrain.steps.world import World
from hvdtrain.system.output.text import plural
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.system.runtime.waits import SUM

LAST_MAP = 7 * 7  # positions in the last map of a network for images of ImageNet's size
FEW = 4  # default number of micro-batches per stage: the bubble is a fifth at most (GPipe)


class PipelineAdapter(ShardedAdapter):
    """Each rank holds one stage of the model, with its gradients and optimizer state."""

    name = "pipeline"
    evaluates_together = True
    communicator: TorchDistributed
    stage_group: Subgroup  # the ranks that together hold one model, by stage
    peers: Communicator  # the ranks of the same stage

    @override
    def initialize(self, *, short_steps: bool = False) -> World:
        world = super().initialize(short_steps=short_steps)
        try:
            check_stages(self.comm_options, world.size)
        except UsageError as error:
            raise agreed(error) from None  # raised alike on every rank
        stages = self.comm_options.stages or world.size
        self.world = replace(world, stages=stages)
        all_ranks = range(world.size)
        self.stage_group = self.communicator.split(
            [all_ranks[first : first + stages] for first in all_ranks[::stages]]
        )
        several = self.world.data_size > 1
        same = [all_ranks[stage::stages] for stage in range(stages)]
        self.peers = self.communicator.split(same) if several else SingleRank()
        return self.world

    @property
    def micro_batches(self) -> int:
        """Number of micro-batches per batch, at most one per sample."""
        return self.comm_options.micro_batches or FEW * self.world.stages

    @property
    @override
    def data_communicator(self) -> Communicator:
        return self.peers

    # Not supported

    @override
    def check_precision(self, precision: str) -> None:
        if precision == "fp16":
            reason = "a stage cannot detect overflows in another; use --precision bf16"
            raise agreed(UsageError(f"--precision fp16 is not for --strategy pipeline: {reason}"))

    @override
    def synchronize_batchnorm(self, task: Any) -> None:
        reason = "BatchNorm sees one micro-batch at a time; omit it, or use ddp"
        raise agreed(UsageError(f"--sync-batchnorm is not for --strategy pipeline: {reason}"))

    @override
    def compile(self, task: Any) -> None:
        # It would compile the whole model, which no rank computes.
        raise UsageError("--compile is not for --strategy pipeline; use ddp")

    # The steps

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        try:
            self.check_optimizer(model, optimizer, "keeps only the parameters of this rank's stage")
            layers = layers_of(model)
            check_number(layers, self.world.stages)
            cuts = balanced_cuts(costs_of(layers), self.world.stages)
            stages = [[layers[index] for index in stage] for stage in cuts]
            owners = owners_of(model, stages)
        except UsageError as error:
            raise agreed(error) from None  # raised alike on every rank
        for value in TorchView(self, model).tensors().values():  # afterwards no rank has them all
            broadcast(value)
        pipeline = Pipeline(
            model,
            stages[self.world.stage],
            owners,
            self,
            stage_group=self.stage_group,
            peers=self.peers,
            micro_batches=self.micro_batches,
        )
        self.register(pipeline, optimizer, pipeline, StageView)
        return pipeline, optimizer

    @override
    def sum_shards(self, values: Any) -> Any:
        if sums := self.gradient_sums:
            # The first stage to finish waits here for the backward passes of the others.
            with self.waits.during(SUM), sums[-1].blocked():
                self.stage_group.sum_tensor(values, "")
        return values

    @override
    def bubble(self, split: StepSplit | None) -> Bubble | None:
        number = max((pipeline.most for pipeline in self.gradient_sums), default=0)
        if not number or self.world.stages == 1:
            return None
        parts = [split.data, split.compute, split.communication, split.waiting] if split else []
        known = [part for part in parts if part is not None]
        measured = sum(known[2:]) / sum(known) if len(known) == 4 else None
        stages = self.world.stages
        return Bubble(stages, number, (stages - 1) / (number + stages - 1), measured)


class StageView(ShardedView):
    """The parameters and buffers of this rank's stage, and their optimizer state."""

    adapter: PipelineAdapter
    model: Pipeline

    @property
    @override
    def writers(self) -> int:
        return self.world.stages

    @override
    def compare(self, digests: Mapping[str, bytes], reason: str, *, when: str = "") -> str:
        adapter, when = self.adapter, f"{when}in stage {self.world.stage} "
        same = range(self.world.stage, self.world.size, self.world.stages)
        digest = adapter.communicator.together(
            lambda: compare(adapter.peers, digests, reason, when=when, ranks=same), alike=True
        )
        stages = adapter.stage_group.gather(digest.encode())
        return hashlib.sha256(b"".join(stages)).hexdigest()

    @override
    def broadcast(self, optimizer: Any) -> str:
        # Step 5 has sent rank 0's state, and each rank has read its part of a checkpoint.
        remedy = "right after the broadcast: please report it"
        return self.compare(digests_of(super().export(optimizer)), remedy)

    @override
    def replicated(self, optimizer: Any, take: Take | None = None) -> Checkpoint:
        if self.world.data_size == 1:
            return Checkpoint({}, {})  # no state is replicated
        return self._trained(super().export(optimizer, take))

    @override
    def tensors(self) -> dict[str, torch.Tensor]:
        return self.model.stage_state()

    @override
    def export(self, optimizer: Any, take: Take | None = None) -> Checkpoint:
        state = super().export(optimizer, take)
        whole: list[Arrays] = []
        for tensors in (state.model, state.training):
            arrays = {name: np.array(value) for name, value in tensors.items()}
            merged: Arrays = {}
            for data in self.adapter.stage_group.gather(safetensors.numpy.save(arrays)):
                merged |= safetensors.numpy.load(data)
            whole.append(merged)
        return Checkpoint({name: whole[0][name] for name in self.model.shapes}, whole[1])

    @override
    def check_model(self, tensors: Mapping[str, Any], state: Checkpoint) -> None:
        shapes = self.model.shapes.items()
        super().check_model({name: SimpleNamespace(shape=shape) for name, shape in shapes}, state)

    @override
    def optimizer_state(self, index: int, parameter: Any, saved: Any) -> torch.Tensor | None:
        return None if id(parameter) in self.model.freed else tensor_of(saved)

    @override
    def pieces(self, optimizer: Any) -> Iterator[Piece]:
        return iter(()) if self.world.data_rank else self.local_pieces(self.tensors(), optimizer)

    @override
    def local_buffers(self) -> Arrays:
        return self._of_stage(super().local_buffers())

    @override
    def set_local_buffers(self, arrays: Arrays) -> None:
        super().set_local_buffers(self._of_stage(arrays))  # a checkpoint has those of all stages

    def _of_stage(self, arrays: Arrays) -> Arrays:
        names = self.tensors()
        return {name: value for name, value in arrays.items() if name in names}


def layers_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the layers of ``model`` in order: the input of each is the output of the previous.

    For a ``Sequential`` its layers, and those of each ``Sequential`` in it; any other model must
    have a method ``pipeline_layers`` that returns them.
    """
    if type(model) is torch.nn.Sequential:
        layers: list[torch.nn.Module] = []
        for child in model:
            layers += layers_of(child) if type(child) is torch.nn.Sequential else [child]
        return layers
    custom: Any = model
    if hasattr(model, "pipeline_layers"):
        return list(custom.pipeline_layers())
    raise UsageError(
        f"--strategy pipeline cuts a model between its layers, those of {type(model).__name__} are "
        "unknown: use a torch.nn.Sequential, or add a method pipeline_layers() that returns the "
        "layers in order, each of which takes the output of the previous"
    )


def costs_of(layers: Sequence[torch.nn.Module]) -> list[int]:
    """Return the approximate cost of each layer: multiplications per sample, by its weights.

    A weight of a convolution is used at each position of its map, any other one once. Maps shrink
    by the strides of the layers (of each, the largest: parallel branches of a block have the same);
    the size of the input is unknown, so the last map is assumed to have ``LAST_MAP`` positions.
    """
    strides = [max((_stride(child) for child in layer.modules()), default=1) for layer in layers]
    positions, costs = LAST_MAP * math.prod(strides), []
    for layer, stride in zip(layers, strides, strict=True):
        positions //= stride
        weights = [value for value in layer.parameters() if value.ndim > 1]
        costs.append(sum(w.numel() * (positions if w.ndim > 2 else 1) for w in weights))
    return costs


def _stride(module: torch.nn.Module) -> int:
    """Return the number of positions merged into one; 1 for other than convolution and pooling."""
    stride, kind = getattr(module, "stride", 1), type(module).__name__
    if isinstance(stride, int):
        return stride ** int(kind[-2]) if kind[-2:] in ("1d", "2d", "3d") else 1
    return math.prod(stride)


def owners_of(
    model: torch.nn.Module, stages: Sequence[Sequence[torch.nn.Module]]
) -> dict[str, int]:
    """Return the stage of each parameter and buffer of ``model``, by name; none may be in two.

    Those that belong to no layer are assigned to the first stage.
    """
    owners: dict[int, int] = {}
    state = model.state_dict(keep_vars=True)
    for stage, layers in enumerate(stages):
        for layer in layers:
            for value in (*layer.parameters(), *layer.buffers()):
                if owners.setdefault(id(value), stage) != stage:
                    name = next((key for key, held in state.items() if held is value), "a buffer")
                    raise UsageError(
                        f"--strategy pipeline: {name} is in stage {owners[id(value)]} and in stage "
                        f"{stage}, and cannot be in both: use fewer --stages"
                    )
    return {name: owners.get(id(value), 0) for name, value in state.items()}


def check_number(layers: Sequence[torch.nn.Module], stages: int) -> None:
    """Raise ``UsageError`` if there are fewer layers than stages."""
    if len(layers) < stages:
        raise UsageError(
            f"--stages {stages}: the model has only {plural(len(layers), 'layer')} in sequence: "
            f"use at most --stages {len(layers)}"
        )
