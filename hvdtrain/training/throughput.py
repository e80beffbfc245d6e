"""Throughput: the duration of each step, split by activity.

The activities are data, compute, communication, and waiting for the last rank. Each rank measures
two times per step: its wait for the batch, and the time that it is blocked in the reduction of the
gradients after computing its own. They are gathered once, at the end. In each step the rank that
was blocked least is assumed to have come last, without waiting: its blocked time is communication
that computation did not hide, and the additional blocked time of the others is waiting. The rest of
a step is compute.
"""

from __future__ import annotations

import statistics
import time
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import psutil

from hvdtrain.collectives.base import Communicator
from hvdtrain.steps.sharding import Batch
from hvdtrain.steps.summary import StepSplit, Summary

MAX_STEPS = 2000  # number of steps per rank that are gathered: the last ones


def split(times: np.ndarray[Any, np.dtype[np.float64]]) -> StepSplit:
    """Return the mean step over ranks and steps, split by activity.

    The ``times`` are seconds, of shape (ranks, steps, 3): the step, its data, and blocked (nan:
    unknown).
    """
    step, data, blocked = np.moveaxis(times, -1, 0)
    whole = StepSplit(steps=step.shape[1], data=float(data.mean()))
    if np.isnan(blocked).any():
        return replace(whole, undivided=float((step - data).mean()))
    if len(times) == 1:  # its collectives are copies within the process: part of computing
        blocked = np.zeros_like(blocked)
    parts = replace(
        whole,
        compute=float((step - data - blocked).mean()),
        communication=float(blocked.min(0).mean()),
        waiting=float((blocked - blocked.min(0)).mean()),
    )
    if len(times) == 1:
        return parts
    last = np.bincount(blocked.argmin(0), minlength=len(times))
    slowest = int(last.argmax())
    return replace(parts, slowest_rank=slowest, slowest_share=float(last[slowest] / last.sum()))


def _numbers() -> array[float]:
    return array("d")  # 8 bytes per step: there may be millions


@dataclass
class Clock:
    """Duration of each step, without the time between steps (evaluation, saving), and its parts."""

    seconds: array[float] = field(default_factory=_numbers)
    images: array[int] = field(default_factory=lambda: array("q"))
    data: array[float] = field(default_factory=_numbers)  # seconds of the wait for the batch
    blocked: array[float] = field(default_factory=_numbers)  # seconds, by other ranks; nan: unknown
    processor: array[float] = field(default_factory=_numbers)  # seconds of all threads of the rank
    uncounted: set[int] = field(default_factory=set)
    started: float = field(default_factory=lambda: psutil.Process().create_time())
    first_step: float | None = None
    _begun: float | None = None
    _last: float = 0.0
    _last_processor: float = 0.0
    _fetching: float = 0.0
    _meeting: float = 0.0  # seconds in collectives of the trainer since the last step
    _blocked_before: float = 0.0

    def fetching(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield ``batches``, and measure the wait for each."""
        started = time.perf_counter()
        for batch in batches:
            self._fetching = time.perf_counter() - started
            yield batch
            started = time.perf_counter()

    @contextmanager
    def timing_collective(self) -> Iterator[None]:
        """Measure a collective of the trainer, which counts for the next step."""
        started = time.perf_counter()
        yield
        self._meeting += time.perf_counter() - started

    def resume(self) -> None:
        """Start the time of the next step now."""
        self._last, self._last_processor = time.perf_counter(), time.process_time()
        if self._begun is None:
            self._begun = self._last
        self._meeting = 0.0

    def step(self, images: int, *, counts: bool = True, blocked: float | None = None) -> None:
        """Record the time of a step over ``images`` samples, of all ranks, that has just ended.

        Args:
            images: number of samples.
            counts: whether it counts for the throughput: not if it was slowed down, e.g. by a
                timeline.
            blocked: total seconds that this rank has waited for sums of gradients since the start
                of the training; None: unknown.
        """
        now, processor = time.perf_counter(), time.process_time()
        if not counts:
            self.uncounted.add(len(self.seconds))
        self.seconds.append(now - self._last)
        self.processor.append(processor - self._last_processor)
        self.images.append(images)
        self.data.append(self._fetching)
        if blocked is None:
            self.blocked.append(np.nan)
        else:
            self.blocked.append(blocked - self._blocked_before + self._meeting)
            self._blocked_before = blocked
        self._fetching = self._meeting = 0.0
        self._last, self._last_processor = now, processor
        if self.first_step is None:
            self.first_step = time.time() - self.started

    def elapsed(self) -> float:
        """Return the seconds since the first step began, including the time between steps."""
        return 0.0 if self._begun is None else time.perf_counter() - self._begun

    def recent_rate(self, steps: int) -> float:
        """Return images per second over the last ``steps`` steps."""
        seconds = sum(self.seconds[-steps:])
        return sum(self.images[-steps:]) / seconds if seconds else 0.0

    def longest_recent(self, steps: int) -> float:
        """Return the longest duration of ``steps`` steps, in seconds, by the last hundred.

        If a GPU is synchronized only once in several steps, that step takes the time of all.
        """
        recent = self.seconds[-100:]
        single = steps * statistics.median(recent) if recent else 0.0
        return max(max(recent, default=0.0), single)

    def _counted(self, *columns: Sequence[float]) -> Iterator[tuple[float, ...]]:
        """Yield the values of each step that counts, of all but the first min(5, steps // 5)."""
        first = min(5, len(self.seconds) // 5)
        for step, row in enumerate(zip(*columns, strict=True)):
            if step >= first and step not in self.uncounted:
                yield row

    def rates(self) -> list[float]:
        """Return images per second of each step that counts."""
        return [count / second for count, second in self._counted(self.images, self.seconds)]

    def figures(self) -> Summary:
        """Return a summary with only throughput and seconds, over the steps that count.

        The mean is all images over all seconds; the deviation is that of the steps' rates.
        """
        rates, seconds = self.rates(), [second for (second,) in self._counted(self.seconds)]
        images = sum(count for (count,) in self._counted(self.images))
        return Summary(
            images_per_second_mean=images / sum(seconds) if seconds else None,
            images_per_second_std=statistics.pstdev(rates) if rates else None,
            step_seconds_median=statistics.median(seconds) if seconds else None,
            seconds_total=time.time() - self.started,
            seconds_to_first_step=self.first_step,
        )

    def utilisation(self, threads: int) -> float | None:
        """Return the processor time of the counted steps over their time, times ``threads``."""
        rows = list(self._counted(self.processor, self.seconds))
        seconds = threads * sum(second for _, second in rows)
        return sum(busy for busy, _ in rows) / seconds if seconds else None

    def step_split(self, communicator: Communicator) -> StepSplit | None:
        """Return the split of the mean counted step; all ranks must call it."""
        rows = list(self._counted(self.seconds, self.data, self.blocked))
        mine = np.array(rows[-MAX_STEPS:], np.float64).reshape(-1, 3)
        ranks = [np.frombuffer(row).reshape(-1, 3) for row in communicator.gather(mine.tobytes())]
        return split(np.stack(ranks)) if len(mine) else None
