"""Step 3, sharding: the samples of each rank and their order.

An epoch is a permutation of the dataset that depends on (seed, epoch) only. It is split into global
batches, and rank r gets the r-th part of each. So every sample is used exactly once per epoch, all
ranks perform the same number of steps, and the position in the training is (epoch, consumed
samples), independent of the number of ranks.

A rank whose part has no sample computes on a stand-in, a sample of the same global batch with the
weight 0, so the same code runs on all ranks: collectives in it match, and so does the state of
modules that change in a forward pass (spectral norm, counters).
"""

from __future__ import annotations

import hashlib
import operator
import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UsageError

Indices = NDArray[np.int64]
Batch = TypeVar("Batch")


@dataclass(frozen=True)
class Position:
    """Position in the training: ``consumed`` samples of epoch number ``epoch`` are done."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class Part:
    """A rank's part of a global batch.

    Attributes:
        indices: indices of this rank's samples, int64, shape (count,); if it has none, shape (1,),
            the stand-in.
        global_count: number of samples of the global batch, over all ranks.
        start: position before the global batch.
        end: position after the global batch.
        successor: index of the sample that follows ``indices`` in the order of the epoch, whose
            last sample is followed by its first.
        stand_in: whether ``indices`` is a stand-in: its weight is 0, and metrics do not count it.
    """

    indices: Indices
    global_count: int
    start: Position
    end: Position
    successor: int = 0
    stand_in: bool = False

    @property
    def count(self) -> int:
        """Number of samples of this rank; 0 for a stand-in."""
        return 0 if self.stand_in else len(self.indices)

    @property
    def weight(self) -> float:
        """Weight of a *mean* over this part in the mean over the global batch."""
        return self.count / self.global_count


def bounds(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return the half-open range of part ``rank`` of ``total`` items split into ``size`` parts.

    Parts differ by at most one item, longer ones first; their union is range(total).
    """
    base, extra = divmod(total, size)
    low = rank * base + min(rank, extra)
    return low, low + base + (1 if rank < extra else 0)


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """Return the order of an epoch, which depends on the arguments only, on any machine.

    Philox is a counter-based generator (Salmon et al., 2011) with the key (seed, epoch), so no
    state is carried from epoch to epoch.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)  # a list may be converted via float64
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.permutation(samples)


@dataclass
class Shards:
    """A rank's view of the training set.

    All ranks must create it with the same arguments except ``rank``; then the parts of a step are
    disjoint, and their union is the global batch. Ranks that share a model share a data rank.

    The gradients of a rank are weighted by its ``current`` part. Iterating over ``epoch`` sets it;
    if batches are read ahead, e.g. by worker processes, use ``batches`` or ``step``.

    Attributes:
        samples: number of samples of the dataset.
        global_batch: number of samples per step over all ranks; the last step of an epoch may have
            fewer.
        seed: random seed of the order.
        rank: data rank of this process.
        size: number of data ranks.
        on_begin: called with the shards and a part when that part becomes the current one.
        on_end: called at the end of a ``step`` or an ``epoch``.
        current: part on which the next gradients are computed; None before the first one and after
            a ``step``.
    """

    samples: int
    global_batch: int
    seed: int = 0
    rank: int = 0
    size: int = 1
    on_begin: Callable[[Shards, Part], None] = lambda shards, part: None
    on_end: Callable[[], None] = lambda: None
    current: Part | None = field(default=None, init=False, compare=False)
    _drawn: int = field(
        default=0, init=False, compare=False
    )  # number of parts since the last ``use``

    def __post_init__(self) -> None:
        self.samples = _count(self.samples, "the size of the dataset")
        self.global_batch = _count(self.global_batch, "the global batch")
        if self.samples < 1:
            raise UsageError("the training set is empty: check --data")
        if self.global_batch < 1:
            raise UsageError(f"the global batch is {self.global_batch}: must be 1 or more")

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch, including a smaller last one."""
        return -(-self.samples // self.global_batch)

    def parts(self, epoch: int, consumed: int = 0) -> Iterator[Part]:
        """Yield this rank's parts of the global batches of an epoch, after ``consumed`` samples.

        All ranks get the same number of parts. If fewer samples than ranks are left, some ranks get
        a stand-in; every rank makes all passes and the step. ``current`` is not set: use ``step``
        with each part, or iterate over ``epoch`` or ``batches``.
        """
        order = permutation(self.samples, self.seed, epoch)
        for start in range(consumed, self.samples, self.global_batch):
            stop = min(start + self.global_batch, self.samples)
            low, high = bounds(stop - start, self.rank, self.size)
            none = low == high
            yield Part(
                indices=order[start : start + 1] if none else order[start + low : start + high],
                global_count=stop - start,
                start=Position(epoch, start),
                end=Position(epoch, stop) if stop < self.samples else Position(epoch + 1),
                successor=int(order[(start + high) % self.samples]),
                stand_in=none,
            )

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Part]:
        """Yield the ``parts`` of an epoch; each is current until the next one is drawn."""
        try:
            for number, part in enumerate(self.parts(epoch, consumed)):
                self._begin(part)
                self._drawn = self._drawn + 1 if number else 1
                yield part
        finally:
            self.on_end()

    def batch_sampler(self, epoch: int, consumed: int = 0) -> list[list[int]]:
        """Return the indices of each part, as ``batch_sampler`` of a DataLoader.

        As a loader may read ahead, iterate over ``batches``.
        """
        return [part.indices.tolist() for part in self.parts(epoch, consumed)]

    def batches(
        self, epoch: int, loader: Iterable[Batch], consumed: int = 0
    ) -> Iterator[tuple[Part, Batch]]:
        """Yield the parts of an epoch with their batches; each part is current meanwhile.

        Args:
            epoch: number of the epoch.
            loader: yields the batches of ``batch_sampler(epoch, consumed)``.
            consumed: number of samples of the epoch that are done.

        Yields:
            The part and its batch. Count ``part.count`` samples, not the length of the batch: it
            may be a stand-in.

        Raises:
            UsageError: the loader has fewer or more batches than this rank has parts.
        """
        remaining = iter(loader)
        end = object()
        for number, part in enumerate(self.parts(epoch, consumed)):
            batch: Any = next(remaining, end)
            if batch is end:
                raise UsageError(f"the loader ended after {number} batches: {SAMPLER}")
            with self.step(part):
                yield part, batch
        if next(remaining, end) is not end:
            raise UsageError(f"the loader has more batches than this rank has parts: {SAMPLER}")

    @contextmanager
    def step(self, part: Part) -> Iterator[None]:
        """Make ``part`` the current one in the block, even if it was drawn ahead."""
        self._begin(part)
        self._drawn = 0
        try:
            yield
        finally:
            self.current = None
            self.on_end()

    def _begin(self, part: Part) -> None:
        self.on_begin(self, part)
        self.current = part

    def use(self) -> Part:
        """Return the part on which gradients are computed now.

        Raises:
            UsageError: the current part is unknown.
        """
        if self.current is None:
            raise UsageError(
                "gradients are computed, but the current part of the shards is unknown: iterate "
                "over shards.epoch(n) or shards.batches(n, loader), or compute them in `with "
                "shards.step(part):`"
            )
        if self._drawn > 1:
            raise UsageError(
                f"{self._drawn} parts were drawn from shards.epoch(n) before an update, e.g. by a "
                "loader that reads ahead: use batch_sampler=shards.batch_sampler(n), and iterate "
                "over shards.batches(n, loader)"
            )
        self._drawn = 0
        return self.current


SAMPLER = "use batch_sampler=shards.batch_sampler(epoch), with the same epoch and `consumed`"


def _count(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        remedy = f"use len({kind.lower()})" if hasattr(value, "__len__") else "use an int"
        raise UsageError(f"{name} must be a number, not a {kind}: {remedy}") from None


def evaluation_parts(
    samples: int, batch: int, rank: int, size: int, *, alike: bool = False
) -> Iterator[Indices]:
    """Yield batches of this rank's slice of an evaluation set; each sample is on exactly one rank.

    Nothing is padded or dropped, so ranks may get different numbers of batches: use no collective
    in the loop over them, unless all ranks get equally many (``alike``; some may be empty).
    """
    low, high = bounds(samples, rank, size)
    longest = -(-samples // size)
    for start in range(low, low + longest if alike else high, batch):
        yield np.arange(start, min(start + batch, high), dtype=np.int64)


def seed_of(*key: int) -> int:
    """Return a seed below 2**63 for a key of integers, e.g. (seed, update, rank).

    BLAKE2b gives similar keys unrelated seeds, the same on every machine.
    """
    packed = struct.pack(f"<{len(key)}Q", *(number % 2**64 for number in key))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
