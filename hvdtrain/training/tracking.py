"""``--tracker``: the trackers of a run, each in a thread, on the writing rank only.

The queue of a thread is bounded: a slow server never delays a step. A tracker that fails is left
out with a warning, and the training continues.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path

from hvdtrain.errors import UsageError
from hvdtrain.steps.summary import Stopped, Summary
from hvdtrain.system.files import check_folder
from hvdtrain.system.runtime.exit import process_status
from hvdtrain.training.plan import Session
from hvdtrain.training.summary import environment, non_default_options
from hvdtrain.training.trackers import (
    TRACKERS,
    Figures,
    LogEntry,
    RunFacts,
    Tracker,
    is_local,
    name_and_address,
    plain_name,
    without_password,
)

log = logging.getLogger(__name__)

CAPACITY = 1000  # records that wait for a tracker; further ones are dropped
PATIENCE = 30.0  # seconds for all trackers to write the last records
BRIEF = 2.0  # the same if the process may be killed; the longest wait without a message
LONGEST = 300  # characters of an error


def check_trackers(choices: Sequence[str]) -> None:
    """Check the values of ``--tracker`` before a training, without importing a package.

    Raises:
        UsageError: a package is not installed, or a directory is not writable.
    """
    for choice in choices:
        name, where = name_and_address(choice, os.environ)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # the folder of earlier runs has the same name
            remedy = f"pip install 'hvdtrain[{name}]'"
            raise UsageError(f"--tracker {name}: {name} is not installed; {remedy}")
        if is_local(where):
            check_folder(Path(where.removeprefix("file:")), f"--tracker {name}={where}")


def open_trackers(session: Session, training_id: str = "", step: int = 0) -> Trackers:
    """Start the trackers of a run, on the writing rank; they end with the process at the latest.

    Args:
        session: of the run.
        training_id: identity of the training, of which this run may continue another one; by
            default a new one.
        step: number of updates done before.

    Raises:
        UsageError: a tracker cannot be started here.
    """
    choices = session.options.tracker
    if not choices:
        return Trackers()
    check_trackers(choices)  # also those of ranks that a launcher does not report
    facts = _facts(session, training_id or new_training_id(), step)
    trackers = Trackers([TrackerThread(choice, facts) for choice in choices])
    process_status.at_exit.append(lambda code: trackers.close(None))  # if the run has failed
    return trackers


def new_training_id() -> str:
    """Return an identity for a training, which its checkpoints keep."""
    return uuid.uuid4().hex[:12]


def _facts(session: Session, training_id: str, step: int) -> RunFacts:
    options, world, name = session.options, session.adapter.world, session.workload.name
    method = {
        "framework": options.framework,
        "strategy": session.adapter.name,
        "precision": session.task.options.precision,
        "world_size": world.size,
        "hosts": world.hosts,
    }
    plan = dataclasses.asdict(session.plan)
    known = non_default_options(options) | plan | method
    machine = {k: v for k, v in environment(world).items() if k != "ended"}
    return RunFacts(
        project=plain_name(f"hvdtrain-{name}"),
        name=f"{session.plan.model} {session.adapter.name} {world.size}",
        parameters={k: v for k, v in known.items() if v is not None},
        environment=machine,
        training_id=plain_name(training_id),  # of a checkpoint, perhaps of someone else
        step=step,
    )


class Trackers:
    """The trackers of this rank, which may have none; starts their threads."""

    def __init__(self, threads: Sequence[TrackerThread] = ()) -> None:
        self._threads = threads
        for thread in threads:  # not before all packages have started: a run would stay open
            thread.start()

    def write(self, kind: str, figures: Figures) -> None:
        """Hand figures of a ``step`` or ``epoch`` to each tracker; does not wait."""
        for thread in self._threads:
            thread.add(LogEntry(kind, figures))

    def close(
        self, summary: Summary | None, show: Callable[[str], None] = lambda line: None
    ) -> None:
        """End the run in each tracker, and show where it is; a second call does nothing.

        Args:
            summary: of the run; None if it failed.
            show: shows a line to the user.
        """
        threads, self._threads = self._threads, ()
        in_haste = summary is None or summary.stopped is Stopped.PREEMPTED
        end = time.monotonic() + (BRIEF if in_haste else PATIENCE)
        for thread in threads:
            thread.finish(summary)
        for thread in threads:
            thread.join(min(BRIEF, max(0.0, end - time.monotonic())))
            if thread.is_alive() and not in_haste:
                show(f"waiting for {thread.choice}, at most {PATIENCE:.0f} s")
            thread.join(max(0.0, end - time.monotonic()))
            thread.report(show)


class TrackerThread(threading.Thread):
    """The thread of a tracker, and the records that it has not written yet.

    Raises:
        UsageError: the package cannot be imported, or refuses to start.
    """

    def __init__(self, choice: str, facts: RunFacts) -> None:
        super().__init__(name=f"tracker {choice}", daemon=True)
        self.choice, where = name_and_address(choice, os.environ)
        self._facts = facts
        self._changed = threading.Condition()
        self._records: list[LogEntry] = []
        self._dropped = 0
        self._ended = self._failed = False
        self._summary: Summary | None = None
        try:
            self._tracker: Tracker = TRACKERS[self.choice](where)
        except Exception as error:
            raise UsageError(f"--tracker {choice} cannot be started: {_line(error)}") from error

    def add(self, record: LogEntry) -> None:
        """Queue a record, unless the queue is full."""
        with self._changed:
            if len(self._records) < CAPACITY:
                self._records.append(record)
            else:
                self._dropped += 1
            self._changed.notify()

    def finish(self, summary: Summary | None) -> None:
        """End the thread when all records are written."""
        with self._changed:
            self._summary, self._ended = summary, True
            self._changed.notify()

    def run(self) -> None:
        """Write all records; a failure ends the thread, not the training."""
        try:
            self._tracker.start(self._facts)
            while records := self._next():
                self._tracker.write(records)
            self._tracker.close(self._summary)
        except (Exception, SystemExit) as error:
            self._failed = True
            problem = f"{_line(error)}; the run continues without it"
            log.warning("--tracker %s: %s", self.choice, problem)

    def _next(self) -> list[LogEntry]:
        """Wait for records; return all that wait, or none at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._records or self._ended)
            records, self._records = self._records, []
            return records

    def report(self, show: Callable[[str], None]) -> None:
        """Show where the run is, and warn about what is missing there."""
        if self.is_alive():
            process_status.hangs = True  # its package may also wait when the process exits
            log.warning(
                "--tracker %s has not finished in time: its last records may be missing",
                self.choice,
            )
        if self._dropped and not self._failed:
            log.warning(
                "--tracker %s: %d records were dropped, as it was too slow",
                self.choice,
                self._dropped,
            )
        if self._tracker.note and not self._failed:
            show(self._tracker.note)


def _line(error: BaseException) -> str:
    """Return type and message of an error as one short line."""
    message = without_password(" ".join(str(error).split()))
    return f"{type(error).__name__}: {message}"[:LONGEST]
