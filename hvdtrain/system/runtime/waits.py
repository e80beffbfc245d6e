"""Calls that all ranks make together, counted, so that a rank that does not come can be named.

A rank that makes such a call alone (``if rank == 0: save_checkpoint(...)``) waits in it for ever,
and MPI says nothing. Every rank counts these calls. One that has waited in one for ``REPORT``
seconds sends the number and the name to rank 0, on the connections of ``failure_detector``. Call
number n is the same call on all ranks, or the program is wrong: ranks that wait in different calls
of one number can be ended at once. A rank that has not come may still do so; after ``PATIENCE``
seconds it is named, once, and waited for.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from hvdtrain.errors import EXIT_FAILURE
from hvdtrain.system.runtime.exit import fail

log = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

REPORT = 1.0
PATIENCE = 30.0
LOOK = 0.5  # seconds between two looks at the clock

SUM = "the sum of the gradients"  # the call that a backward pass or an update makes
ALL = (
    "all ranks must make the same calls in the same order: none of them belongs under a test of "
    "the rank, such as `if rank == 0`"
)


class Wait(NamedTuple):
    """A rank in a call."""

    number: int
    call: str
    since: float  # in seconds of this process's monotonic clock


class TracedCalls(NamedTuple):
    """Calls that a compiled step makes, where Python counts none: by now, since the start."""

    begun: int
    done: int


class Counts(NamedTuple):
    """What this rank has called so far."""

    number: int  # of the counted calls begun
    call: Wait | None  # the counted one that it is in
    traced: TracedCalls


def together(method: Method) -> Method:
    """Count a method that all ranks call together, of an object with ``waits``."""

    @functools.wraps(method)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.waits.during(method.__name__):
            return method(self, *args, **kwargs)

    return counted  # type: ignore[return-value]


class Waits:
    """The calls of this rank; on rank 0 also the reports of the others.

    Args:
        rank: of this process.
        hosts: name of the host of each rank, by rank.
        report: sends bytes to rank 0.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], report: Callable[[bytes], None] = lambda data: None
    ) -> None:
        self.rank, self.hosts, self.report = rank, hosts, report
        self.before: Callable[[], None] = lambda: None  # what is due before the next call
        self.number = 0  # of calls begun
        self._call: Wait | None = None
        self.traced: list[Callable[[], TracedCalls]] = []  # what each compiled sum has counted
        self._traced_call: Wait | None = None
        self._reported = self._told = 0  # numbers of calls
        self._waiting: dict[int, Wait] = {}  # what other ranks have reported, by rank

    def watch(self) -> None:
        """Look at the clock from now on, in a thread of its own."""
        threading.Thread(target=self._watch, name="waits", daemon=True).start()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Count ``call``, which all ranks make together; calls within it are part of it."""
        if self._call is not None:
            yield
            return
        if call != SUM:
            self.before()
        self.number += 1
        self._call = Wait(self.number, call, time.monotonic())
        try:
            yield
        finally:
            self._call = None

    def take(self, report: bytes) -> None:
        """Note, on rank 0, what another rank has reported."""
        rank, number, call = json.loads(report)
        self._waiting[rank] = Wait(number, call, time.monotonic() - REPORT)

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK)
            self.look()

    def look(self) -> None:
        """Report a long wait to rank 0; on rank 0, tell who waits for whom, or end the job."""
        counts = self._counts()
        current = self._current(counts)
        if counts != self._counts():  # at a boundary of two calls
            return
        mine = current
        if mine and time.monotonic() - mine.since < REPORT:
            mine = None
        if self.rank:
            if mine and self._reported != mine.number:
                self._reported = mine.number
                self.report(json.dumps([self.rank, mine.number, mine.call]).encode())
            return
        # A call that rank 0 has left behind is over for all.
        over = counts.number + counts.traced.begun - (current is not None)
        waiting = {rank: wait for rank, wait in self._waiting.items() if wait.number > over}
        if mine:
            waiting[0] = mine
        for number in sorted({wait.number for wait in waiting.values()}):
            calls = {rank: w.call for rank, w in sorted(waiting.items()) if w.number == number}
            if len(set(calls.values())) > 1:
                where = ", ".join(f"{self._name([rank])} in {calls[rank]}" for rank in calls)
                fail(
                    f"the ranks wait in different calls, so for ever: {where}. Correct the "
                    f"program: {ALL}",
                    code=EXIT_FAILURE,
                    agreed=True,
                )
            if self._told < number:
                self._tell_who_is_late(number, waiting)

    def _counts(self) -> Counts:
        traced = [read() for read in self.traced]
        begun, done = sum(one.begun for one in traced), sum(one.done for one in traced)
        return Counts(self.number, self._call, TracedCalls(begun, done))

    def _current(self, counts: Counts) -> Wait | None:
        """Return the call that this rank is in, numbered among counted and traced ones."""
        number, call, (begun, done) = counts
        if call:
            return call._replace(number=call.number + begun)
        if begun == done:
            return None
        if self._traced_call is None or self._traced_call.number != number + begun:
            self._traced_call = Wait(number + begun, SUM, time.monotonic())
        return self._traced_call

    def _tell_who_is_late(self, number: int, waiting: dict[int, Wait]) -> None:
        """Name the ranks that have let others wait in a call for ``PATIENCE`` seconds; once."""
        here = [rank for rank in sorted(waiting) if waiting[rank].number == number]
        late = [rank for rank in range(len(self.hosts)) if rank not in waiting]
        if late and time.monotonic() - min(waiting[rank].since for rank in here) >= PATIENCE:
            self._told = number
            log.warning(
                "%.0f s in %s: %s waiting for %s, which may still compute, or never come: %s. It "
                "is waited for (`hvdtrain launch --timeout SECONDS` ends a job that says no more)",
                *(PATIENCE, waiting[here[0]].call, self._name(here), self._name(late), ALL),
            )

    def _name(self, ranks: Sequence[int]) -> str:
        named = [f"{rank} on {self.hosts[rank]}" for rank in ranks[:4]]
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"
