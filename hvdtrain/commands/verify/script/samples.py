"""Record the samples of a script's first epoch on each rank, and compare them over all ranks.

The only sign of the end of an epoch is that samples repeat: on a rank its own, over all ranks any
sample. Samples after that are ignored: if the data are shuffled and sharded again in each epoch, a
rank then sees samples that other ranks had in the first epoch.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_SAMPLES = 1_000_000  # samples that are recorded
REPEATED = 3  # samples that may repeat by chance, as data have duplicates
QUIET = 20  # updates without a repeated sample, after which earlier repetitions were chance


@dataclass
class SeenSamples:
    """The samples of one rank, by their digests."""

    marks: list[str] = field(default_factory=list)  # digest of each sample, in order
    ends: list[int] = field(default_factory=list)  # number of marks after each update
    epoch: int | None = None  # updates before samples repeated; None: not yet

    def by_update(self) -> list[list[str]]:
        """Return the samples of each update."""
        return [self.marks[begin:end] for begin, end in pairwise([0, *self.ends])]


class SampleLog:
    """Adds to ``samples``, update by update, until it is certain that they repeat."""

    def __init__(self, samples: SeenSamples) -> None:
        self.samples = samples
        self._known: set[str] = set()  # before the current update
        self._current: set[str] = set()  # since the last update
        self._repeated = 0  # number of samples repeated in a later update
        self._first = 0  # updates before the first repetition
        self._quiet = 0  # updates since the last repetition

    def add(self, values: NDArray[Any]) -> None:
        """Record samples, along the first axis, that the model is called with."""
        seen = self.samples
        over = seen.epoch is not None and len(seen.ends) > seen.epoch + QUIET
        if over or len(seen.marks) + len(values) > MAX_SAMPLES:
            return
        before = frozenset(self._current)
        for value in values:
            mark = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
            if mark in before:  # the model is called with a batch twice
                continue
            seen.marks.append(mark)
            self._current.add(mark)
            if mark in self._known:
                self._first = self._first if self._repeated else len(seen.ends)
                self._repeated += 1
                self._quiet = 0
        if self._repeated > REPEATED and seen.epoch is None:
            seen.epoch = self._first

    def update(self) -> None:
        """Record an update, made from the samples since the last one."""
        self.samples.ends.append(len(self.samples.marks))
        self._known |= self._current
        self._current.clear()
        self._quiet += 1
        if self._quiet > QUIET:
            self._repeated = 0


def first_epoch(ranks: Sequence[SeenSamples]) -> list[list[str]]:
    """Return the samples of each rank in the first epoch over all ranks."""
    epochs = [rank.epoch for rank in ranks if rank.epoch is not None]
    by_rank = [rank.by_update() for rank in ranks] if epochs else []
    updates = [list(parts) for parts in zip(*by_rank, strict=False)]  # by update, then by rank
    new, shares = _new_samples(updates)
    # Ranks make the same updates, so the first repetition on any rank is the end on all, unless it
    # is a duplicate in the data, shortly before the end.
    end = min(epochs, default=0)
    while end < len(updates) and max(shares[end : end + 2]) > 0.5:
        end += 1
    if end == len(updates):  # no sample repeated, or all further ones did
        return [list(rank.marks) for rank in ranks]
    # The first repetition is late if a batch of the second epoch has no earlier sample of the rank.
    last = max(update for update in range(end + 1) if any(new[update]))
    seen = [
        marks + part[:count]
        for marks, part, count in zip(
            _joined(updates[:last], len(ranks)), updates[last], new[last], strict=True
        )
    ]
    few = len(on_several(seen)) <= REPEATED + len(ranks)
    return seen if few else _joined(updates[:end], len(ranks))


def _new_samples(updates: Sequence[list[list[str]]]) -> tuple[list[list[int]], list[float]]:
    """Return per update the position of each rank's last new sample, and the share of new ones.

    A sample is new if no rank has seen it in an earlier update.
    """
    known: set[str] = set()
    new, shares = [], []
    for parts in updates:
        fresh = [[n for n, mark in enumerate(part, 1) if mark not in known] for part in parts]
        new.append([numbers[-1] if numbers else 0 for numbers in fresh])
        shares.append(sum(map(len, fresh)) / max(1, sum(map(len, parts))))
        known.update(*parts)
    return new, shares


def _joined(updates: Sequence[list[list[str]]], size: int) -> list[list[str]]:
    """Return the samples of each rank over all ``updates``."""
    return [[mark for parts in updates for mark in parts[rank]] for rank in range(size)]


def on_several(seen: Sequence[Sequence[str]]) -> set[str]:
    """Return the samples that more than one rank has seen."""
    return repeated([mark for marks in seen for mark in set(marks)])


def repeated(marks: Sequence[str]) -> set[str]:
    """Return the samples that occur more than once."""
    return {mark for mark, count in Counter(marks).items() if count > 1}
