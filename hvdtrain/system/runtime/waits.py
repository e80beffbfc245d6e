"""Detection of mismatched collective calls: calls that all ranks make together are counted.

If only some ranks make such a call (``if rank == 0: save_checkpoint(...)``), they hang without a
message from MPI. So every rank counts the calls that communicate, and the sums of gradients among
them; its last one is the end of its program. A rank that has waited in one for ``REPORT_DELAY``
seconds reports it to rank 0, on the connections of ``failure_detector``, and withdraws the report
when the call ends. Call number n must be the same call on all ranks: ranks that wait in different
calls (``_differ``) are ended at once. A rank that has not made the call may still do so; after
``LATE_TIMEOUT`` seconds it is reported once.
"""

from __future__ import annotations

import functools
import itertools
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import msgspec

from hvdtrain.errors import EXIT_FAILURE, HvdtrainError
from hvdtrain.system.runtime.exit import fail

log = logging.getLogger(__name__)

Method = TypeVar("Method", bound=Callable[..., Any])

REPORT_DELAY = 1.0
LATE_TIMEOUT = 30.0
POLL_INTERVAL = 0.5  # seconds between checks

SUM = "the sum of the gradients"  # the call of a backward pass or an update
WEIGHTS = "the sum of the weights of the losses"
END = "the end of the program"
ALL = (
    "all ranks must make the same calls in the same order, and none of them under a condition on "
    "the rank such as `if rank == 0`"
)


class Wait(NamedTuple):
    """A call in which a rank waits."""

    number: int
    sums: int  # how many of the calls up to this one are sums
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
        # Context of a call by its name, e.g. to see it in a profile.
        self.mark: Callable[[str], AbstractContextManager[object]] = nullcontext
        self.number = self._sums = 0  # numbers of calls and of sums begun
        self._call: Wait | None = None
        self.traced: list[Callable[[], TracedCalls]] = []  # counters of the compiled sums
        self._traced_call: Wait | None = None
        self._reported = self._warned = 0  # numbers of calls
        self._waiting: dict[int, Wait] = {}  # reports of the other ranks, by rank
        self._lock = threading.Lock()  # a call must not end while it is being reported
        self.all_ended = threading.Event()  # all ranks are at the end of their programs

    def watch(self) -> None:
        """Start checking, in a thread."""
        threading.Thread(target=self._watch, name="waits", daemon=True).start()

    @contextmanager
    def during(self, call: str) -> Iterator[None]:
        """Count ``call``, which all ranks make together; nested calls are not counted."""
        if self._call is not None:
            yield
            return
        self.number += 1
        self._sums += call == SUM
        # The end is reported at once.
        since = time.monotonic() - (REPORT_DELAY if call == END else 0.0)
        self._call = wait = Wait(self.number, self._sums, call, since)
        try:
            with self.mark(call):
                yield
        except Exception as error:
            if not isinstance(error, HvdtrainError):  # as another rank has ended?
                self._call = wait._replace(since=since - REPORT_DELAY)
                self.check()
            raise
        finally:
            if call != END:
                with self._lock:
                    self._call = None
                if self._reported:
                    self._report(None)

    def finish(self) -> None:
        """Wait at the end of the program for the other ranks, at most ``LATE_TIMEOUT`` seconds.

        Rank 0 names one that still waits in a call; a library that is shut down would not.
        """
        deadline = time.monotonic() + LATE_TIMEOUT
        with self.during(END):
            while not self.all_ended.is_set() and time.monotonic() < deadline:
                self._reported = 0  # again: the first reports may precede the connection
                self.check()
                self.all_ended.wait(POLL_INTERVAL)

    def take(self, report: bytes) -> None:
        """Record, on rank 0, the report of another rank; an invalid one is ignored."""
        try:
            rank, number, sums, call = msgspec.json.decode(report, type=tuple[int, int, int, str])
        except (ValueError, RecursionError) as error:
            log.debug("invalid report of a rank: %s", error)
            return
        if rank not in range(len(self.hosts)):
            return
        self._waiting.pop(rank, None)
        if number:  # not withdrawn
            self._waiting[rank] = Wait(number, sums, call, time.monotonic() - REPORT_DELAY)
        calls = [wait.call for wait in self._waiting.values()]
        if calls.count(END) == len(self.hosts) - 1:
            self.all_ended.set()

    def _watch(self) -> None:
        while True:
            time.sleep(POLL_INTERVAL)
            self.check()

    def check(self) -> None:
        """Report a long wait to rank 0; on rank 0 warn about late ranks, or end the job."""
        mine = self._current()
        if mine != self._current():  # a call has begun or ended meanwhile
            return
        if mine and time.monotonic() - mine.since < REPORT_DELAY:
            mine = None
        if self.rank:
            self._report(mine)
            return
        waiting = {**self._waiting, **({0: mine} if mine else {})}
        distinct = {wait._replace(since=0.0) for wait in waiting.values()}
        if any(itertools.starmap(_differ, itertools.combinations(sorted(distinct), 2))):
            fail(
                f"deadlock, the ranks wait in different calls: {self._calls(waiting)}. Correct the "
                f"program: {ALL}",
                code=EXIT_FAILURE,
                agreed=True,
            )
        for number in sorted({wait.number for wait in distinct if wait.call != END}):
            if self._warned < number:
                self._warn_if_late(number, waiting)

    def _report(self, wait: Wait | None) -> None:
        """Report ``wait`` to rank 0 once, unless it has ended; None: withdraw the last report."""
        number, sums, call = wait[:3] if wait else (0, 0, "")
        with self._lock:
            if number != self._reported and (wait is None or wait == self._current()):
                self._reported = number
                self.report(json.dumps([self.rank, number, sums, call]).encode())

    def _current(self) -> Wait | None:
        """Return the current call of this rank, numbered among counted and traced calls."""
        traced, call = [read() for read in self.traced], self._call
        begun, done = sum(calls.begun for calls in traced), sum(calls.done for calls in traced)
        if call:
            return call._replace(number=call.number + begun, sums=call.sums + begun)
        if begun == done:
            return None
        if self._traced_call is None or self._traced_call.number != self.number + begun:
            self._traced_call = Wait(self.number + begun, self._sums + begun, SUM, time.monotonic())
        return self._traced_call

    def _warn_if_late(self, number: int, waiting: dict[int, Wait]) -> None:
        """Warn once about ranks for which others have waited ``LATE_TIMEOUT`` seconds in a call."""
        here = [rank for rank in sorted(waiting) if waiting[rank].number == number]
        reached = {rank for rank, wait in waiting.items() if wait.number >= number}
        late = [rank for rank in range(len(self.hosts)) if rank not in reached]
        if late and time.monotonic() - min(waiting[rank].since for rank in here) >= LATE_TIMEOUT:
            self._warned = number
            log.warning(
                "%.0f s in %s: %s waiting for %s, which may be busy, or may never make the call: "
                "%s. The job continues (`hvdtrain launch --timeout SECONDS` ends a silent job)",
                LATE_TIMEOUT,
                waiting[here[0]].call,
                self._name(here),
                self._name(late),
                ALL,
            )

    def _calls(self, waiting: dict[int, Wait]) -> str:
        """Return the calls in which ranks wait as text."""
        ranks: dict[str, list[int]] = {}
        for rank, wait in sorted(waiting.items()):
            ranks.setdefault(wait.call, []).append(rank)
        named = ((self._name(ranks[call]), call) for call in ranks)
        return ", ".join(f"{name} {'at' if call == END else 'in'} {call}" for name, call in named)

    def _name(self, ranks: Sequence[int]) -> str:
        named = [f"{rank} on {self.hosts[rank]}" for rank in ranks[:4]]
        more = f" and {len(ranks) - 4} more" if len(ranks) > 4 else ""
        return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(named)}{more}"


def _differ(first: Wait, later: Wait) -> bool:
    """Return whether two ranks have made different calls, so that neither wait can end.

    ``later`` has no smaller number. If it is larger, its rank has completed the other one's call,
    which may take longer on some ranks: unless that is a sum that it has not made, or the end.
    """
    if first.number == later.number or first.call == END:
        return first.call != later.call
    return first.call == SUM != later.call and later.sums < first.sums
