"""Where the seconds of a step go: data, compute, communication, and waiting for the last rank.

Each rank takes two times a step: how long it waited for its batch, and how long it was blocked in
the reduction of the gradients, once its own were there. At the end they are gathered once. In each
step the rank that was blocked least is taken to have come last, so that it waited for nobody: what
it was blocked is communication that computing did not hide, and what the others were blocked
longer is waiting. The rest of a step is compute.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from hvdtrain.adapters.communicator import Communicator

Batch = TypeVar("Batch")

MOST = 2000  # steps of a rank that are gathered: the last ones


class StepSplit:
    """The times of this rank."""

    def __init__(self) -> None:
        self.data: list[float] = []
        self.blocked: list[float | None] = []
        self._fetching = 0.0
        self._meeting = 0.0
        self._blocked_before = 0.0

    def fetching(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """``batches``, with a watch on how long each takes to come."""
        started = time.perf_counter()
        for batch in batches:
            self._fetching = time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Around a collective of the trainer's own; it counts for the step that comes next."""
        started = time.perf_counter()
        yield
        self._meeting += time.perf_counter() - started

    def resume(self) -> None:
        """Steps begin to count from now on."""
        self._meeting = 0.0

    def step(self, blocked: float | None) -> None:
        """A step has ended.

        Args:
            blocked: seconds in which this rank waited for sums of gradients, since the start of
                the training; None where they cannot be told.
        """
        self.data.append(self._fetching)
        if blocked is None:
            self.blocked.append(None)
        else:
            self.blocked.append(blocked - self._blocked_before + self._meeting)
            self._blocked_before = blocked
        self._fetching = self._meeting = 0.0

    def gather(
        self, communicator: Communicator, seconds: list[float], counted: list[bool]
    ) -> dict[str, Any] | None:
        """The split of the mean step, for the summary; all ranks call it.

        Args:
            communicator: of the ranks.
            seconds: of each step of this rank.
            counted: whether a step counts for the throughput; the same on all ranks.
        """
        rows = [
            (second, data, np.nan if blocked is None else blocked)
            for second, data, blocked, counts in zip(
                seconds, self.data, self.blocked, counted, strict=True
            )
            if counts
        ]
        mine = np.array(rows[-MOST:], np.float64).reshape(-1, 3)
        ranks = [np.frombuffer(one).reshape(-1, 3) for one in communicator.gather(mine.tobytes())]
        return split(np.stack(ranks)) if len(mine) else None


def split(times: np.ndarray[Any, np.dtype[np.float64]]) -> dict[str, Any]:
    """The mean step, taken apart.

    Args:
        times: seconds, of shape (ranks, steps, 3): the step, its data, and blocked, which is nan
            where it cannot be told.

    Returns:
        Seconds of a step by part, means over ranks and steps. ``undivided`` takes the place of
        compute, communication and waiting where these cannot be told apart. ``slowest_rank`` is
        the one that came last most often, ``slowest_share`` in what share of the steps.
    """
    step, data, blocked = np.moveaxis(times, -1, 0)
    result: dict[str, Any] = {
        "steps": step.shape[1],
        "data": float(data.mean()),
        "compute": None,
        "communication": None,
        "waiting": None,
        "undivided": None,
        "slowest_rank": None,
        "slowest_share": None,
    }
    if np.isnan(blocked).any():
        return {**result, "undivided": float((step - data).mean())}
    if len(times) == 1:  # its collectives are copies within the process: part of computing
        blocked = np.zeros_like(blocked)
    last = blocked.argmin(0)
    result |= {
        "compute": float((step - data - blocked).mean()),
        "communication": float(blocked.min(0).mean()),
        "waiting": float((blocked - blocked.min(0)).mean()),
    }
    if len(times) > 1:
        counts = np.bincount(last, minlength=len(times))
        slowest = int(counts.argmax())
        result |= {
            "slowest_rank": slowest,
            "slowest_share": float(counts[slowest] / counts.sum()),
        }
    return result
