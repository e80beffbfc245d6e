"""End time of the batch job, queried once at its start, so that a training can save in time.

Generated job scripts query it before they start the ranks, by ``python -m`` with this module, and
export it, so that no rank has to start another program after MPI is initialized.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.system.runtime.command import Command, run

ENDS = "HVDTRAIN_WALLTIME_ENDS"
"""End time of the job in seconds since 1970; empty: unknown, do not query again."""

QUERY_TIMEOUT = 10.0  # timeout of a query in seconds; a busy batch system must not delay a training

IS_NEAR = "the walltime is near"  # the reason that rank 0 reports
RESERVE = 10.0  # seconds for the end of the job script, and for clock differences
FIRST_SAVE = 10.0  # assumed seconds of a save until one is measured

_CLOCK = re.compile(r"(?:(?:(\d{1,9})-)?(\d{1,9}):)?(\d{1,2}):(\d{2})")


def parse_clock(text: str) -> int | None:
    """Return the seconds of ``M:SS``, ``H:MM:SS`` or ``D-HH:MM:SS``, as written by PBS and Slurm.

    A plain number gives None: it means seconds in PBS and minutes in Slurm.
    """
    match = _CLOCK.fullmatch(text.strip())
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return ((24 * days + hours) * 60 + minutes) * 60 + seconds


def show_clock(seconds: int) -> str:
    """Return ``seconds`` as HH:MM:SS, accepted by PBS and Slurm."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02d}:{minutes:02d}:{seconds:02d}"


@dataclass
class Walltime:
    """End time of the job, and the time that a training needs to stop before it."""

    ends: float | None  # by ``time.monotonic``; None: unlimited, or watched by another rank
    longest_save: float = FIRST_SAVE  # maximum seconds of a save so far

    def saved(self, seconds: float) -> None:
        """Record that a save took ``seconds``."""
        self.longest_save = max(self.longest_save, seconds)

    def is_near(self, longest_step: float) -> bool:
        """Return whether less time is left than for two steps, two saves and the reserve."""
        if self.ends is None:
            return False
        return time.monotonic() + 2 * (longest_step + self.longest_save) + RESERVE > self.ends


def ends_at(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the end time of this process's job, in seconds since 1970.

    It is read from the environment, else queried from the batch system, which takes up to 10 s.
    Call it on one rank only.

    Returns:
        None outside of a job, without a limit, or if the batch system does not answer.
    """
    if ENDS in environ:
        return _number(environ[ENDS])
    if (known := _number(environ.get("SLURM_JOB_END_TIME", ""))) is not None:
        return known
    command = walltime_query(environ)
    result = run(command, timeout=QUERY_TIMEOUT) if command else None
    job = environ.get("SLURM_JOB_ID", "")
    left = read_answer(result.output, job) if result and result.ok else None
    return None if left is None else time.time() + left


def seconds_left(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return the seconds until this process's job ends; None as for ``ends_at``.

    For programs of users (docs/jobs.md).
    """
    ends = ends_at(environ)
    return None if ends is None else ends - time.time()


def walltime_query(environ: Mapping[str, str]) -> Command | None:
    """Return the command that queries the batch system for this job; None outside of a job."""
    # Slurm with PBS wrappers sets both; its qstat does not report the remaining time.
    if job := environ.get("SLURM_JOB_ID"):
        return Command(("squeue", "-h", "-j", job, "-o", "%A %L"))
    if job := environ.get("PBS_JOBID"):
        return Command(("qstat", "-f", job))
    return None


def read_answer(text: str, job: str = "") -> int | None:
    """Return the remaining seconds from the output of squeue or qstat; None without a limit.

    squeue reports the remaining time of ``job``, and of the other tasks of an array or the other
    components of a heterogeneous job if theirs has its ID; qstat the limit and the used time.
    """
    if "=" not in text:
        answers = dict(line.split(maxsplit=1) for line in text.splitlines() if " " in line.strip())
        return parse_clock(answers.get(job, ""))
    values = dict(re.findall(r"^[ \t]*([\w.]+) = (.*)$", text, re.MULTILINE))
    limit = parse_clock(values.get("Resource_List.walltime", ""))
    used = parse_clock(values.get("resources_used.walltime", "")) or 0
    return None if limit is None else limit - used


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def main(words: list[str]) -> int:
    """Print the end time of the job: ``python -m hvdtrain.system.runtime.walltime [H:MM:SS]``.

    The argument is the requested walltime, counted from now if the batch system does not answer.
    Without an answer and an argument the line is empty.
    """
    # A job that is submitted by another one may inherit the end of that one.
    end = ends_at({name: value for name, value in os.environ.items() if name != ENDS})
    requested = parse_clock(words[0]) if words else None
    if end is None and requested is not None:
        end = time.time() + requested
    sys.stdout.write("\n" if end is None else f"{end:.0f}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
