"""What differs between batch systems: texts, argument lists and parsing, all of it pure.

``pbs.py`` and ``slurm.py`` hold one each; ``Local`` is the absence of both.
"""

from __future__ import annotations

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
WALLTIME_OVER = 124  # what timeout(1) answers


@dataclass(frozen=True)
class State:
    """The state of a job."""

    phase: str  # one of those above; ``gone``: the batch system knows no such job
    detail: str = ""  # the batch system's own words
    exit_code: int | None = None  # of a job that has ended, as a shell would see it
    logs: tuple[Path, ...] = field(default=())  # files of its output, one per task of an array
    ran: bool = True  # whether the job began; False once it has ended without
    tasks: Mapping[str, State] = field(default_factory=dict)  # of an array, by number
    host: str = ""  # the first that it ran on
    failure: str = ""  # why the batch system will not start it, though it keeps it


NEVER_RAN = State(ENDED, "deleted before it ran", ran=False)


def of_array(tasks: Mapping[str, State], phase: str | None = None) -> State:
    """Sum up the state of an array; its exit code is the largest of its tasks'.

    Args:
        tasks: by number. One that ended without an exit code counts as failed, with 1.
        phase: of the array where it is known; else it has ended when all tasks have.
    """
    states = tasks.values()
    phases = {state.phase for state in states}
    phase = phase or next(one for one in (RUNNING, WAITING, ENDED) if one in phases)
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
    """A way to ask for the state of a job."""

    command: Command
    read: Callable[[str], State | None]  # parses its output; None where there is no state in it


class Dialect(ABC):
    """A batch system."""

    name: str  # as in ``--scheduler``
    suffix: str  # of a script's file name
    shebang: str = "#!/bin/bash -l"  # a login shell: there, and only there, modules are for sure
    change: str  # how a user sets a variable of the script, for its reader
    nodes: str  # bash for the number of nodes that the job got
    prologue: tuple[str, ...] = ()  # bash that undoes what the batch system does to a job
    in_job: bool = True  # whether there is a job, with a walltime and signals of its own

    @abstractmethod
    def directives(self, job: Job, site: Site) -> list[str]:
        """Return the lines that request the resources of the job."""

    @abstractmethod
    def submit(self, script: str, log: str, *, array: str | None, after: str | None) -> Command:
        """Return the command that submits ``script``.

        Args:
            script: its path.
            log: path of the file that its output goes to.
            array: range of its tasks.
            after: job whose end, whatever it is, this one waits for.
        """

    def log_path(self, log: str, job: Job, job_id: str, task: str = "") -> Path:
        """Return where the log is that ``submit`` asked for.

        Args:
            log: as given to ``submit``.
            job: what was submitted.
            job_id: the id that it got.
            task: number of the task of an array.
        """
        return Path(f"{log}.{task}" if task else log)

    def lost_log(self, log: str, host: str) -> str:
        """Return where to look for a log that has not come to ``log``, of a job that has ended."""
        return f"its log has not come: look for {log} on {host}"

    @abstractmethod
    def read_id(self, output: str) -> str | None:
        """Return the job's id from the output of ``submit``; None where there is none."""

    @abstractmethod
    def queries(self, job_id: str) -> Sequence[Query]:
        """Return the ways to ask for the state of a job; the first that answers counts."""

    @abstractmethod
    def delete(self, job_ids: Sequence[str]) -> Command:
        """Return the command that deletes jobs, waiting or running."""


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
    def submit(self, script: str, log: str, *, array: str | None, after: str | None) -> Command:
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
