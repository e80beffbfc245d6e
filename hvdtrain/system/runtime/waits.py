"""Detection of mismatched collective calls: calls that all ranks make together are counted.

If only some ranks make such a call (``if rank == 0: save_checkpoint(...)``), they hang without a
message from MPI. So every rank counts these calls. A rank that has waited in one for ``REPORT``
seconds sends its number and name to rank 0, on the connections of ``failure_detector``. Call number
n must be the same call on all ranks: ranks that wait in different calls of the same number are
ended at once. A rank that has not made the call may still do so; after ``PATIENCE`` seconds it is
reported once.
"""

from __future__ import annotations

import functools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import msgspec

from hvdtrain.errors import EXIT_FAILURE
from hvdtrain.system.runtime.exit import fail

log = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

REPORT = 1.0
PATIENCE = 30.0
LOOK = 0.5  # seconds between checks

SUM = "the sum of the gradients"  # the call of a backward pass or an update
ALL = (
    "all ranks must make the same calls in the same order, and none of them under a condition on "
    "the rank such as `if rank == 0`"
)


class Wait(NamedTuple):
    """A call in which a rank waits."""

    number: int
    call: str
    since: float  # seconds of this process's monotonic clock


class TracedCalls(NamedTuple):
    """Numbers of calls of a compiled step since the start, which Python does not count."""

    begun: int
    done: int


def together(method: Method) -> Method:
    """Decorate a method that all ranks call together, of an object with ``waits``."""

    @functools.wraps(method)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.waits.during(method.__name__):
            return method(self, *args, **kwargs)

    return counted  # type: ignore[return-value]


class Waits:
    """Calls of this rank, and on rank 0 the reports of the other ranks.

    Args:
        rank: rank of this process.
        hosts: host names by rank.
        report: function that sends bytes to rank 0.
    """

    def __init__(
        self, rank: int, hosts: Sequence[str], report: Callable[[bytes], None] = lambda data: None
    ) -> None:
        self.rank, self.hosts, self.report = rank, hosts, report
        self.before: Callable[[], None] = lambda: None  # called before the next call
        # Context of a call by its name, e.g. to see it in a profile.
        self.mark: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.number = 0  # number of calls begun
        self._call: Wait | None = None
        self.traced: list[Callable[[], TracedCalls]] = []  # counters of the compiled sums
        self._traced_call: Wait | None = None
        self._reported = self._warned = 0  # numbers of calls
        self._waiting: dict[int, Wait] = {}  # reports of the other ranks, by rank

    def watch(self) -> None:
        """Start checking, in a thread."""
        threading.Thread(target=self._watch, name="waits", daemon=True).start()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Count ``call``, which all ranks make together; nested calls are not counted."""
        if self._call is not None:
            yield
            return
        if call != SUM:
            self.before()
        self.number += 1
        self._call = Wait(self.number, call, time.monotonic())
        try:
            with self.mark(call):
                yield
        finally:
            self._call = None

    def take(self, report: bytes) -> None:
        """Record, on rank 0, the report of another rank; an invalid one is ignored."""
        try:
            rank, number, call = msgspec.json.decode(report, type=tuple[int, int, str])
        except (ValueError, RecursionError) as error:
            log.debug("invalid report of a rank: %s", error)
            return
        if rank not in range(len(self.hosts)):
            return
        self._waiting[rank] = Wait(number, call, time.monotonic() - REPORT)

    def _watch(self) -> None:
        while True:
            time.sleep(LOOK)
            self.check()

    def check(self) -> None:
        """Report a long wait to rank 0; on rank 0 warn about late ranks, or end the job."""
        counts = number, call, traced = self._counts()
        current = self._current(number, call, traced)
        if counts != self._counts():  # a call has begun or ended meanwhile
            return
        mine = current
        if mine and time.monotonic() - mine.since < REPORT:
            mine = None
        if self.rank:
            if mine and self._reported != mine.number:
                self._reported = mine.number
                self.report(json.dumps([self.rank, mine.number, mine.call]).encode())
            return
        # A call that rank 0 has completed is complete on all ranks.
        over = number + traced.begun - (current is not None)
        waiting = {rank: wait for rank, wait in self._waiting.items() if wait.number > over}
        if mine:
            waiting[0] = mine
        for number in sorted({wait.number for wait in waiting.values()}):
            calls = {rank: w.call for rank, w in sorted(waiting.items()) if w.number == number}
            if len(set(calls.values())) > 1:
                pairs = ", ".join(f"{self._name([rank])} in {calls[rank]}" for rank in calls)
                fail(
                    f"deadlock, the ranks wait in different calls: {pairs}. Correct the program: "
                    f"{ALL}",
                    code=EXIT_FAILURE,
                    agreed=True,
                )
            if self._warned < number:
                self._warn_if_late(number, waiting)

    def _counts(self) -> tuple[int, Wait | None, TracedCalls]:
        """Return the number of counted calls begun, the current one, and the traced calls."""
        traced = [read() for read in self.traced]
        begun, done = sum(calls.begun for calls in traced), sum(calls.done for calls in traced)
        return self.number, self._call, TracedCalls(begun, done)

    def _current(self, number: int, call: Wait | None, traced: TracedCalls) -> Wait | None:
        """Return the current call of this rank, numbered among counted and traced calls."""
        begun, done = traced
        if call:
            return call._replace(number=call.number + begun)
        if begun == done:
            return None
        if self._traced_call is None or self._traced_call.number != number + begun:
            self._traced_call = Wait(number + begun, SUM, time.monotonic())
        return self._traced_call

    def _warn_if_late(self, number: int, waiting: dict[int, Wait]) -> None:
        """Warn once about ranks for which others have waited ``PATIENCE`` seconds in a call."""
        here = [rank for rank in sorted(waiting) if waiting[rank].number == number]
        late = [rank for rank in range(len(self.hosts)) if rank not in waiting]
        if late and time.monotonic() - min(waiting[rank].since for rank in here) >= PATIENCE:
            self._warned = number
            log.warning(
                "%.0f s in %s: %s waiting for %s, which may be busy, or may never make the call: "
                "%s. The job continues (`hvdtrain launch --timeout SECONDS` ends a silent job)",
                PATIENCE,
                waiting[here[0]].call,
                self._name(here),
                self._name(late),
                ALL,
            )

    def _name(self, ranks: Sequence[int]) -> str:
        named = [f"{rank} on {self.hosts[rank]}" for rank in ranks[:4]]
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"
