"""The strategy of DDP with sharded optimizer state for PyTorch: ZeRO, stage 1.

Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.
Each rank updates its share of the parameters (whole tensors, of balanced total size) and sends them
to the others, so it has optimizer state only for these. The user's optimizer, of any class, is
kept; torch's ZeroRedundancyOptimizer would have to replace it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from hvdtrain.adapters.framework import Rank
from hvdtrain.adapters.partition import balanced_owners, buckets
from hvdtrain.adapters.pytorch.ddp import Ddp, WeightedDdp
from hvdtrain.adapters.pytorch.elementwise import PARAMETERS
from hvdtrain.adapters.pytorch.framework import TorchView, parameters_of, tensor_of
from hvdtrain.adapters.pytorch.sums import once_per_step
from hvdtrain.adapters.state_view import StateView
from hvdtrain.errors import UsageError
from hvdtrain.steps.checkpoint_files import MODEL_FILE, Piece
from hvdtrain.system.runtime.waits import SUM


class Zero(Ddp):
    """Each rank holds the whole model, and the optimizer state of its share of parameters."""

    name = "zero"
    shards_state = True
    updates = PARAMETERS

    def __init__(self, adapter: Rank) -> None:
        super().__init__(adapter)
        self._shares: weakref.WeakKeyDictionary[Any, Share] = weakref.WeakKeyDictionary()

    @override
    def distribute(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        state = self.state_of_root(optimizer)  # e.g. that of Adagrad, which begins with one
        model, optimizer = super().distribute(model, optimizer)
        share = self._shares[optimizer] = Share(optimizer, self.adapter, model)
        ShareView(self.adapter, model, share).restore_optimizer(optimizer, state)
        return model, optimizer

    @override
    def view(self, model: Any, optimizer: Any = None) -> StateView:
        share = self._shares.get(optimizer) if optimizer is not None else None
        return ShareView(self.adapter, model, share) if share else super().view(model)

    @override
    def share_weights(self) -> None:
        for share in self._shares.values():
            share.send()


class ShareView(TorchView):
    """The whole model, and the optimizer state of this rank's share."""

    sharded = True

    def __init__(self, adapter: Rank, model: Any, share: Share) -> None:
        super().__init__(adapter, model)
        self.share = share

    @override
    def broadcast(self, optimizer: Any) -> str:
        return super().broadcast(None)

    @override
    def optimizer_state(self, index: int, parameter: Any, saved: Any) -> torch.Tensor | None:
        return tensor_of(saved) if index in self.share.mine else None

    @override
    def pieces(self, optimizer: Any) -> Iterator[Piece]:
        owners = dict(zip(map(id, self.share.parameters), self.share.owners, strict=True))
        model = self.tensors()[MODEL_FILE]
        for piece in super().pieces(optimizer):
            if piece.kind == MODEL_FILE:
                yield replace(piece, owner=owners.get(id(model[piece.name]), 0))
            else:
                yield replace(piece, owner=self.adapter.world.rank, replicated=False)


class Share:
    """A rank's share of an optimizer's step: update its parameters, and send them.

    The gradients of all other parameters are hidden, so the optimizer creates no state for them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, adapter: Rank, ddp: WeightedDdp) -> None:
        self.ddp, rank = ddp, adapter.world.rank
        self.parameters = parameters_of(optimizer)
        sizes = [parameter.numel() * parameter.element_size() for parameter in self.parameters]
        self.owners = balanced_owners(sizes, adapter.world.size)
        self.mine = frozenset(index for index, owner in enumerate(self.owners) if owner == rank)
        by_owner = sorted(range(len(sizes)), key=lambda index: self.owners[index])
        kinds = [
            ((self.owners[index], self.parameters[index].dtype), sizes[index]) for index in by_owner
        ]
        self._buckets = [[by_owner[index] for index in bucket] for bucket in buckets(kinds)]
        self._hidden: list[torch.Tensor | None] = []
        optimizer.register_step_pre_hook(once_per_step(self._hide))
        optimizer.register_step_post_hook(once_per_step(lambda *_: self._end()))

    def _hide(self, optimizer: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> None:
        if any(arguments[1:]) or named.get("closure"):
            raise UsageError("--strategy zero takes no closure: call backward() before step()")
        if sum(len(group["params"]) for group in optimizer.param_groups) > len(self.parameters):
            raise UsageError(
                "--strategy zero shards the state of the parameters that are trained in step 5: "
                "after adding some, call distribute_optimizer again, with a new optimizer"
            )
        self._hidden = [parameter.grad for parameter in self.parameters]
        for index, parameter in enumerate(self.parameters):
            if index not in self.mine:
                parameter.grad = None

    def _end(self) -> None:
        for parameter, gradient in zip(self.parameters, self._hidden, strict=True):
            parameter.grad = gradient
        self._hidden = []
        self.send()

    @torch.no_grad()
    def send(self) -> None:
        """Send each bucket from its owner to the others, overlapping it with the previous one."""
        before: tuple[Sequence[torch.Tensor], torch.Tensor, Any] | None = None
        with self.ddp.blocked(SUM):
            for bucket in self._buckets:
                parameters = [self.parameters[index] for index in bucket]
                message = torch.cat([parameter.flatten() for parameter in parameters])
                work = dist.broadcast(message, src=self.owners[bucket[0]], async_op=True)
                if before:
                    _receive(*before)
                before = parameters, message, work
            if before:
                _receive(*before)


def _receive(parameters: Sequence[torch.Tensor], message: torch.Tensor, work: Any) -> None:
    work.wait()
    parts = message.split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))
