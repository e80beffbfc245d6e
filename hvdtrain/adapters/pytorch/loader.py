"""The DataLoader that reads a rank's parts of the global batches, for a training loop of your own.

``loader = shards.loader(data, num_workers=2)``, then in each epoch ``for part, batch in
loader.batches(epoch):``.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils import data as torch_data
from typing_extensions import override

from hvdtrain.errors import UsageError
from hvdtrain.steps.sharding import Part, Shards, seed_of
from hvdtrain.system.runtime.outlive import end_with_parent, worker_context

DETERMINED = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")
Selection = tuple[int, list[int]]  # epoch, indices of the samples


class TorchShards(Shards):
    """Shards that also make the loader of a dataset of PyTorch."""

    def loader(self, data: Any, **options: Any) -> PartLoader:
        """Return a loader of this rank's parts of ``data``; all ranks must create it alike.

        The random numbers that a sample draws (Python's, NumPy's global, PyTorch's default
        generator) are a function of (seed, epoch, index), at any number of ranks and workers; the
        generators of a model are left as they are. If ``data`` has an attribute ``epoch``, it is
        set to the epoch in which a sample is read, also in workers.

        Args:
            data: a map-style dataset, of as many samples as ``shard_data`` was called with.
            options: of ``torch.utils.data.DataLoader``, e.g. ``num_workers``, ``collate_fn`` or
                ``pin_memory``. Workers are kept from epoch to epoch and started by a fork server,
                as a fork of a process with MPI may hang, unless ``persistent_workers`` or
                ``multiprocessing_context`` are provided.

        Raises:
            UsageError: ``data`` is no map-style dataset or has another length, or an option is one
                that the shards determine.
        """
        for name in DETERMINED:
            if name in options:
                raise UsageError(
                    f"shards.loader: {name} is determined by the shards: omit it, and pass the "
                    "global batch to shard_data"
                )
        if isinstance(data, torch_data.IterableDataset) or not hasattr(data, "__getitem__"):
            raise UsageError(
                f"shards.loader: {type(data).__name__} cannot be read by index: use a map-style "
                "dataset, or see 'Streams' in docs/own.md"
            )
        if len(data) != self.samples:
            raise UsageError(
                f"shards.loader: the dataset has {len(data)} samples, but shard_data was called "
                f"with {self.samples}: use the same dataset for both"
            )
        return PartLoader(self, data, **options)


class PartLoader:
    """A DataLoader of the parts of ``shards``, created once for all epochs."""

    def __init__(self, shards: Shards, data: Any, **options: Any) -> None:
        self._shards = shards
        self._order = _Order(shards)
        if options.get("num_workers"):
            options = {
                "persistent_workers": True,
                "multiprocessing_context": worker_context(),
                **options,
                "worker_init_fn": _Begin(options.get("worker_init_fn")),
            }
        samples: _Samples = _Samples(data, shards.seed)
        if type(data) is torch_data.TensorDataset and not options.get("collate_fn"):
            samples = _Rows(data, shards.seed)
            options["collate_fn"] = list  # as default_collate
        # The loader draws a number in each epoch: not from the generator of the model.
        options.setdefault("generator", torch.Generator())
        self._loader: torch_data.DataLoader[Any] = torch_data.DataLoader(
            samples,
            batch_sampler=self._order,  # type: ignore[arg-type]
            **options,
        )

    def __len__(self) -> int:
        return self._shards.steps_per_epoch

    def batches(self, epoch: int, consumed: int = 0) -> Iterator[tuple[Part, Any]]:
        """Yield the parts of an epoch with their batches; each part is current meanwhile.

        All ranks must iterate over it; they get equally many parts.

        Args:
            epoch: number of the epoch.
            consumed: number of samples of the epoch that are done, ``part.end.consumed``.

        Yields:
            The part and its batch as ``collate_fn`` returns it. Count ``part.count`` samples, not
            the length of the batch: it may be a stand-in.
        """
        self._order.epoch, self._order.consumed = epoch, consumed
        yield from self._shards.batches(epoch, self._loader, consumed)


@dataclass
class _Order:
    """The batches of an epoch, in the order of the shards."""

    shards: Shards
    epoch: int = 0
    consumed: int = 0

    def __iter__(self) -> Iterator[Selection]:
        for part in self.shards.parts(self.epoch, self.consumed):
            yield self.epoch, part.indices.tolist()


@dataclass
class _Begin:
    """Start of a worker process: tie it to its parent, then call the user's function."""

    init: Callable[[int], object] | None

    def __call__(self, worker: int) -> None:
        end_with_parent()
        if self.init:
            self.init(worker)


@dataclass
class _Samples(torch_data.Dataset[Any]):
    """A dataset each of whose samples is read with random numbers of its own."""

    data: Any
    seed: int

    def __len__(self) -> int:
        return len(self.data)

    @override
    def __getitem__(self, index: int) -> Any:
        return self.data[index]

    def __getitems__(self, batch: Selection) -> Any:
        """Return the samples of a batch; called by the DataLoader."""
        epoch, indices = batch
        if hasattr(self.data, "epoch"):
            self.data.epoch = epoch
        with _generators_kept():
            return [self._read(epoch, index) for index in indices]

    def _read(self, epoch: int, index: int) -> Any:
        seed = seed_of(self.seed, epoch, index)
        random.seed(seed)
        np.random.seed(seed >> 31)  # 32 other bits than PyTorch's: both are Mersenne Twisters
        torch.default_generator.manual_seed(seed)
        return self.data[index]


class _Rows(_Samples):
    """Tensors in memory: nothing is drawn, and a batch is read at once."""

    @override
    def __getitems__(self, batch: Selection) -> Any:
        return self.data[batch[1]]


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the global generators after the block, unless this is a worker process."""
    if torch_data.get_worker_info() is not None:
        yield
        return
    states = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.default_generator.set_state(states[2])
