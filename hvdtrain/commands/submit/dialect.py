"""The interface to batch systems: texts, argument lists and parsing, all pure functions.

``pbs.py`` and ``slurm.py`` implement one each; ``Local`` is a machine without one.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from typing_extensions import override

from hvdtrain.commands.submit.job import Job
from hvdtrain.commands.submit.site import Site
from hvdtrain.system.runtime.command import Command

WAITING, RUNNING, ENDED, GONE = "waiting", "running", "ended", "gone"

SIGNALLED = 128  # a shell's exit code for a program that signal n ended: 128 + n
WALLTIME_OVER = 124  # as of timeout(1)
MAX_NAME, MAX_PATH = 255, 4096  # bytes of a file's name, and of a path


@dataclass(frozen=True)
class State:
    """The state of a job."""

    phase: str  # one of the above; ``gone``: the batch system has no such job
    detail: str = ""  # in the batch system's terms
    exit_code: int | None = None  # of a job that has ended, as in a shell
    logs: tuple[Path, ...] = field(default=())  # its log files, one per task of an array
    ran: bool = True  # whether the job ran; False once it has ended before
    tasks: Mapping[str, State] = field(default_factory=dict)  # of an array, by number
    host: str = ""  # its first host
    failure: str = ""  # reason why the batch system holds it forever; empty: none


def log_files(path: str) -> tuple[Path, ...]:
    """Return the log that a batch system reports; none if no file can have such a path."""
    possible = all(len(os.fsencode(part)) <= MAX_NAME for part in path.split("/"))
    return (Path(path),) if path and possible and len(path) < MAX_PATH else ()


NEVER_RAN = State(ENDED, "deleted before it ran", ran=False)


def array_state(tasks: Mapping[str, State], phase: str | None = None) -> State:
    """Return the state of an array; its exit code is the largest of its tasks.

    Args:
        tasks: by number. A task that ended without an exit code counts as failed, with 1.
        phase: of the array; None: it has ended when all tasks have.
    """
    states = tasks.values()
    phases = {state.phase for state in states}
    phase = phase or next(name for name in (RUNNING, WAITING, ENDED) if name in phases)
    codes = [1 if state.exit_code is None else state.exit_code for state in states]
    details = Counter(state.detail for state in states)
    counts = [f"{number} {detail}" for detail, number in sorted(details.items())]
    return State(
        phase,
        ", ".join(details if len(details) == 1 else counts),
        max(codes) if phase == ENDED else None,
        tuple(dict.fromkeys(log for state in states for log in state.logs)),
        any(state.ran for state in states),
        tasks,
        failure=next((state.failure for state in states if state.failure), ""),
    )


@dataclass(frozen=True)
class Query:
    """A query for the state of a job."""

    command: Command
    read: Callable[[str], State | None]  # parses its output; None: it has no state


class Dialect(ABC):
    """A batch system."""

    name: str  # as in ``--scheduler``
    suffix: str  # of a script's file name
    shebang: str = "#!/bin/bash -l"  # a login shell: only there modules are always available
    change: str  # how to set a variable of the script, for its comment
    listing: str = ""  # the command that lists jobs
    stop: tuple[str, ...] = ()  # the command by which a running job saves and ends, without its id
    inherits: bool = True  # whether a job has the environment of its submission
    nodes: str  # bash expression for the number of nodes of the job
    prologue: tuple[str, ...] = ()  # bash that undoes effects of the batch system on a job
    in_job: bool = True  # whether there is a batch job, with a walltime and signals

    @abstractmethod
    def directives(self, job: Job, site: Site) -> list[str]:
        """Return the lines that request the resources of the job."""

    @abstractmethod
    def submit(self, script: str, log: str, *, array: str | None, waits: str | None) -> Command:
        """Return the command that submits ``script``.

        Args:
            script: its path.
            log: path of the file that its output goes to.
            array: range of its tasks.
            waits: dependency on other jobs, instead of that in the script: a command line
                replaces a directive.
        """

    def log_path(self, log: str, job: Job, job_id: str, task: str = "") -> Path:
        """Return the path of the ``log`` passed to ``submit``, or that of a task of an array."""
        return Path(f"{log}.{task}" if task else log)

    def lost_log(self, log: str, host: str) -> str:
        """Return where to find a log that is not at ``log``, of a job that has ended."""
        return f"its log was not delivered: see {log} on {host}"

    @abstractmethod
    def read_id(self, output: str) -> str | None:
        """Return the job's id from the output of ``submit``; None: there is none."""

    @abstractmethod
    def queries(self, job_id: str) -> Sequence[Query]:
        """Return the queries for the state of a job; the first with a result counts."""

    @abstractmethod
    def delete(self, job_ids: Sequence[str]) -> Command:
        """Return the command that deletes waiting or running jobs."""


class Local(Dialect):
    """One machine without a batch system."""

    name, suffix = "none", ".sh"
    shebang = "#!/bin/bash"
    change = "NAME=VALUE bash SCRIPT"
    nodes = "1"
    in_job = False

    @override
    def directives(self, job: Job, site: Site) -> list[str]:
        return []

    @override
    def submit(self, script: str, log: str, *, array: str | None, waits: str | None) -> Command:
        return Command(("bash", script))

    @override
    def read_id(self, output: str) -> str | None:
        return None

    @override
    def queries(self, job_id: str) -> Sequence[Query]:
        return ()

    @override
    def delete(self, job_ids: Sequence[str]) -> Command:
        return Command(("true",))
