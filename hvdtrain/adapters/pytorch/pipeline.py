"""The eight steps for PyTorch over a pipeline: the layers of a model in stages, one per rank.

A batch is split into micro-batches, which pass the stages one after the other: all forward, then
all backward (Huang et al., "GPipe", NeurIPS 2019). If there are several groups of stages, each
holds the whole model and processes a share of the data; ranks of equal stage sum their gradients.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import safetensors.numpy
import torch
import torch.distributed as dist
from typing_extensions import override

from hvdtrain.adapters.partition import balanced_cuts
from hvdtrain.adapters.pytorch.common import (
    array_of,
    load_optimizer,
    optimizer_tensors,
    tensor_of,
)
from hvdtrain.adapters.pytorch.micro_batches import Pipeline
from hvdtrain.adapters.pytorch.sharded import Piece, ShardedAdapter, local_piece
from hvdtrain.adapters.pytorch.stages import check_number, costs_of, layers_of, owners_of
from hvdtrain.adapters.replicas import compare
from hvdtrain.adapters.state import check_names
from hvdtrain.collectives.base import Communicator, SingleRank
from hvdtrain.collectives.torch_distributed import Subgroup, TorchDistributed
from hvdtrain.config.comm_options import check_stages
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import MODEL_FILE, TRAINING_FILE, Arrays, Checkpoint
from hvdtrain.steps.summary import Bubble, StepSplit
from hvdtrain.steps.world import World
from hvdtrain.system.runtime.exit import agreed
from hvdtrain.system.runtime.waits import SUM

FEW = 4  # default number of micro-batches per stage: the bubble is a fifth at most (GPipe)


class PipelineAdapter(ShardedAdapter):
    """Each rank holds one stage of the model, with its gradients and optimizer state."""

    name = "pipeline"
    evaluates_together = True
    communicator: TorchDistributed
    copy: Subgroup  # the ranks that together hold one model, by stage
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
        self.copy = self.communicator.split(
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

    @property
    @override
    def writers(self) -> int:
        return self.world.stages

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
        known = {id(value) for value in model.parameters()}
        optimized = [value for group in optimizer.param_groups for value in group["params"]]
        try:
            if optimizer.state or any(id(value) not in known for value in optimized):
                raise UsageError(
                    "distribute_optimizer: --strategy pipeline keeps only the parameters of this "
                    "rank's stage: use an optimizer of this model's parameters without state; "
                    "resume loads one"
                )
            layers = layers_of(model)
            check_number(layers, self.world.stages)
            cuts = balanced_cuts(costs_of(layers), self.world.stages)
            stages = [[layers[index] for index in stage] for stage in cuts]
            owners = owners_of(model, stages)
        except UsageError as error:
            raise agreed(error) from None  # raised alike on every rank
        for value in self.named_state(model).values():  # afterwards no rank has them all
            sent = value.detach().contiguous()
            dist.broadcast(sent, src=0)
            value.data.copy_(sent)
        pipeline = Pipeline(
            model,
            stages[self.world.stage],
            owners,
            self,
            copy=self.copy,
            peers=self.peers,
            micro_batches=self.micro_batches,
        )
        self._replicas.append(pipeline)
        optimizer.register_step_pre_hook(lambda *_: self._check_pass())
        optimizer.register_step_pre_hook(lambda *_: pipeline.end_update())
        return pipeline, optimizer

    @override
    def sum_shards(self, values: Any) -> Any:
        if self._replicas:
            # The first stage to finish waits here for the backward passes of the others.
            with self.waits.during(SUM), self._replicas[0].blocked():
                self.copy.sum_tensor(values, "")
        return values

    @override
    def bubble(self, split: StepSplit | None) -> Bubble | None:
        number = max((pipeline.most for pipeline in self._replicas), default=0)
        if not number or self.world.stages == 1:
            return None
        parts = [split.data, split.compute, split.communication, split.waiting] if split else []
        known = [part for part in parts if part is not None]
        measured = sum(known[2:]) / sum(known) if len(known) == 4 else None
        stages = self.world.stages
        return Bubble(stages, number, (stages - 1) / (number + stages - 1), measured)

    # The state of this rank's stage

    @override
    def is_sharded(self, model: Any, optimizer: Any) -> bool:
        return isinstance(model, Pipeline)

    @override
    def compare(self, model: Any, state: Checkpoint, reason: str, *, when: str = "") -> str:
        if not isinstance(model, Pipeline):
            return super().compare(model, state, reason, when=when)
        when = f"{when}in stage {self.world.stage} "
        same = range(self.world.stage, self.world.size, self.world.stages)
        digest = self.communicator.together(
            lambda: compare(self.peers, state, reason, when=when, ranks=same), alike=True
        )
        stages = self.copy.gather(digest.encode())
        return hashlib.sha256(b"".join(stages)).hexdigest()

    @override
    def send_state(self, model: Any, optimizer: Any) -> str:
        if not isinstance(model, Pipeline):
            return super().send_state(model, optimizer)
        # Step 5 has sent rank 0's state, and each rank has read its part of a checkpoint.
        remedy = "right after the broadcast: please report it"
        return self.compare(model, self._stage_state(model, optimizer), remedy)

    @override
    def replicated(self, model: Any, optimizer: Any) -> Checkpoint:
        if not isinstance(model, Pipeline):
            return super().replicated(model, optimizer)
        if self.world.data_size == 1:
            return Checkpoint({}, {})  # no state is replicated
        state, trained = self._stage_state(model, optimizer), self.trained_names(model)
        trained_state = {name: value for name, value in state.model.items() if name in trained}
        return replace(state, model=trained_state)

    def _stage_state(self, model: Pipeline, optimizer: Any) -> Checkpoint:
        tensors = {} if optimizer is None else optimizer_tensors(optimizer)
        return Checkpoint(
            {name: array_of(value) for name, value in model.stage_state().items()},
            {name: array_of(value) for name, value in tensors.items()},
        )

    @override
    def export_state(self, model: Any, optimizer: Any) -> Checkpoint:
        """Return the whole state on every rank: to inspect a small one, not to save it."""
        if not isinstance(model, Pipeline):
            return super().export_state(model, optimizer)
        state = self._stage_state(model, optimizer)
        whole: list[Arrays] = []
        for tensors in (state.model, state.training):
            arrays = {name: np.array(value) for name, value in tensors.items()}
            merged: Arrays = {}
            for data in self.copy.gather(safetensors.numpy.save(arrays)):
                merged |= safetensors.numpy.load(data)
            whole.append(merged)
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
            for name, value in model.stage_state().items():
                value.copy_(tensor_of(state.model[name]))
        if optimizer is not None:
            load_optimizer(
                optimizer,
                state,
                lambda index, like, value: None if id(like) in model.freed else tensor_of(value),
            )

    @override
    def pieces(self, model: Any, optimizer: Any) -> Iterator[Piece]:
        if self.world.data_rank:
            return
        rank, trained = self.world.rank, self.trained_names(model)
        for name, value in model.stage_state().items():
            yield replace(local_piece(MODEL_FILE, name, value, rank), infinite=name not in trained)
        for name, value in optimizer_tensors(optimizer).items():  # of this rank's parameters
            yield local_piece(TRAINING_FILE, name, value, rank)

    @override
    def local_buffers(self, model: Any) -> Arrays:
        arrays = super().local_buffers(model)
        if not isinstance(model, Pipeline):
            return arrays
        return {name: value for name, value in arrays.items() if name in model.stage_state()}

    @override
    def set_local_buffers(self, model: Any, arrays: Arrays) -> None:
        if isinstance(model, Pipeline):  # a checkpoint contains those of all stages
            arrays = {name: value for name, value in arrays.items() if name in model.stage_state()}
        super().set_local_buffers(model, arrays)
