"""Step 3, sharding: which samples a rank trains on, and in which order.

An epoch is one permutation of the dataset, a function of (seed, epoch) alone. It is cut into
global batches, and rank r takes the r-th part of each. So every sample is trained on exactly once
an epoch, all ranks take the same number of steps, and the place of a run in its training is
(epoch, samples consumed): it means the same on any number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import UsageError

Indices = NDArray[np.int64]


@dataclass(frozen=True)
class Position:
    """A place in the training: ``consumed`` samples of epoch number ``epoch`` are done."""

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
    """The half-open range of part ``rank`` when ``total`` items are cut into ``size`` parts.

    Parts differ by at most one item, the longer ones first; together they are range(total).
    """
    base, extra = divmod(total, size)
    low = rank * base + min(rank, extra)
    return low, low + base + (1 if rank < extra else 0)


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """The order of an epoch: a function of its arguments alone, equal on all ranks and machines.

    Philox is a counter-based generator (Salmon et al., 2011): the pair (seed, epoch) is its key,
    so no state runs from one epoch to the next.
    """
    key = np.array([seed % 2**64, epoch], np.uint64)  # a list may take a detour over float64
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.permutation(samples)


@dataclass(frozen=True)
class Shards:
    """The training set as one rank sees it.

    Every rank must build it with the same arguments but ``rank``; then the parts that the ranks
    draw for a step are disjoint and make up the global batch.

    Attributes:
        samples: size of the dataset.
        global_batch: samples of a step over all ranks; the last of an epoch may be smaller.
        seed: seed of the order.
        rank: this process.
        size: the world size.
    """

    samples: int
    global_batch: int
    seed: int = 0
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UsageError("the training set is empty: check --data")
        if self.global_batch < 1:
            raise UsageError(f"the global batch is {self.global_batch}, it must be 1 or more")

    @property
    def steps_per_epoch(self) -> int:
        """Steps of a whole epoch, the smaller last one counted."""
        return -(-self.samples // self.global_batch)

    def epoch(self, epoch: int, consumed: int = 0) -> Iterator[Part]:
        """This rank's parts of the global batches of an epoch, from ``consumed`` samples on.

        All ranks get the same number of parts. Where fewer samples are left than ranks, some
        parts are empty; the rank must take the step all the same, its peers wait for it.
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


def after(position: Position, samples: int) -> Position:
    """``position`` with a finished epoch written as the beginning of the next one."""
    if position.consumed >= samples:
        return Position(position.epoch + 1, 0)
    return position


def evaluation_parts(samples: int, batch: int, rank: int, size: int) -> Iterator[Indices]:
    """Batches of this rank's slice of an evaluation set: each sample on exactly one rank, once.

    Nothing is padded and nothing dropped, so ranks may get different numbers of batches: do no
    collective inside the loop over them.
    """
    low, high = bounds(samples, rank, size)
    for start in range(low, high, batch):
        yield np.arange(start, min(start + batch, high), dtype=np.int64)
