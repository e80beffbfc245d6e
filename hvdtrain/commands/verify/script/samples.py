"""Which samples a script trains on in its first epoch: noted by each rank, counted over all.

Nothing says where an epoch ends, but that samples come again: to a rank those that it had itself,
and of all ranks together every one. What follows is left out: where each epoch is shared out anew,
it shows a rank what others had in the first.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 1_000_000  # samples that are told apart
REPEATED = 3  # samples that come again by chance: data has duplicates
QUIET = 20  # updates after which a sample that came again was chance


class Samples:
    """The samples of one rank, update by update, until it is clear that they come again."""

    def __init__(self) -> None:
        self.marks: list[str] = []  # one per sample, in the order seen
        self.ends: list[int] = []  # how many there were after each update
        self.epoch: int | None = None  # updates before samples came again; None: they did not
        self._known: set[str] = set()  # before the current update
        self._current: set[str] = set()  # those since the last one
        self._returned = 0  # that came again in a later update
        self._first = 0  # updates before the first that did
        self._quiet = 0  # updates since one did

    def add(self, values: NDArray[Any]) -> None:
        """Note samples, along the first axis, that the model is shown."""
        over = self.epoch is not None and len(self.ends) > self.epoch + QUIET
        if over or len(self.marks) + len(values) > LARGEST:
            return
        before = frozenset(self._current)
        for value in values:
            mark = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
            if mark in before:  # the model is shown a batch twice
                continue
            self.marks.append(mark)
            self._current.add(mark)
            if mark in self._known:
                self._first = self._first if self._returned else len(self.ends)
                self._returned += 1
                self._quiet = 0
        if self._returned > REPEATED and self.epoch is None:
            self.epoch = self._first

    def update(self) -> None:
        """Note an update, made of the samples since the last one."""
        self.ends.append(len(self.marks))
        self._known |= self._current
        self._current.clear()
        self._quiet += 1
        if self._quiet > QUIET:
            self._returned = 0


def first_epoch(ranks: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the samples of each rank in the first epoch of all of them together.

    Args:
        ranks: what each has noted: ``rows``, the samples; ``ends`` and ``epoch``, as ``Samples``.
    """
    begun = [rank["epoch"] for rank in ranks if rank["epoch"] is not None]
    updates = [*_updates(ranks)] if begun else []
    new, shares = _new_ones(updates)
    # Ranks make the same updates, so the first to have a sample again tells for all, unless that
    # is a duplicate in the data, shortly before the end.
    end = min(begun, default=0)
    while end < len(updates) and max(shares[end : end + 2]) > 0.5:
        end += 1
    if end == len(updates):  # nothing came again, or nothing else did
        return [list(rank["rows"]) for rank in ranks]
    # That first one comes late where a batch of the second epoch holds none of a rank's own.
    last = max(update for update in range(end + 1) if any(new[update]))
    seen = [
        marks + part[:count]
        for marks, part, count in zip(
            _joined(updates[:last], len(ranks)), updates[last], new[last], strict=True
        )
    ]
    few = len(on_several(seen)) <= REPEATED + len(ranks)
    return seen if few else _joined(updates[:end], len(ranks))


def _new_ones(updates: Sequence[list[list[str]]]) -> tuple[list[list[int]], list[float]]:
    """Return of each update how many samples of each rank go to the last new one, and their share.

    New is what no rank has seen in an earlier update.
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
    """Return the samples of each rank in all of these updates."""
    return [[mark for parts in updates for mark in parts[rank]] for rank in range(size)]


def on_several(seen: Sequence[Sequence[str]]) -> set[str]:
    """Return the samples that more than one rank has seen."""
    return repeated([mark for marks in seen for mark in set(marks)])


def repeated(marks: Sequence[str]) -> set[str]:
    """Return those that are there more than once."""
    return {mark for mark, count in Counter(marks).items() if count > 1}


def _updates(ranks: Sequence[dict[str, Any]]) -> Iterator[list[list[str]]]:
    """Yield the samples of each update, by rank."""
    ends = [[0, *rank["ends"]] for rank in ranks]
    for update in range(1, min(map(len, ends))):
        yield [
            rank["rows"][end[update - 1] : end[update]]
            for rank, end in zip(ranks, ends, strict=True)
        ]
