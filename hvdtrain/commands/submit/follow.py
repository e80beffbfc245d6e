"""``submit --follow``: the state of a job, and the new lines of its log, until it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
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
    of_array,
)
from hvdtrain.errors import EXIT_INTERRUPTED, HvdtrainError
from hvdtrain.system.runtime.command import run

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between two looks at the log, which is a file
ASK_FIRST, ASK_LAST = 1.0, 10.0  # and between two questions, which are work for a whole cluster
ANSWER = 30.0  # seconds that an answer may take
MISSES = 5  # questions without an answer before we give up
NO_LOG = 30.0  # seconds that a job may run without a log before we say why
DELIVERY = 10.0  # seconds in which PBS may still bring the log of a job that has ended


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted."""

    id: str  # as the batch system calls it
    logs: Mapping[str, Path]  # by the number of the task of an array, else of the job


@dataclass(frozen=True)
class Ended:
    """How the following ended, most often with the job."""

    state: str  # in the batch system's words
    code: int | None  # exit code; of a chain, of its last job that ran; None: unknown
    tasks: Mapping[str, State] = field(default_factory=dict)  # how each task of an array ended


def follow(
    dialect: Dialect,
    jobs: Sequence[Submitted],
    exit_file: Path,
    chain_file: Path | None,
    out: TextIO,
) -> Ended:
    """Follow a job, or a chain of them, to the end; Ctrl-C ends only the following.

    Args:
        dialect: the batch system.
        jobs: the job, or the jobs of a chain in order.
        exit_file: where a job leaves its exit code, but for a dot and its number or its task's.
        chain_file: the file through which the jobs of a chain communicate.
        out: where the lines of the log go.

    Raises:
        HvdtrainError: the batch system no longer answers, or will not start a job.
    """
    ended = Ended(NEVER_RAN.detail, None)
    for number, job in enumerate(jobs):
        delete = dialect.delete([one.id for one in reversed(jobs[number:])]).show()
        try:
            state = FollowedJob(dialect, job, exit_file, out).to_the_end()
        except KeyboardInterrupt:
            log.info("\njob %s goes on; to end it: %s", job.id, delete)
            return Ended("running", EXIT_INTERRUPTED)
        if state.failure:
            raise HvdtrainError(f"job {job.id}: {state.failure}. To delete it: {delete}")
        if state.ran:
            ended = Ended(state.detail, state.exit_code, state.tasks)
        if chain_file and chain.is_last(chain.read(chain_file), job.id):
            break
    return ended


def ask(dialect: Dialect, job: str) -> tuple[State | None, str]:
    """Ask for the state of a job: the state, or None and the output instead."""
    said = ""
    for query in dialect.queries(job):
        result = run(query.command, timeout=ANSWER)
        state = query.read(result.output)
        if state and (result.ok or state.phase == GONE):
            return state, ""
        said = said or " ".join(result.output.split())
    return None, said


@dataclass
class Tail:
    """The lines of a file as they come."""

    path: Path
    read: int = 0  # bytes that have been shown

    def new(self, *, all_of_it: bool = False) -> str:
        """Return what was written since; whole lines only, unless ``all_of_it``."""
        try:
            with self.path.open("rb") as file:
                file.seek(self.read)
                data = file.read()
        except OSError:  # not there yet
            return ""
        if not all_of_it:
            data = data[: data.rfind(b"\n") + 1]
        self.read += len(data)
        return data.decode(errors="replace")


@dataclass
class FollowedJob:
    """One job that is followed."""

    dialect: Dialect
    job: Submitted
    exit_file: Path
    out: TextIO
    tails: dict[Path, Tail] = field(default_factory=dict)
    running: float | None = None  # since when it runs without a log (monotonic clock)
    host: str = ""  # the first that it ran on

    def to_the_end(self) -> State:
        """Show what changes until the job has ended, and return its state then.

        Raises:
            HvdtrainError: the batch system does not answer.
        """
        shown, wait, misses, due = "", ASK_FIRST, 0, 0.0
        while True:
            if time.monotonic() >= due:
                state, said = ask(self.dialect, self.job.id)
                wait = min(ASK_LAST, 1.2 * wait)
                due = time.monotonic() + wait
                misses = 0 if state else misses + 1
                if misses == MISSES:
                    raise HvdtrainError(f"the state of job {self.job.id} is unknown: {said}")
                for path in state.logs if state else ():
                    self.tails.setdefault(path, Tail(path))
                self.host = state.host or self.host if state else self.host
                if state and state.failure:
                    return state
                if state and state.phase in (ENDED, GONE):
                    break
                if state and state.detail != shown:
                    shown = state.detail
                    log.info("job %s: %s", self.job.id, shown)
                if state and state.phase == RUNNING:
                    self._miss_log()
            self._show()
            time.sleep(LOOK)
        return self._end(state)

    def _miss_log(self) -> None:
        """Say once why there may be no log while the job runs."""
        now = time.monotonic()
        if self.running is None:
            self.running = now
        late = self.running + NO_LOG < now and not any(path.exists() for path in self.tails)
        if late and self.dialect.name == "pbs":
            self.running = float("inf")
            log.info(
                "job %s: no log yet; where PBS's mom does not know that this directory is shared "
                "($usecp in its configuration), the log comes when the job has ended",
                self.job.id,
            )

    def _end(self, state: State) -> State:
        """Show the last lines, and how the job ended, by its own record where there is no other."""
        if state.logs or not self.tails:  # Slurm names a log of its own for tasks that wait
            logs = state.logs or self.job.logs.values()
            self.tails = {path: self.tails.get(path, Tail(path)) for path in logs}
        if state.ran:
            self._last_lines(state)
        numbers = list(self.job.logs)
        if numbers == [chain.number(self.job.id)]:
            state = self._settle(state, numbers[0])
        else:
            tasks = {one: self._settle(state.tasks.get(one, State(GONE)), one) for one in numbers}
            state = of_array(tasks)
            for one, task in tasks.items():
                path = next(iter(task.logs), None)
                where = f"; log {path}" if task.ran and path and path.exists() else ""
                log.info("task %s: %s%s", one, self._words(task), where)
        log.info("job %s: %s", self.job.id, self._words(state))
        return state

    def _words(self, state: State) -> str:
        """Say how a job or a task ended, and where its log is if it has not come."""
        if not state.ran:
            return state.detail
        code = "unknown" if state.exit_code is None else state.exit_code
        lost = [str(path) for path in state.logs if not path.exists()]
        if not lost or state.tasks:
            return f"{state.detail}, exit code {code}"
        host = state.host or self.host or "the first node of the job"
        return f"{state.detail}, exit code {code}; {self.dialect.lost_log(lost[0], host)}"

    def _settle(self, state: State, number: str) -> State:
        """Complete a state by what the script left behind: PBS may forget a job at its end."""
        if state.phase == ENDED and (state.exit_code is not None or not state.ran):
            return state
        left, path = self._left(number), self.job.logs[number]
        seen = self.running is not None and number == chain.number(self.job.id)
        if left is None and not path.exists() and not seen:
            return NEVER_RAN
        code = int(left) if left and left.strip().isdecimal() else None
        return State(ENDED, state.detail or "ended", code, state.logs or (path,))

    def _left(self, number: str) -> str | None:
        """Return what the exit code's file holds: nothing while the job runs; None without one."""
        try:
            return self.exit_file.with_name(f"{self.exit_file.name}.{number}").read_text()
        except OSError:
            return None

    def _show(self, *, all_of_it: bool = False) -> None:
        for tail in self.tails.values():
            self.out.write(tail.new(all_of_it=all_of_it))
        self.out.flush()

    def _last_lines(self, state: State) -> None:
        """Show what is left of the log, which may arrive a little later than the job's end."""
        end = time.monotonic() + DELIVERY
        asked = self.job.logs if state.exit_code is None else ()
        while time.monotonic() < end:
            if all(path.exists() for path in self.tails) and all(map(self._left, asked)):
                break
            time.sleep(LOOK)
        self._show(all_of_it=True)
