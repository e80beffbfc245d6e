"""``submit --follow``: the state of a job and the new lines of its log, until it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TextIO

from hvdtrain.commands.submit import chain
from hvdtrain.commands.submit.dialect import (
    ENDED,
    GONE,
    NEVER_RAN,
    RUNNING,
    Dialect,
    State,
    array_state,
)
from hvdtrain.errors import EXIT_INTERRUPTED, HvdtrainError
from hvdtrain.system.runtime.command import Command, run

log = logging.getLogger(__name__)

LOG_PERIOD = 1.0  # seconds between two reads of the log
QUERY_FIRST, QUERY_LAST = 1.0, 10.0  # seconds between two queries, which load the batch system
QUERY_TIMEOUT = 60.0  # seconds
SERVER_TIMEOUT = 600.0  # seconds without an answer before an error: a server is restarted meanwhile
NO_LOG = 30.0  # seconds that a job may run without a log before the reason is shown
DELIVERY = 10.0  # seconds in which PBS may still deliver the log of a job that has ended


@dataclass(frozen=True)
class SubmittedJob:
    """A submitted job."""

    id: str  # of the batch system
    logs: Mapping[str, Path]  # by the number of the task of an array, or of the job


def follow(
    dialect: Dialect,
    jobs: Sequence[SubmittedJob],
    exit_file: Path,
    chain_file: Path | None,
    out: TextIO,
) -> State:
    """Follow a job or a chain of jobs to the end; return the state then, of a chain its last job's.

    Ctrl-C stops following, not the job.

    Args:
        dialect: the batch system.
        jobs: the job, or the jobs of a chain in order.
        exit_file: file of the exit code, without the suffix of a dot and the number of job or task.
        chain_file: the file through which the jobs of a chain communicate.
        out: output for the lines of the log.

    Raises:
        HvdtrainError: the batch system no longer answers, or cannot start a job.
    """
    end = NEVER_RAN
    for number, job in enumerate(jobs):
        delete = dialect.delete([link.id for link in reversed(jobs[number:])]).show()
        try:
            state = FollowedJob(dialect, job, exit_file, out).wait()
        except KeyboardInterrupt:
            stop = Command((*dialect.stop, job.id)).show()
            log.info("\njob %s continues; to save and end it: %s", job.id, stop)
            log.info("to delete it: %s", delete)
            return State(RUNNING, "running", EXIT_INTERRUPTED)
        if state.failure:
            where = next(iter(job.logs.values())).absolute()
            raise HvdtrainError(
                f"job {job.id}: {state.failure}; log {where}; to delete it: {delete}"
            )
        if state.ran:
            end = state
        if chain_file and chain.is_last(chain.read(chain_file), job.id):
            break
    return end


def query_state(
    dialect: Dialect, job: str, meanwhile: Callable[[], None] | None = None
) -> tuple[State | None, str]:
    """Return the state of a job, or None and the output of the query; see ``run``."""
    output = ""
    for query in dialect.queries(job):
        result = run(query.command, timeout=QUERY_TIMEOUT, meanwhile=meanwhile)
        state = query.read(result.output)
        if state and (result.ok or state.phase == GONE):
            return state, ""
        output = " ".join(result.output.split()) or f"nothing from {query.command.argv[0]}"
    return None, output


@dataclass
class Tail:
    """The new lines of a growing file."""

    path: Path
    read: int = 0  # bytes read so far

    def new(self, *, partial: bool = False) -> str:
        """Return the text since the last call; an incomplete last line only if ``partial``."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.read)
                data = file.read()
        except (OSError, ValueError):  # no file yet, or no name of a file
            return ""
        if not partial:
            data = data[: data.rfind(b"\n") + 1]
        self.read += len(data)
        return data.decode(errors="replace")


@dataclass
class FollowedJob:
    """A job that is followed."""

    dialect: Dialect
    job: SubmittedJob
    exit_file: Path
    out: TextIO
    tails: dict[Path, Tail] = field(default_factory=dict)
    running: float | None = None  # start of running without a log (monotonic clock)
    host: str = ""  # its first host
    answered: float = 0.0  # last answer of the batch system (monotonic clock)

    def wait(self) -> State:
        """Show changes until the job has ended or has failed to start; return its final state."""
        shown, wait, due, self.answered = "", QUERY_FIRST, 0.0, time.monotonic()
        self.tails = {path: Tail(path) for path in self.job.logs.values()}
        while True:
            if time.monotonic() >= due:
                state = self._query()
                wait = min(QUERY_LAST, 1.2 * wait)
                due = time.monotonic() + wait
                if state.failure:
                    return state
                if state.phase in (ENDED, GONE):
                    return self._end(state)
                if state.detail != shown:
                    shown = state.detail
                    log.info("job %s: %s", self.job.id, shown)
                if state.phase == RUNNING:
                    self._check_log()
            self._show()
            time.sleep(LOG_PERIOD)

    def _query(self) -> State:
        """Return the state of the job; without a phase if the batch system does not answer."""
        state, output = query_state(self.dialect, self.job.id, self._show)
        if state:
            self.answered, self.host = time.monotonic(), state.host or self.host
            if not any(path.exists() for path in self.tails):
                # The path that submit chose comes first: PBS writes letters outside ASCII as "^C".
                self.tails |= {path: Tail(path) for path in state.logs if path.exists()}
            return state
        if all(map(self._exit_text, self.job.logs)):  # it has ended
            return State(GONE)
        minutes, reason = f"{SERVER_TIMEOUT / 60:g} min", ""
        if time.monotonic() > self.answered + SERVER_TIMEOUT:
            reason = f"no answer of the batch system for {minutes} ({output}); the job continues"
        return State("", f"no answer of the batch system, trying for {minutes}", failure=reason)

    def _check_log(self) -> None:
        """Report once why there may be no log while the job runs."""
        now = time.monotonic()
        if self.running is None:
            self.running = now
        late = self.running + NO_LOG < now and not any(path.exists() for path in self.tails)
        if late and self.dialect.name == "pbs":
            self.running = float("inf")
            log.info(
                "job %s: no log yet; it is delivered after the job if $usecp in the configuration "
                "of PBS's mom does not declare this directory as shared",
                self.job.id,
            )

    def _end(self, state: State) -> State:
        """Show the last lines and the end of the job, by its exit file if PBS has forgotten it."""
        if state.ran:
            self._last_lines(state)
        numbers = list(self.job.logs)
        if numbers == [chain.number(self.job.id)]:
            state = self._complete(state, numbers[0])
        else:
            tasks = {n: self._complete(state.tasks.get(n, State(GONE)), n) for n in numbers}
            state = array_state(tasks)
            for number, task in tasks.items():
                path = next(iter(task.logs), None)
                suffix = f"; log {path}" if task.ran and path and path.exists() else ""
                log.info("task %s: %s%s", number, self._summary(task), suffix)
        log.info("job %s: %s", self.job.id, self._summary(state))
        return state

    def _summary(self, state: State) -> str:
        """Return how a job or a task ended, and where to find a log that was not delivered."""
        if not state.ran:
            return state.detail
        code = "unknown" if state.exit_code is None else state.exit_code
        lost = [str(path) for path in state.logs if not path.exists()]
        if not lost or state.tasks:
            return f"{state.detail}, exit code {code}"
        host = state.host or self.host or "the first node of the job"
        return f"{state.detail}, exit code {code}; {self.dialect.lost_log(lost[0], host)}"

    def _complete(self, state: State, number: str) -> State:
        """Complete a state by the exit file of the script: PBS may forget a job at its end."""
        path = self.job.logs[number]
        if state.ran and (path.exists() or not any(log.exists() for log in state.logs)):
            state = replace(state, logs=(path,))
        if state.phase == ENDED and (state.exit_code is not None or not state.ran):
            return state
        text = self._exit_text(number)
        seen = self.running is not None and number == chain.number(self.job.id)
        if text is None and not path.exists() and not seen:
            return NEVER_RAN
        code = int(text) if text and text.strip().isdecimal() else None
        return State(ENDED, state.detail or "ended", code, state.logs)

    def _exit_text(self, number: str) -> str | None:
        """Return the content of the exit file: empty while the job runs; None: no file."""
        try:
            return self.exit_file.with_name(f"{self.exit_file.name}.{number}").read_text()
        except OSError:
            return None

    def _show(self, *, partial: bool = False) -> None:
        for tail in self.tails.values():
            self.out.write(tail.new(partial=partial))
        self.out.flush()

    def _last_lines(self, state: State) -> None:
        """Show the rest of the log, which may be delivered shortly after the end of the job."""
        end = time.monotonic() + DELIVERY
        numbers = self.job.logs if state.exit_code is None else ()
        while time.monotonic() < end:
            if all(path.exists() for path in self.tails) and all(map(self._exit_text, numbers)):
                break
            time.sleep(LOG_PERIOD)
        self._show(partial=True)
