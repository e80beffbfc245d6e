"""Step 3, sharding: which samples a rank trains on, and in which order.

An epoch is one permutation of the dataset, a function of (seed, epoch) alone. It is cut into
global batches, and rank r takes the r-th part of each. So every sample is trained on exactly once
per epoch, all ranks take the same number of steps, and the place of a run in its training is
(epoch, samples consumed): it means the same on any number of ranks.
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
    """A position in the training: ``consumed`` samples of epoch number ``epoch`` are done."""

    epoch: int = 0
    consumed: int = 0


@dataclass(frozen=True)
class Part:
    """One rank's part of one global batch.

    Attributes:
        indices: the samples of this rank, int64, shape (count,); may be empty.
        global_count: the samples of the whole global batch, over all ranks.
        start: where the global batch begins.
        end: where it ends: the position of a run that has trained on it.
    """

    indices: Indices
    global_count: int
    start: Position
    end: Position

    @property
    def count(self) -> int:
        """Samples of this rank."""
        return len(self.indices)

    @property
    def weight(self) -> float:
        """What a *mean* over this part contributes to the mean over the global batch."""
        return self.count / self.global_count


def bounds(total: int, rank: int, size: int) -> tuple[int, int]:
    """Return the half-open range of part ``rank`` when ``total`` items are cut into ``size`` parts.

    Parts differ by at most one item, the longer ones first; together they are range(total).
    """
    base, extra = divmod(total, size)
    low = rank * base + min(rank, extra)
    return low, low + base + (1 if rank < extra else 0)


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """Return the order of an epoch: a function of its arguments alone, equal on all machines.

    Philox is a counter-based generator (Salmon et al., 2011): the pair (seed, epoch) is its key,
    so no state runs from one epoch to the next.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)  # a list may take a detour over float64
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.permutation(samples)


@dataclass
class Shards:
    """The training set as one rank sees it.

    Every rank must build it with the same arguments but ``rank``; then the parts that the ranks
    draw for a step are disjoint and make up the global batch.

    The gradients of a rank are weighted by its ``current`` part. Iterating over ``epoch`` sets it;
    where batches are read ahead, by worker processes for example, use ``batches`` or ``step``.

    Attributes:
        samples: size of the dataset.
        global_batch: samples of a step over all ranks; the last of an epoch may be smaller.
        seed: seed of the order.
        rank: this process.
        size: the world size.
        on_begin: called with the shards and a part whenever that part becomes the current one.
        on_end: called when a ``step`` or an ``epoch`` has come to its end.
        current: the part that the next gradients are computed on; None before the first one, and
            after a ``step``.
    """

    samples: int
    global_batch: int
    seed: int = 0
    rank: int = 0
    size: int = 1
    on_begin: Callable[[Shards, Part], None] = lambda shards, part: None
    on_end: Callable[[], None] = lambda: None
    current: Part | None = field(default=None, init=False, compare=False)
    _drawn: int = field(default=0, init=False, compare=False)  # parts since the last use of one

    def __post_init__(self) -> None:
        self.samples = _count(self.samples, "the size of the dataset")
        self.global_batch = _count(self.global_batch, "the global batch")
        if self.samples < 1:
            raise UsageError("the training set is empty: check --data")
        if self.global_batch < 1:
            raise UsageError(f"the global batch is {self.global_batch}, it must be 1 or more")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, the smaller last one counted."""
        return -(-self.samples // self.global_batch)

    def parts(self, epoch: int, consumed: int = 0) -> Iterator[Part]:
        """Draw this rank's parts of the global batches of an epoch, from ``consumed`` samples on.

        All ranks get the same number of parts. Where fewer samples are left than ranks, some
        parts are empty; the rank must take the step all the same, its peers wait for it. Drawing
        changes nothing: begin each part by ``step``, or iterate over ``epoch`` or ``batches``.
        """
        order = permutation(self.samples, self.seed, epoch)
        for start in range(consumed, self.samples, self.global_batch):
            stop = min(start + self.global_batch, self.samples)
            low, high = bounds(stop - start, self.rank, self.size)
            yield Part(
                indices=order[start + low : start + high],
                global_count=stop - start,
                start=Position(epoch, start),
                end=after(Position(epoch, stop), self.samples),
            )

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Part]:
        """Iterate over ``parts``; each is the current one until the next is drawn."""
        for number, part in enumerate(self.parts(epoch, consumed)):
            self._begin(part)
            self._drawn = self._drawn + 1 if number else 1
            yield part
        self.on_end()

    def batch_sampler(self, epoch: int, consumed: int = 0) -> list[list[int]]:
        """List the indices of each part that is not empty: ``batch_sampler`` of a DataLoader.

        A loader draws from it as far ahead as it likes; iterate over ``batches`` then.
        """
        return [part.indices.tolist() for part in self.parts(epoch, consumed) if part.count]

    def batches(
        self, epoch: int, loader: Iterable[Batch], consumed: int = 0
    ) -> Iterator[tuple[Part, Batch | None]]:
        """Iterate over the parts of an epoch with their batches, each part the current one.

        Args:
            epoch: number of the epoch.
            loader: gives the samples of ``batch_sampler(epoch, consumed)``, batch by batch.
            consumed: samples of the epoch that are done.

        Yields:
            The part and its batch, None where the part is empty: take the step all the same.

        Raises:
            UsageError: the loader has fewer or more batches than this rank has parts.
        """
        remaining = iter(loader)
        end = object()
        for number, part in enumerate(self.parts(epoch, consumed)):
            batch: Any = next(remaining, end) if part.count else None
            if batch is end:
                raise UsageError(f"the loader ended after {number} batches: {SAMPLER}")
            with self.step(part):
                yield part, batch
        if next(remaining, end) is not end:
            raise UsageError(f"the loader has more batches than this rank has parts: {SAMPLER}")

    @contextmanager
    def step(self, part: Part) -> Iterator[None]:
        """Make ``part`` the current one within, however far ahead it was drawn."""
        self._begin(part)
        self._drawn = 0
        try:
            yield
            self.on_end()
        finally:
            self.current = None

    def _begin(self, part: Part) -> None:
        self.on_begin(self, part)
        self.current = part

    def use(self) -> Part:
        """Return the part that gradients are computed on now.

        Raises:
            UsageError: nobody can tell which one it is.
        """
        if self.current is None:
            raise UsageError(
                "gradients are computed, but on which part of the shards is not known: iterate "
                "over shards.epoch(n) or shards.batches(n, loader), or compute them within "
                "`with shards.step(part):`"
            )
        if self._drawn > 1:
            raise UsageError(
                f"{self._drawn} parts were drawn from shards.epoch(n) before an update, as by a "
                "loader that reads ahead: give it batch_sampler=shards.batch_sampler(n), and "
                "iterate over shards.batches(n, loader)"
            )
        self._drawn = 0
        return self.current


SAMPLER = "give it batch_sampler=shards.batch_sampler(epoch), with the same epoch and `consumed`"


def _count(value: Any, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        kind = type(value).__name__
        remedy = f"give len({kind.lower()})" if hasattr(value, "__len__") else "give an int"
        raise UsageError(f"{what} is a number, not a {kind}: {remedy}") from None


def after(position: Position, samples: int) -> Position:
    """Return ``position`` with a finished epoch written as the beginning of the next one."""
    if position.consumed >= samples:
        return Position(position.epoch + 1, 0)
    return position


def evaluation_parts(
    samples: int, batch: int, rank: int, size: int, *, alike: bool = False
) -> Iterator[Indices]:
    """Yield batches of this rank's slice of an evaluation set: each sample on one rank, once.

    Nothing is padded and nothing dropped, so ranks may get different numbers of batches: do no
    collective inside the loop over them, unless all are to get as many (``alike``: some of none).
    """
    low, high = bounds(samples, rank, size)
    longest = max(
        high - low for low, high in (bounds(samples, other, size) for other in range(size))
    )
    for start in range(low, low + longest if alike else high, batch):
        yield np.arange(start, min(start + batch, high), dtype=np.int64)


def seed_of(*place: int) -> int:
    """Return a seed below 2**63 from whole numbers such as (seed, update, rank).

    BLAKE2b spreads neighbouring places over unrelated seeds; the same place gives the same seed on
    every machine.
    """
    packed = struct.pack(f"<{len(place)}Q", *(number % 2**64 for number in place))
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1
