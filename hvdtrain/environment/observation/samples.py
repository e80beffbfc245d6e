"""Which samples a rank has seen in its first epoch, told apart by their content."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

LARGEST = 1_000_000  # samples that are told apart
REPEATED = 3  # samples that come again by chance: data has duplicates
QUIET = 20  # updates after which a sample that came again was chance


class Samples:
    """The samples of the first epoch.

    Attributes:
        marks: one for each sample, in the order seen.
        again: whether samples come again, a second epoch. It is not looked at: where each epoch is
            shared out anew, it shows a rank what others had in the first.
    """

    def __init__(self) -> None:
        self.marks: list[str] = []
        self.again = False
        self._known: set[str] = set()
        self._current: set[str] = set()  # those since the last update
        self._returned = 0  # that came again in a later update
        self._before = 0  # marks before the first that did
        self._quiet = 0  # updates since one did

    def add(self, values: NDArray[Any]) -> None:
        """The model is shown these samples, along the first axis."""
        if self.again or len(self.marks) + len(values) > LARGEST:
            return
        for value in values:
            mark = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=8).hexdigest()
            if mark not in self._known:
                self.marks.append(mark)
            elif mark not in self._current:  # else the model is shown a batch twice
                self._before = self._before if self._returned else len(self.marks)
                self._returned += 1
                self._quiet = 0
            self._known.add(mark)
            self._current.add(mark)
        if self._returned > REPEATED:
            self.again = True
            del self.marks[self._before :]

    def update(self) -> None:
        """An update is made of the samples since the last one."""
        self._current.clear()
        self._quiet += 1
        if self._quiet > QUIET:
            self._returned = 0
