"""Adapters that sum the gradients over the ranks in buckets: Horovod's and mpi4py's."""

from __future__ import annotations

import functools
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from typing_extensions import override

from hvdtrain.adapters.common_adapter import Flags, RankHooks
from hvdtrain.adapters.pytorch.adapter import PyTorchAdapter
from hvdtrain.adapters.pytorch.buckets import Buckets
from hvdtrain.adapters.pytorch.sums import TYPES, Compressed, Sums, agreed
from hvdtrain.steps.sharding import Part, Shards


class BucketedAdapter(PyTorchAdapter):
    """Each rank holds the whole model; gradients are summed in buckets during backward."""

    def __init__(self) -> None:
        super().__init__()
        self._distributions = 0
        self._all_buckets: list[Buckets] = []  # of each optimizer
        self._sent: torch.Tensor | None = None  # sums of all ranks' flags at the last update

    @abstractmethod
    def open_sums(self) -> Sums:
        """Return the sums for the buckets of another optimizer; all ranks call it together."""

    @override
    def distribute(self, model: Any, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
        name = f"gradients.{self._distributions}" if self._distributions else "gradients"
        self._distributions += 1
        sums, kind = self.open_sums(), TYPES.get(self.comm_options.compression)
        sums = Compressed(sums, kind) if kind else sums
        hooks = RankHooks(
            weight=lambda: self.part_weight,
            flags=lambda: self.flags,
            summed=self._note_flags,
            waits=self.waits.during,
            part=lambda: self.parts_begun,
        )
        others_of = functools.partial(self._others_of, weakref.ref(model))
        buckets = Buckets(name, optimizer, sums, hooks, others_of)
        self._all_buckets.append(buckets)
        return model, optimizer

    @override
    @contextmanager
    def no_sync(self) -> Iterator[None]:
        try:
            for buckets in self.gradient_sums:
                buckets.summing = False
            yield
        finally:
            for buckets in self.gradient_sums:
                buckets.summing = True

    def _others_of(self, model: weakref.ref[Any], buckets: Buckets) -> list[torch.nn.Parameter]:
        """Detach what ``buckets`` sums from others; return the parameters that none sums."""
        taken = {id(value) for value in buckets.parameters}
        sums = [known for known in self.gradient_sums if known is buckets or known.detach(taken)]
        self._all_buckets = sums
        left = [known for known in sums if known is not buckets]
        summed = {id(value) for known in left for value in (*known.parameters, *known.others)}
        parameters = () if (module := model()) is None else module.parameters()
        return [value for value in parameters if id(value) not in taken | summed]

    @property
    @override
    def gradient_sums(self) -> list[Buckets]:
        # Of the optimizers that still exist.
        return [buckets for buckets in self._all_buckets if buckets.optimizer() is not None]

    def _note_flags(self, sent: torch.Tensor) -> None:
        self._sent = sent

    @property
    @override
    def flags_agreed(self) -> Flags:
        # Of the last update: a deleted optimizer may exist longer on some ranks.
        return super().flags_agreed if self._sent is None else agreed(self._sent)

    @override
    def begin_part(self, shards: Shards, part: Part) -> None:
        super().begin_part(shards, part)
        for buckets in self.gradient_sums:
            buckets.begin()
