"""``submit --follow``: what becomes of a job, and the new lines of its log, until it has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from hvdtrain.batch import chain
from hvdtrain.batch.dialect import ENDED, Dialect, State
from hvdtrain.errors import HvdtrainError
from hvdtrain.launch.run import run

log = logging.getLogger(__name__)

LOOK = 1.0  # seconds between two looks at the log, which is a file
ASK_FIRST, ASK_LAST = 1.0, 10.0  # and between two questions, which are work for a whole cluster
ANSWER = 30.0  # seconds that an answer may take
MISSES = 5  # questions without an answer before we give up
DELIVERY = 10.0  # seconds in which PBS may still bring the log of a job that has ended
INTERRUPTED = 130  # what a shell reports after Ctrl-C


@dataclass(frozen=True)
class Ended:
    """How the following ended, most often because the job has."""

    state: str
    """In the batch system's words."""
    code: int
    """Exit code of the job; of a chain, of its last job that ran."""


def follow(dialect: Dialect, ids: Sequence[str], chain_file: Path | None, out: TextIO) -> Ended:
    """Follow a job, or a chain of them, to the end; Ctrl-C ends only the following.

    Args:
        dialect: whom to ask.
        ids: the job, or the jobs of a chain in order.
        chain_file: what the jobs of a chain wrote to one another.
        out: where the lines of the log go.

    Raises:
        HvdtrainError: the batch system no longer answers.
    """
    ended = Ended("", 0)
    for job in ids:
        try:
            state = Watch(dialect, job, out).to_the_end()
        except KeyboardInterrupt:
            rest = ids[ids.index(job) :]
            log.info("\njob %s goes on; to end it: %s", job, dialect.delete(rest).show())
            return Ended("running", INTERRUPTED)
        if state.exit_code is None:
            raise HvdtrainError(
                f"job {job} has ended, but {dialect.name} does not tell with which exit code; see "
                f"{', '.join(map(str, state.logs)) or 'its log'}"
            )
        ended = Ended(state.detail, state.exit_code)
        if chain_file and chain.is_last(chain.read(chain_file), job):
            break
    return ended


@dataclass
class Tail:
    """The lines of a file as they come."""

    path: Path
    read: int = 0
    """Bytes that have been shown."""

    def new(self, *, all_of_it: bool = False) -> str:
        """What was written since; whole lines only, unless ``all_of_it``."""
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
class Watch:
    """One job under observation."""

    dialect: Dialect
    job: str
    out: TextIO
    tails: dict[Path, Tail] = field(default_factory=dict)

    def to_the_end(self) -> State:
        """Show what changes until the job has ended; how it stands then.

        Raises:
            HvdtrainError: the batch system no longer knows the job, or does not answer.
        """
        shown, wait, misses, due = "", ASK_FIRST, 0, 0.0
        while True:
            if time.monotonic() >= due:
                state, said = self._ask()
                wait = min(ASK_LAST, 1.2 * wait)
                due = time.monotonic() + wait
                misses = 0 if state else misses + 1
                if misses == MISSES:
                    raise HvdtrainError(f"nobody can tell how job {self.job} stands: {said}")
                if state:
                    for path in state.logs:
                        self.tails.setdefault(path, Tail(path))
                if state and state.phase == ENDED:
                    break
                if state and state.detail != shown:
                    shown = state.detail
                    log.info("job %s: %s", self.job, shown)
            self._show()
            time.sleep(LOOK)
        self._last_lines()
        log.info("job %s: %s, exit code %s", self.job, state.detail, state.exit_code)
        return state

    def _ask(self) -> tuple[State | None, str]:
        """The state, or None and what was said instead."""
        said = ""
        for query in self.dialect.queries(self.job):
            result = run(query.command, timeout=ANSWER)
            if result.ok and (state := query.read(result.output)):
                return state, ""
            said = said or " ".join(result.output.split())
        return None, said

    def _show(self, *, all_of_it: bool = False) -> None:
        for tail in self.tails.values():
            self.out.write(tail.new(all_of_it=all_of_it))
        self.out.flush()

    def _last_lines(self) -> None:
        end = time.monotonic() + DELIVERY
        while not all(path.exists() for path in self.tails) and time.monotonic() < end:
            time.sleep(LOOK)
        self._show(all_of_it=True)
