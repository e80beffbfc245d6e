"""What differs between batch systems: texts, argument lists and parsing, all of it pure.

``pbs.py`` and ``slurm.py`` hold one each; ``local.py`` is the absence of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.batch.job import Job
from hvdtrain.batch.site import Site
from hvdtrain.launch.run import Command

WAITING, RUNNING, ENDED, GONE = "waiting", "running", "ended", "gone"

SIGNALLED = 128  # a shell's exit code for a program that signal n ended: 128 + n
WALLTIME_OVER = 124  # what timeout(1) answers


@dataclass(frozen=True)
class State:
    """How a job stands."""

    phase: str
    """``waiting``, ``running``, ``ended``, or ``gone``: the batch system knows no such job."""
    detail: str = ""
    """The batch system's own words."""
    exit_code: int | None = None
    """As a shell would see it, once the job has ended; None where the batch system tells none."""
    logs: tuple[Path, ...] = field(default=())
    """Files of its output, one for each task of an array."""
    ran: bool = True
    """Whether the job began; False once it has ended without."""
    tasks: Mapping[str, State] = field(default_factory=dict)
    """How each task of an array stands, by its number."""


NEVER_RAN = State(ENDED, "deleted before it ran", ran=False)


def of_array(tasks: Mapping[str, State], phase: str | None = None) -> State:
    """Sum up how an array stands; its exit code is the largest of its tasks'.

    Args:
        tasks: by number. One that ended without an exit code counts as failed, with 1.
        phase: of the array where the batch system tells; else it has ended when all tasks have.
    """
    states = tasks.values()
    phases = {state.phase for state in states}
    phase = phase or next(one for one in (RUNNING, WAITING, ENDED) if one in phases)
    codes = [1 if state.exit_code is None else state.exit_code for state in states]
    return State(
        phase,
        ", ".join(sorted({state.detail for state in states})),
        max(codes) if phase == ENDED else None,
        tuple(dict.fromkeys(log for state in states for log in state.logs)),
        any(state.ran for state in states),
        tasks,
    )


@dataclass(frozen=True)
class Query:
    """A way to ask how a job stands."""

    command: Command
    read: Callable[[str], State | None]
    """Of its output; None where it tells nothing."""


class Dialect(ABC):
    """A batch system."""

    name: str
    """As in ``--scheduler``."""
    suffix: str
    """Of a script's file name."""
    shebang: str = "#!/bin/bash -l"  # a login shell: there, and only there, modules are for sure
    change: str
    """How a user sets a variable of the script, for its reader."""
    nodes: str
    """Bash for the number of nodes that the job got."""
    place: tuple[str, ...] = ()
    """Bash that makes up for what the batch system does to a job before it starts."""
    in_job: bool = True
    """Whether the script runs in a job, with a directory, a walltime and signals of its own."""

    @abstractmethod
    def directives(self, job: Job, site: Site) -> list[str]:
        """The lines that tell the batch system what is asked of it."""

    @abstractmethod
    def submit(self, script: str, log: str, *, array: str | None, after: str | None) -> Command:
        """Hand in ``script``.

        Args:
            script: its path.
            log: path of the file that its output goes to.
            array: range of its tasks.
            after: job whose end, whatever it is, this one waits for.
        """

    def log_path(self, log: str, job: Job, job_id: str, task: str = "") -> Path:
        """Where the log is that ``submit`` asked for.

        Args:
            log: as given to ``submit``.
            job: what was submitted.
            job_id: what became of it.
            task: number of the task of an array.
        """
        return Path(f"{log}.{task}" if task else log)

    @abstractmethod
    def read_id(self, output: str) -> str | None:
        """The job's id, from what ``submit`` wrote; None where there is none."""

    @abstractmethod
    def queries(self, job_id: str) -> Sequence[Query]:
        """Ways to ask how a job stands; the first that answers counts."""

    @abstractmethod
    def delete(self, job_ids: Sequence[str]) -> Command:
        """Take jobs away, waiting or running."""
